//! Tests that frames stay in their network if networks share a pod or a node.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::Result;
use kni_integration::{
    frames::{Ip, Link, Mac, PacketSocket, Payload},
    node::{NODE_V4, NODE_V6},
    require,
    stage::address,
    traffic::new_token,
};

use super::{
    PORT, Scene,
    crafted::{arrivals, holds},
    forge::{BROADCAST, forge},
};

/// A pod with `eth0` in the default network and `net1` in blue, and the possible receivers of its frames.
struct Both {
    scene: Scene,
    sockets: [PacketSocket; 2],
    macs: [[Mac; 2]; 2],
    witnesses: [(&'static str, PacketSocket); 3],
}

impl Both {
    async fn set() -> Result<Self> {
        let mut scene = Scene::set("own-addresses").await?;
        let networks = r#"[{"name":"blue","interface":"net1","ips":["10.10.0.20","fd10::20"]}]"#;
        scene.add("both", &[("k8s.v1.cni.cncf.io/networks", networks)]).await?;
        let (stage, both) = (&scene.stage, scene.pod("both"));
        let macs = [stage.macs(both, "eth0").await?, stage.macs(both, "net1").await?];
        let open = |interface| PacketSocket::open(&both.inside, interface);
        let sockets = [open("eth0")?, open("net1")?];
        let witnesses = [
            ("plain", PacketSocket::open(&scene.pod("plain").inside, "eth0")?),
            ("blue-2", PacketSocket::open(&scene.pod("blue-2").inside, "eth0")?),
            ("uplink", PacketSocket::open(&stage.node, "uplink0")?),
        ];
        Ok(Self {
            scene,
            sockets,
            macs,
            witnesses,
        })
    }

    /// Sends a datagram with a token over `interface` with the MAC addresses of `link`.
    fn send(&self, interface: usize, link: usize, from: IpAddr, to: IpAddr) -> Result<String> {
        let token = new_token();
        let packet = Ip::new(from, to).packet(&Payload::udp(40_000, PORT, token.as_bytes()));
        let [own, gateway] = self.macs[link];
        self.sockets[interface].send(&Link::new(own, gateway).frame(&packet))?;
        Ok(token)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_interface_is_held_to_its_own_addresses() -> Result<()> {
    require!(root, netns, bpf, ip);
    let both = Both::set().await?;
    let pod = both.scene.pod("both");
    let plain = both.scene.pod("plain");
    let blue: [IpAddr; 2] = ["10.10.0.20".parse()?, "fd10::20".parse()?];
    let peer: [IpAddr; 2] = ["10.10.0.12".parse()?, "fd10::12".parse()?];
    let node: [IpAddr; 2] = [NODE_V4.parse()?, NODE_V6.parse()?];
    let own = [address(pod, true), address(pod, false)];
    let target = [address(plain, true), address(plain, false)];
    let (mut tokens, mut counted) = (Vec::new(), BTreeMap::<&str, u64>::new());
    for family in [0, 1] {
        for (interface, link, from, to, reason) in [
            (0, 0, blue, target, "source_address"),
            (0, 0, blue, peer, "source_address"),
            (0, 1, own, target, "source_mac"),
            (1, 1, own, peer, "source_address"),
            (1, 1, own, target, "source_address"),
            (1, 0, blue, peer, "source_mac"),
            (1, 1, blue, target, "no_route"),
            (1, 1, blue, node, "no_route"),
        ] {
            tokens.push(both.send(interface, link, from[family], to[family])?);
            let count = counted.entry(reason).or_default();
            *count += 1;
            both.scene.stage.wait_for_drops(pod, "from_pod", reason, *count).await?;
        }
    }
    // Unforged frames arrive at their destination.
    for (interface, from, to, name) in [(0, own, target, "plain"), (1, blue, peer, "blue-2")] {
        let honest = both.send(interface, interface, from[0], to[0])?;
        for (witness, socket) in &both.witnesses {
            let arrived = arrivals(socket, &honest, *witness == name)?;
            let seen = arrived.iter().any(|frame| holds(frame, &honest));
            assert_eq!(seen, *witness == name, "the honest frame, seen by {witness}");
            let forged = arrived
                .iter()
                .any(|frame| tokens.iter().any(|token| holds(frame, token)));
            assert!(!forged, "a forged frame reached {witness}");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_network_has_no_way_into_an_isolated_one() -> Result<()> {
    require!(root, netns, bpf, ip);
    let scene = Scene::set("into-isolated").await?;
    let (stage, plain) = (&scene.stage, scene.pod("plain"));
    let mut forge = forge(&scene, "plain").await?;
    let names = ["blue-1", "red-1", "red-3"];
    let mut macs = Vec::new();
    for name in names {
        macs.push(stage.macs(scene.pod(name), "eth0").await?);
    }
    let socket = PacketSocket::open(&plain.inside, "eth0")?;
    let witnesses: Vec<_> = names
        .iter()
        .map(|name| PacketSocket::open(&scene.pod(name).inside, "eth0"))
        .collect::<Result<_>>()?;
    let mut refused = 0;
    for (name, [pod_mac, host_mac]) in names.iter().zip(macs) {
        for v4 in [true, false] {
            let to = address(scene.pod(name), v4);
            for (mac, passes) in [
                (forge.gateway, true),
                (pod_mac, false),
                (host_mac, false),
                (BROADCAST, false),
            ] {
                let token = forge.token();
                let packet = Ip::new(forge.source(v4), to).packet(&Payload::udp(40_000, PORT, &token));
                socket.send(&Link::new(forge.own, mac).frame(&packet))?;
                // Through its gateway a pod of the default network may send to any address; the node has no route to
                // such a pod.
                refused += u64::from(!passes);
            }
        }
    }
    stage
        .wait_for_drops(plain, "from_pod", "destination_mac", refused)
        .await?;
    for (name, witness) in names.iter().zip(&witnesses) {
        let arrived = arrivals(witness, "", false)?;
        let forged = arrived
            .iter()
            .any(|frame| forge.tokens.iter().any(|token| holds(frame, token)));
        assert!(!forged, "a frame from the default network reached {name}");
    }
    for server in &scene.servers {
        assert!(
            !forge.tokens.iter().any(|token| server.saw(token)),
            "{} saw one",
            server.identity()
        );
    }
    Ok(())
}
