//! Tests pods of two networks with overlapping addresses, and one with a host port.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use kni_integration::{Manifest, eventually, node::NODE_V4, patience, require, stage};
use kni_local_node::cri::v1::Protocol;

use super::scene::{PORT, Running, Scene, pod};

const HOST_PORT: u16 = 30700;

/// Blue pods have 10.10.0.11 to .25, red ones .18 to .32: eight addresses are in both networks.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_overlapping_networks_reach_their_own_only() -> Result<()> {
    require!(root, netns, bpf, machine);
    let scene = Scene::start("containerd-networks", Manifest::overlapping()).await?;
    stage::forwarding(&scene.machine.node)?;
    let before = scene.machine.at_rest()?;

    let wanted = |network: &'static str, hosts: std::ops::RangeInclusive<u8>| {
        hosts.map(move |host| {
            let ips = format!("10.10.0.{host},fd10::{host:x}");
            pod(
                &format!("{network}-{host}"),
                &[
                    ("kni.dev/network", network),
                    ("kni.dev/ips", &ips),
                    ("kni.dev/labels", &format!("number={host}")),
                ],
            )
        })
    };
    let blue = scene.run_all(wanted("blue", 11..=25).collect()).await?;
    let red = scene.run_all(wanted("red", 18..=32).collect()).await?;
    for group in [&blue, &red] {
        try_join_all(neighbours(group).map(|(from, to)| reaches(&scene, from, to))).await?;
    }
    // Each of these addresses has just answered in its own network.
    for (from, to) in [(&blue[0], &red[14]), (&red[0], &blue[0])] {
        for protocol in ["tcp", "udp"] {
            let answer = scene.ask(from, to.addresses[0], protocol).await;
            assert!(answer.is_err(), "{} reaches {answer:?}", from.sandbox.name);
        }
    }

    policy_on_one_network(&scene, &blue, &red).await?;

    let mut served = pod("host-port", &[]);
    served.ports = vec![(Protocol::Tcp, PORT, HOST_PORT)];
    let served = scene.run(served).await?;
    assert_eq!(from_fabric(&scene)?, "host-port");

    scene.remove_all(&[blue, red, vec![served]].concat()).await?;
    assert!(from_fabric(&scene).is_err(), "the host port outlives its pod");
    scene.assert_as_before(&before);
    Ok(())
}

/// In blue, only number 17 may reach number 18. Red has pods with the same numbers and addresses.
const POLICY: &str = r#"{
  "apiVersion": "k8s.cni.cncf.io/v1beta2", "kind": "MultiNetworkPolicy",
  "metadata": {"namespace": "team", "name": "one-friend", "annotations": {"k8s.v1.cni.cncf.io/policy-for": "blue"}},
  "spec": {
    "podSelector": {"matchLabels": {"number": "18"}},
    "ingress": [{"from": [{"podSelector": {"matchLabels": {"number": "17"}}}]}]
  }
}"#;

async fn policy_on_one_network(scene: &Scene, blue: &[Running], red: &[Running]) -> Result<()> {
    let policy = Manifest::file("policy.json", POLICY);
    Manifest::apply(&[policy], &scene.machine.node)?;
    let numbered = |group: &'static str, pods: &[Running], number: u8| {
        let name = format!("{group}-{number}");
        let found = pods.iter().find(|pod| pod.sandbox.name == name).cloned();
        found.with_context(|| format!("no pod {name}"))
    };
    let guarded = numbered("blue", blue, 18)?;
    let (friend, stranger) = (numbered("blue", blue, 17)?, numbered("blue", blue, 19)?);
    eventually(patience(), async || {
        let reached = reaches(scene, &stranger, &guarded).await;
        ensure!(reached.is_err(), "the policy has no effect");
        Ok(())
    })
    .await?;
    reaches(scene, &friend, &guarded).await?;
    reaches(scene, &guarded, &stranger).await?;
    reaches(scene, &numbered("red", red, 19)?, &numbered("red", red, 18)?).await
}

/// Each pod with the next, and the last with the first.
fn neighbours(group: &[Running]) -> impl Iterator<Item = (&Running, &Running)> {
    group.iter().zip(group.iter().cycle().skip(1))
}

/// Checks that the pod answers at both addresses over both protocols.
async fn reaches(scene: &Scene, from: &Running, to: &Running) -> Result<()> {
    ensure!(to.addresses.len() == 2, "{} has {:?}", to.sandbox.name, to.addresses);
    for (address, protocol) in to.addresses.iter().zip(["tcp", "udp"]) {
        let answered = scene.ask(from, *address, protocol).await?;
        ensure!(
            answered == to.sandbox.name,
            "{answered} answers {} at {address}, not {}",
            from.sandbox.name,
            to.sandbox.name
        );
    }
    Ok(())
}

/// The server that answers an external host at the host port.
fn from_fabric(scene: &Scene) -> Result<String> {
    let node: IpAddr = NODE_V4.parse()?;
    scene.machine.node.fabric().enter(|| {
        let timeout = Duration::from_secs(2);
        let mut stream = TcpStream::connect_timeout(&(node, HOST_PORT).into(), timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.write_all(b"hello\n")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        let name = answer.split(' ').next().context("no answer")?;
        Ok(name.to_owned())
    })?
}
