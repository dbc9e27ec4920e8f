//! Tests connections that are closed by FIN at once: their rows, which stay for a while, are within the share of the
//! pod that opened them.

use anyhow::{Result, ensure};
use kni_integration::{
    frames::{Ip, Payload, TcpFlags},
    long, require,
    stage::address,
};

use super::scene::{Scene, mute, paced};

/// Arguments of the agent, connections, and connections per second: three times what the table holds.
fn size() -> (&'static [&'static str], u32, u32) {
    if long() {
        (&[], 200_000, 15_000)
    } else {
        (&["--max-flows", "16384"], 24_576, 10_000)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_connections_evict_no_flows_of_others() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let (args, count, rate) = size();
    let scene = Scene::start("closed", args).await?;
    // The test sends every packet of both ends.
    for pod in [&scene.attacker, &scene.victim] {
        mute(pod, "tcp dport 1000-7999")?;
    }
    let bystanders = scene.bystanders()?;
    let senders = [scene.inside(&scene.attacker).await?, scene.inside(&scene.victim).await?];
    let ends = [&scene.attacker, &scene.victim].map(|pod| address(pod, true));
    let open_and_close = [
        (0, TcpFlags::SYN),
        (1, TcpFlags::SYN_ACK),
        (0, TcpFlags::FIN_ACK),
        (1, TcpFlags::FIN_ACK),
        (0, TcpFlags::ACK),
    ];
    paced("connections closed by FIN", count, rate, |number| {
        let ports = [1000 + number % 5000, 6000 + number / 5000].map(|port| u16::try_from(port).unwrap_or(u16::MAX));
        // The last acknowledgement may get lost, or an attacker omits it.
        let sent = if number % 2 == 0 { 5 } else { 4 };
        for (from, flags) in open_and_close.into_iter().take(sent) {
            let segment = Payload::tcp(ports[from], ports[1 - from], flags);
            senders[from].send(&Ip::new(ends[from], ends[1 - from]).packet(&segment))?;
        }
        Ok(())
    })?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await?;
    // Both pods take part: each opens what the other one's share refused.
    ensure!(
        scene.refused(&scene.attacker, "from_pod").await? > 0,
        "the attacker is not named"
    );
    Ok(())
}
