//! Tests a pod that opens flows without limit: it fills its own share, and the flows of others survive.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_integration::{
    AgentOptions, Manifest, Node, Pod, Stage,
    frames::{Ip, Link, PacketSocket, Payload, TcpFlags},
    patience, require,
    stage::address,
    traffic::{Servers, Stream, tcp_get},
};
use serde_json::Value;

use super::PORT;

/// Rows of each table: a tenth of the opened flows.
const ROWS: &str = "8192";
const PACKETS: usize = 80_000;

/// The received packets in the counter of the pod's own interface.
fn received(pod: &Pod) -> Result<u64> {
    let text = pod.inside.run("ip", &["-j", "-s", "link", "show", "dev", "eth0"])?;
    let shown: Value = serde_json::from_str(&text)?;
    shown[0]["stats64"]["rx"]["packets"].as_u64().context("no counter")
}

async fn stage() -> Result<Stage> {
    let node = Node::new("flood")?;
    Stage::with(node, AgentOptions::new(Manifest::overlapping(), &["--max-flows", ROWS])).await
}

/// Opens flows of two transports and both families, more than the tables hold.
async fn flood(stage: &Stage, flooder: &Pod, hole: &Pod) -> Result<()> {
    let [own, gateway] = stage.macs(flooder, "eth0").await?;
    let (socket, link) = (PacketSocket::open(&flooder.inside, "eth0")?, Link::new(own, gateway));
    let mut rng = Rng::with_seed(1);
    for number in 0..PACKETS {
        let v4 = number % 2 == 0;
        let ports = (rng.u16(1024..), rng.u16(1..));
        let payload = if number % 4 < 2 {
            Payload::tcp(ports.0, ports.1, TcpFlags::SYN)
        } else {
            Payload::udp(ports.0, ports.1, b"flood")
        };
        let packet = Ip::new(address(flooder, v4), address(hole, v4)).packet(&payload);
        socket.send(&link.frame(&packet))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_pod_leaves_the_flows_of_others_alive() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let stage = stage().await?;
    let (server, client) = (stage.pod("server").await?, stage.pod("client").await?);
    let (flooder, hole) = (stage.pod("flooder").await?, stage.pod("hole").await?);
    // No stack answers, because the flows would end immediately.
    hole.inside
        .nft("add table inet mute\nadd chain inet mute in { type filter hook input priority -300; policy drop; }\n")?;
    let _servers = Servers::start(&server.inside, "server", PORT)?;
    let counted = received(&server)?;
    let (mut streams, mut idle) = (Vec::new(), Vec::new());
    for v4 in [true, false] {
        let to = SocketAddr::new(address(&server, v4), PORT);
        streams.push(Stream::udp(&client.inside, to)?);
        streams.push(Stream::tcp(&client.inside, to)?);
        // A connection that is idle in the meantime.
        let stream = client.enter(|| TcpStream::connect_timeout(&to, patience()))??;
        stream.set_read_timeout(Some(patience()))?;
        idle.push(BufReader::new(stream));
    }
    flood(&stage, &flooder, &hole).await?;
    for mut stream in idle {
        stream.get_mut().write_all(b"still there?\n")?;
        let mut line = String::new();
        stream.read_line(&mut line).context("an idle connection is lost")?;
        ensure!(line.contains("still there?"), "{line:?}");
    }
    for v4 in [true, false] {
        let answer = tcp_get(&client.inside, address(&server, v4), PORT, patience());
        ensure!(answer.context("a new connection of another pod")?.identity == "server");
    }
    let mut sent = 0;
    for stream in streams {
        let report = stream.stop();
        sent += report.sent;
        report.assert_whole("server");
    }
    let refused = stage.drops(&flooder, "from_pod", "flow_quota").await?;
    ensure!(
        refused > u64::try_from(PACKETS)? / 2,
        "only {refused} packets of the flood were refused"
    );
    for pod in [&client, &server] {
        for reason in ["flow_quota", "flow_table_full"] {
            ensure!(
                stage.drops(pod, "from_pod", reason).await? == 0,
                "{reason} at {}",
                pod.name
            );
        }
    }
    // Packets redirected directly to a pod are counted at its interface like all others.
    let counted = received(&server)? - counted;
    ensure!(counted >= sent, "{sent} questions, and {counted} packets counted");
    Ok(())
}
