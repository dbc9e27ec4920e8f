//! 14: Tests KNI with kube-proxy in each of its modes: kube-proxy handles the node's traffic and NodePorts, KNI handles
//! packets of pods to virtual addresses.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces,
    node::{NODE_V4, NODE_V6},
    require,
    stage::address,
    traffic::Stream,
};

use super::{
    objects::{BACK, State, served, service, vip},
    proxies::{self, NODE_PORT, Proxied},
    scene::{FAMILIES, Scene, Transport, assert_answering, front, seen},
};

const WEB: u8 = 90;

/// The mode of kube-proxy's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Nftables,
    /// The suffix of the programs.
    Iptables(&'static str),
}

impl Mode {
    fn write(self, node: &Namespaces, service: &Proxied) -> Result<()> {
        match self {
            Self::Nftables => node.nft(&proxies::nftables(service)),
            Self::Iptables(suffix) => {
                let family = if service.vip.is_ipv4() { "iptables" } else { "ip6tables" };
                let text = proxies::iptables(service);
                node.run_with_input(&format!("{family}{suffix}-restore"), &["--noflush"], &text)?;
                Ok(())
            }
        }
    }

    fn remove(self, node: &Namespaces, v4: bool) -> Result<()> {
        match self {
            Self::Nftables => node.nft(&format!("delete table {} kube-proxy\n", if v4 { "ip" } else { "ip6" })),
            Self::Iptables(suffix) => {
                let program = format!("{}{suffix}", if v4 { "iptables" } else { "ip6tables" });
                for table in ["nat", "filter"] {
                    node.run(&program, &["-t", table, "-F"])?;
                }
                Ok(())
            }
        }
    }
}

fn node_port(v4: bool) -> SocketAddr {
    let node: IpAddr = if v4 { NODE_V4 } else { NODE_V6 }.parse().expect("an address");
    SocketAddr::new(node, NODE_PORT)
}

async fn beside(mode: Mode, name: &str) -> Result<()> {
    let mut scene = Scene::set(name).await?;
    let (ours, theirs) = (scene.backend("ours").await?, scene.backend("theirs").await?);
    let client = scene.stage.pod("client").await?;
    let node = &scene.stage.node;
    for v4 in FAMILIES {
        let backend = SocketAddr::new(address(&theirs.pod, v4), BACK);
        let service = Proxied {
            vip: vip(v4, WEB),
            backend,
        };
        mode.write(node, &service)?;
        // The node's own traffic works before KNI has a Service.
        assert_answering(node, front(v4, WEB), &["theirs"])?;
    }
    let objects = served(service("web", WEB), &[(&ours.pod, State::Ready)]);
    scene.apply(&objects).await?;
    let node = &scene.stage.node;
    let mut streams = Vec::new();
    for v4 in FAMILIES {
        let cluster = front(v4, WEB);
        assert_answering(node, cluster, &["theirs"])?;
        assert_answering(&client.inside, cluster, &["ours"])?;
        assert_answering(&theirs.pod.inside, cluster, &["ours"])?;
        assert_answering(&ours.pod.inside, cluster, &["ours"])?;
        for from in [node.fabric(), &**node, &client.inside, &theirs.pod.inside] {
            assert_answering(from, node_port(v4), &["theirs"]).with_context(|| format!("{mode:?}: NodePort"))?;
        }
        for transport in Transport::BOTH {
            let answer = transport.ask(&client.inside, cluster)?;
            ensure!(
                seen(&answer) == address(&client, v4),
                "our backend sees {answer:?} and not the client"
            );
        }
        streams.push(("ours", Stream::tcp(&client.inside, cluster)?));
        streams.push(("ours", Stream::udp(&client.inside, cluster)?));
    }
    // Pods do not depend on it: its rules may be removed and restored.
    for v4 in FAMILIES {
        mode.remove(node, v4)?;
        assert_answering(&client.inside, front(v4, WEB), &["ours"])?;
        let gone = Transport::Tcp.ask(node.fabric(), node_port(v4));
        ensure!(gone.is_err(), "{mode:?}: the rules are gone, and yet {gone:?}");
    }
    thread::sleep(Duration::from_millis(100));
    for (who, stream) in streams {
        stream.stop().assert_whole(who);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn beside_kube_proxy_in_nftables_mode() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    beside(Mode::Nftables, "beside-nft").await
}

#[tokio::test(flavor = "multi_thread")]
async fn beside_kube_proxy_in_iptables_mode() -> Result<()> {
    require!(steady, root, netns, bpf, ip, iptables);
    beside(Mode::Iptables(""), "beside-ipt").await
}

/// The same in the tables of the kernel before nftables.
#[tokio::test(flavor = "multi_thread")]
async fn beside_kube_proxy_in_iptables_mode_with_the_legacy_tables() -> Result<()> {
    require!(steady, root, netns, bpf, ip, legacy_tables);
    beside(Mode::Iptables("-legacy"), "beside-old").await
}
