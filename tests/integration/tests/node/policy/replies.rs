//! Tests that packets of an allowed connection pass, regardless of the policies of the reverse direction.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{
    patience, require,
    traffic::{NoAnswer, Servers, new_token, ping, tcp_get, udp_ask},
    world::{NinePods, index_of},
};

use super::{PATIENCE, PORT, at, enforce};

const DENY_EGRESS: &str = "{podSelector: {}, policyTypes: [Egress]}";
const DENY_INGRESS: &str = "{podSelector: {}, policyTypes: [Ingress]}";

#[tokio::test(flavor = "multi_thread")]
async fn replies_pass_under_default_deny_of_their_direction() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("replies").await?;
    let _server = Servers::start(&world.member(index_of("x/a")).inside, "x/a", PORT)?;
    let _other = Servers::start(&world.member(index_of("y/a")).inside, "y/a", PORT)?;
    // x may not send and y may not receive; y opens connections, x answers.
    enforce(&mut world, &[("x", DENY_EGRESS), ("y", DENY_INGRESS)]).await?;
    for v4 in [true, false] {
        let (x, y) = (at(&world, "x/a", v4, PORT).ip(), at(&world, "y/a", v4, PORT).ip());
        let (from_x, from_y) = (
            &world.member(index_of("x/a")).inside,
            &world.member(index_of("y/a")).inside,
        );
        ensure!(tcp_get(from_y, x, PORT, patience())?.identity == "x/a");
        ensure!(udp_ask(from_y, x, PORT, patience())?.identity == "x/a");
        ping(from_y, x, &new_token(), patience())?;
        ensure!(tcp_get(from_x, y, PORT, PATIENCE) == Err(NoAnswer::Timeout));
        ensure!(udp_ask(from_x, y, PORT, PATIENCE) == Err(NoAnswer::Timeout));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_request_is_no_reply_even_with_the_identifier_of_one() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("echo").await?;
    enforce(&mut world, &[("x", DENY_EGRESS), ("y", DENY_INGRESS)]).await?;
    for v4 in [true, false] {
        let (x, y) = (at(&world, "x/a", v4, PORT).ip(), at(&world, "y/a", v4, PORT).ip());
        let (from_x, from_y) = (
            &world.member(index_of("x/a")).inside,
            &world.member(index_of("y/a")).inside,
        );
        // Both use the id of this process as their identifier.
        for order in ["before", "after"] {
            let denied = ping(from_x, y, &new_token(), PATIENCE);
            ensure!(
                denied == Err(NoAnswer::Timeout),
                "{order} y has asked, IPv4 {v4}: {denied:?}"
            );
            ping(from_y, x, &new_token(), patience())?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn icmp_errors_about_an_allowed_flow_are_part_of_it() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("errors").await?;
    let only_udp = "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress, Egress], egress: [{ports: [{protocol: UDP, port: 9}]}]}";
    enforce(&mut world, &[("x", only_udp), ("y", DENY_EGRESS)]).await?;
    for v4 in [true, false] {
        // The port is closed: y's stack answers with port unreachable, although y may not send and x may not receive.
        let refused = refused(&world, at(&world, "y/a", v4, 9))?;
        ensure!(refused, "no port unreachable comes back, IPv4 {v4}");
        let silent = !self::refused(&world, at(&world, "y/a", v4, 10))?;
        ensure!(silent, "port 10 is not allowed, IPv4 {v4}");
    }
    Ok(())
}

/// Whether a datagram from x/a is refused.
fn refused(world: &NinePods, to: SocketAddr) -> Result<bool> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    world.member(index_of("x/a")).inside.enter(|| {
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let received = socket.send(b"anyone?").and_then(|_| socket.recv(&mut [0; 16]));
            match received {
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Ok(true),
                // The kernel limits the rate of such errors.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) => return Err(e.into()),
                Ok(_) => anyhow::bail!("{to} answers"),
            }
        }
        Ok(false)
    })?
}
