//! Tests that flows stop leaving with an address that is not theirs any more, also while their peers continue to send
//! to it.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod,
    frames::PacketSocket,
    node::{FABRIC_V4, NODE_V4},
    patience, require,
};

use super::world::{World, masquerading, pool, server};

const PAUSE: Duration = Duration::from_millis(5);
/// Datagrams with the new source in a row, after which none may have the old one.
const IN_A_ROW: u32 = 20;
/// Datagrams after that, sent over more than a second.
const MANY: u32 = 200;
const OLD: &str = "198.51.100.70";
const NEW: &str = "198.51.100.71";

fn policy(address: &str) -> Manifest {
    let spec = format!("{{podSelector: {{}}, egressAddresses: [{address}]}}");
    Manifest::file(
        "moved.yaml",
        format!(
            "apiVersion: kni.dev/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: moved, namespace: team}}\nspec: {spec}\n"
        ),
    )
}

/// Answers, and from then on sends to every address that it has ever received from.
fn persist(socket: &UdpSocket, stop: &AtomicBool) -> std::io::Result<()> {
    socket.set_read_timeout(Some(PAUSE))?;
    let (mut known, mut buffer) = (Vec::<SocketAddr>::new(), [0; 64]);
    while !stop.load(Ordering::Relaxed) {
        if let Ok((_, from)) = socket.recv_from(&mut buffer)
            && !known.contains(&from)
        {
            known.push(from);
        }
        for to in &known {
            // An address that the node has given up is not reachable.
            drop(socket.send_to(b"more", to));
        }
    }
    Ok(())
}

/// Sends until `stop`.
fn ask(socket: &UdpSocket, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        drop(socket.send(b"question"));
        thread::sleep(PAUSE);
    }
}

/// The source addresses, of those given, of datagrams to the server that leave the node.
struct Sources {
    capture: PacketSocket,
    of: [std::net::Ipv4Addr; 2],
}

impl Sources {
    fn open(router: &Namespaces, of: [&str; 2]) -> Result<Self> {
        Ok(Self {
            capture: PacketSocket::open(router, "fabric0")?,
            of: [of[0].parse()?, of[1].parse()?],
        })
    }

    fn next(&self) -> Result<String> {
        let frame = self.capture.receive(patience(), |frame| {
            frame.get(12..14) == Some(&[8, 0])
                && frame.get(23) == Some(&17)
                && frame.get(30..34) == Some(&[203, 0, 113, 80])
                && self.of.iter().any(|source| frame.get(26..30) == Some(&source.octets()))
        })?;
        let frame = frame.context("no datagram leaves")?;
        let source: [u8; 4] = frame[26..30].try_into()?;
        Ok(std::net::Ipv4Addr::from(source).to_string())
    }

    /// Waits until several datagrams in a row have this source.
    fn until(&self, source: &str) -> Result<()> {
        let (begun, mut in_a_row) = (Instant::now(), 0);
        while in_a_row < IN_A_ROW {
            let found = self.next()?;
            in_a_row = if found == source { in_a_row + 1 } else { 0 };
            ensure!(
                begun.elapsed() < patience(),
                "datagrams leave with {found}, not {source}"
            );
        }
        Ok(())
    }

    /// Checks that many more datagrams have this source.
    fn remain(&self, source: &str) -> Result<()> {
        for number in 0..MANY {
            let found = self.next()?;
            ensure!(found == source, "datagram {number} leaves with {found}, not {source}");
        }
        Ok(())
    }
}

/// Keeps a flow busy in both directions over a change, and checks which addresses it leaves with before and after.
fn over_change(world: &World, pod: &Pod, [old, new]: [&str; 2], change: impl FnOnce() -> Result<()>) -> Result<()> {
    let there = world.outside.server.enter(|| UdpSocket::bind(server(true)))??;
    let socket = pod.inside.enter(|| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(server(true)).map(|()| socket)
    })??;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let serving = scope.spawn(|| persist(&there, &stop));
        let asking = scope.spawn(|| ask(&socket, &stop));
        let compared = (|| -> Result<()> {
            let sources = Sources::open(&world.outside.router, [old, new])?;
            sources.until(old).context("before the change")?;
            sources.remain(old).context("before the change")?;
            change()?;
            sources.until(new).context("after the change")?;
            sources.remain(new).context("after the change")?;
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        asking.join().expect("a client does not panic");
        serving.join().expect("a server does not panic").context("the server")?;
        compared
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_moves_to_another_address_takes_its_flows_along() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("moved", masquerading(), &[]).await?;
    let pod = world.stage.pod("moved").await?;
    Manifest::apply(
        &[pool("moved", &["198.51.100.64/28"], "team"), policy(OLD)],
        &world.stage.node,
    )?;
    world.wait_for_uplink(|uplink| uplink.dedicated == [OLD]).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    tokio::task::block_in_place(|| {
        over_change(&world, &pod, [OLD, NEW], || {
            Manifest::apply(&[policy(NEW)], &world.stage.node)
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_gets_another_address_takes_its_flows_along() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("renumbered", masquerading(), &[]).await?;
    let pod = world.stage.pod("renumbered").await?;
    let node = &world.stage.node;
    node.enter(|| std::fs::write("/proc/sys/net/ipv4/conf/uplink0/promote_secondaries", "1"))??;
    tokio::task::block_in_place(|| {
        over_change(&world, &pod, [NODE_V4, NEW], || {
            node.add_address("uplink0", &format!("{NEW}/24"))?;
            node.ip(&[
                &format!("address del {NODE_V4}/24 dev uplink0"),
                &format!("route replace default via {FABRIC_V4}"),
            ])
        })
    })
}
