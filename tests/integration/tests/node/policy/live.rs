//! Tests open connections during changes of policies.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    frames::PacketSocket,
    patience, require,
    traffic::{Servers, Stream},
    world::{Member, Net, NinePods, PolicyText, Setting, index_of},
};

use super::{PATIENCE, PORT, at, enforce};

const UPDATES: usize = 1000;
/// Number of policies that change together: the agent waits for a pause after each change of a file.
const AT_ONCE: usize = 20;

/// A TCP connection and a UDP socket from y/a to a server in x/a, both already used.
struct Open {
    tcp: BufReader<TcpStream>,
    udp: UdpSocket,
}

impl Open {
    fn to(client: &Member, server: SocketAddr) -> Result<Self> {
        let any = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let (tcp, udp) = client.inside.enter(|| {
            let udp = UdpSocket::bind(any)?;
            udp.connect(server)?;
            anyhow::Ok((TcpStream::connect_timeout(&server, patience())?, udp))
        })??;
        tcp.set_read_timeout(Some(PATIENCE))?;
        udp.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            tcp: BufReader::new(tcp),
            udp,
        })
    }

    fn send(&mut self, token: &str) -> Result<()> {
        self.tcp.get_mut().write_all(format!("{token}\n").as_bytes())?;
        Ok(self.udp.send(token.as_bytes()).map(drop)?)
    }

    /// Whether both returned `token`.
    fn answered(&mut self, token: &str) -> [bool; 2] {
        let (mut line, mut datagram) = (String::new(), [0; 512]);
        let tcp = self.tcp.read_line(&mut line).is_ok() && line.contains(token);
        let udp = self.udp.recv(&mut datagram);
        [
            tcp,
            udp.is_ok_and(|length| String::from_utf8_lossy(&datagram[..length]).contains(token)),
        ]
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn running_connection_stops_on_the_first_packet_after_a_denying_policy() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("stop").await?;
    let _server = Servers::start(&world.member(index_of("x/a")).inside, "x/a", PORT)?;
    for (denied, policy) in [
        (
            "at the receiver",
            ("x", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress]}"),
        ),
        (
            "at the sender",
            ("y", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress]}"),
        ),
    ] {
        for v4 in [true, false] {
            let what = || format!("{denied}, IPv4 {v4}");
            let mut open = Open::to(world.member(index_of("y/a")), at(&world, "x/a", v4, PORT))?;
            open.send("before")?;
            ensure!(open.answered("before") == [true; 2], "{} before the policy", what());
            enforce(&mut world, &[policy]).await?;
            let arriving = PacketSocket::open(&world.member(index_of("x/a")).inside, "eth0")?;
            open.send("first")?;
            let leaked = arriving.receive(PATIENCE, |frame| frame.windows(5).any(|bytes| bytes == b"first"))?;
            ensure!(leaked.is_none(), "{}: a packet arrives: {leaked:?}", what());
            ensure!(open.answered("first") == [false; 2], "{} under the policy", what());
            enforce(&mut world, &[]).await?;
            // TCP retransmits its unanswered segment at increasing intervals.
            open.tcp.get_ref().set_read_timeout(Some(patience()))?;
            open.send("after")?;
            let mut line = String::new();
            open.tcp.read_line(&mut line).with_context(what)?;
            ensure!(line.contains("first"), "{}: {line:?} once the policy is gone", what());
            ensure!(
                open.answered("after") == [true; 2],
                "{} once the policy is gone",
                what()
            );
        }
    }
    Ok(())
}

/// Policies for pods of z, and one for the connection's own ends that allows it, different in each round.
fn unrelated(round: usize) -> Vec<PolicyText> {
    let port = |n: usize| 10_000 + (round * AT_ONCE + n) % 20_000;
    let mut policies = vec![PolicyText::new(
        "x",
        "allow",
        &format!("{{podSelector: {{}}, ingress: [{{ports: [{{port: {PORT}}}, {{protocol: UDP, port: {PORT}}}]}}]}}"),
    )];
    for n in 1..AT_ONCE {
        let spec = match n % 3 {
            0 => format!(
                "{{podSelector: {{}}, ingress: [{{from: [{{podSelector: {{}}}}], ports: [{{port: {}}}]}}]}}",
                port(n)
            ),
            1 => format!(
                "{{podSelector: {{}}, policyTypes: [Egress], egress: [{{to: [{{ipBlock: {{cidr: 203.0.113.{}/32}}}}]}}]}}",
                port(n) % 256
            ),
            _ => format!(
                "{{podSelector: {{}}, ingress: [{{from: [{{namespaceSelector: {{matchLabels: {{n: v{}}}}}}}]}}]}}",
                port(n)
            ),
        };
        policies.push(PolicyText::new("z", &format!("unrelated-{n}"), &spec));
    }
    // For the receiver itself: its rules change, but not their decision on this connection.
    policies.push(PolicyText::new(
        "x",
        "more",
        &format!("{{podSelector: {{}}, ingress: [{{ports: [{{port: {}}}]}}]}}", port(0)),
    ));
    policies
}

#[tokio::test(flavor = "multi_thread")]
async fn an_allowed_connection_loses_nothing_through_1000_unrelated_policy_updates() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("updates").await?;
    let _server = Servers::start(&world.member(index_of("x/a")).inside, "x/a", PORT)?;
    world.apply(Net::Default, &unrelated(0), &Setting::default()).await?;
    let mut streams = Vec::new();
    for v4 in [true, false] {
        let (client, to) = (&world.member(index_of("y/a")).inside, at(&world, "x/a", v4, PORT));
        streams.push(("UDP", v4, Stream::udp(client, to)?));
        streams.push(("TCP", v4, Stream::tcp(client, to)?));
    }
    let mut updated = 0;
    for round in 1.. {
        let (before, after) = (unrelated(round - 1), unrelated(round));
        updated += after.iter().filter(|policy| !before.contains(policy)).count();
        world.apply(Net::Default, &after, &Setting::default()).await?;
        if updated >= UPDATES {
            break;
        }
    }
    for (what, v4, stream) in streams {
        stream.wait_for_answers(1001_u64.saturating_sub(stream.answered()))?;
        let report = stream.stop();
        println!("{what} IPv4 {v4}: {report:?}");
        ensure!(report.sent > 1000, "{what} IPv4 {v4}: {} questions only", report.sent);
        report.assert_whole("x/a");
    }
    println!("{updated} policies were updated");
    Ok(())
}
