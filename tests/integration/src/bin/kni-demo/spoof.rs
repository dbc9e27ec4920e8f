//! Sends forbidden frames, and shows that they are dropped and for which reason.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Kubelet, Pod, eventually,
    frames::{Ip, Link, Mac, PacketSocket, Payload, parse_mac},
    traffic::{Servers, new_token},
};
use kni_proto::runtime::{ListDropsRequest, ListInterfacesRequest};

use crate::{
    progress::{part, print_line},
    stage::{PORT, Stage},
};

const TIMEOUT: Duration = Duration::from_secs(2);
const FOREIGN_MAC: Mac = [2, 0, 0, 0, 0, 0x99];

/// Sends frames from `pod` with a foreign source address of each family, and with a foreign source MAC address. The
/// first one is also sent unmodified, to show that only the forged address makes the difference.
pub(crate) async fn show(stage: &Stage, kubelet: &Kubelet, pod: &Pod, servers: &[&Servers]) -> Result<()> {
    part(&format!("Spoofing from {}", pod.name));
    let (own, host) = macs(kubelet, pod).await?;
    let socket = PacketSocket::open(&pod.inside, "eth0")?;
    let target = |v4: bool| -> Result<IpAddr> { Ok(if v4 { "10.10.0.12".parse()? } else { "fd10::12".parse()? }) };
    let address = |v4: bool| pod.ip(v4).context("the pod lacks an address");
    let cases = [
        ("its own address and MAC", own, address(true)?, None),
        ("source 10.10.0.99", own, "10.10.0.99".parse()?, Some("source_address")),
        ("source fd10::99", own, "fd10::99".parse()?, Some("source_address")),
        (
            "source MAC 02:00:00:00:00:99",
            FOREIGN_MAC,
            address(true)?,
            Some("source_mac"),
        ),
    ];
    for (what, mac, source, reason) in cases {
        let before = count(kubelet, pod, reason).await?;
        let token = new_token();
        let packet = Ip::new(source, target(source.is_ipv4())?).packet(&Payload::udp(40_000, PORT, token.as_bytes()));
        socket.send(&Link::new(mac, host).frame(&packet))?;
        let Some(reason) = reason else {
            let arrived = servers
                .iter()
                .any(|s| s.identity() == "blue-2" && s.saw_within(&token, TIMEOUT));
            ensure!(
                arrived,
                "a frame with {what} did not arrive, so the drops below would prove nothing"
            );
            print_line(format!("{what}: delivered"));
            continue;
        };
        eventually(TIMEOUT, async || {
            let counted = count(kubelet, pod, Some(reason)).await? > before;
            ensure!(
                counted,
                "no drop with reason {reason} was counted for a frame with {what}"
            );
            Ok(())
        })
        .await?;
        let seen = servers.iter().find(|server| server.saw(&token));
        ensure!(
            seen.is_none(),
            "a frame with {what} reached {:?}",
            seen.map(|server| server.identity())
        );
        print_line(format!("{what}: dropped, reason {reason}"));
    }
    stage.knictl(&["drops"])
}

/// The MAC addresses of the pod's end and of the node's end.
async fn macs(kubelet: &Kubelet, pod: &Pod) -> Result<(Mac, Mac)> {
    let request = ListInterfacesRequest {
        sandbox_id: pod.id.clone(),
        ..Default::default()
    };
    let interfaces = kubelet
        .runtime()
        .list_interfaces(request)
        .await?
        .into_inner()
        .interfaces;
    let interface = interfaces
        .iter()
        .find(|i| i.ifname == "eth0")
        .context("the pod's eth0 is not listed")?;
    let mac = |text: &str| parse_mac(text).with_context(|| format!("not a MAC address: {text:?}"));
    Ok((mac(&interface.mac)?, mac(&interface.host_mac)?))
}

async fn count(kubelet: &Kubelet, pod: &Pod, reason: Option<&str>) -> Result<u64> {
    let drops = kubelet
        .runtime()
        .list_drops(ListDropsRequest {})
        .await?
        .into_inner()
        .drops;
    let ours = drops.iter().filter(|drop| {
        drop.pod_name == pod.name && drop.direction == "from_pod" && Some(drop.reason.as_str()) == reason
    });
    Ok(ours
        .filter_map(|drop| drop.count.as_ref())
        .map(|count| count.packets)
        .sum())
}
