//! Tests two networks with the same addresses: policies and services of one never apply to the other.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Pod, Stage, eventually_sync, patience, require,
    traffic::{NoAnswer, Servers, new_token, tcp_get, udp_ask},
};
use serde_json::json;

use super::PORT;

const SILENCE: Duration = Duration::from_millis(250);
const SERVICE: &str = "10.96.0.10";

struct Scene {
    pods: Vec<Pod>,
    servers: Vec<Servers>,
    stage: Stage,
}

/// blue and red with the same subnets, two pods with the same addresses, and the same range for services.
async fn scene() -> Result<Scene> {
    let same = ["10.10.0.0/16", "fd10::/64"];
    let network = |name: &str| Manifest::network(name, &same).spec("serviceSubnets: [\"10.96.0.0/16\"]");
    let manifests = vec![
        Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]),
        network("blue"),
        network("red"),
    ];
    let stage = Stage::start("overlap", manifests).await?;
    let (mut pods, mut servers) = (Vec::new(), Vec::new());
    for network in ["blue", "red"] {
        for (number, ips) in [(1, "10.10.0.11,fd10::11"), (2, "10.10.0.12,fd10::12")] {
            let pod = stage.pod_in(network, &format!("{network}-{number}"), ips).await?;
            servers.push(Servers::start(&pod.inside, &pod.name, PORT)?);
            pods.push(pod);
        }
    }
    Ok(Scene { pods, servers, stage })
}

impl Scene {
    fn put(&self, file: &str, objects: &[serde_json::Value]) -> Result<()> {
        let manifest = Manifest::of(&format!("{file}.yaml"), objects);
        Manifest::apply(&[manifest], &self.stage.node)
    }

    /// The answers that the first pod of a network gets from an address, over TCP and UDP.
    fn answers(&self, network: &str, to: IpAddr) -> [Result<String, NoAnswer>; 2] {
        let name = format!("{network}-1");
        let from = &self
            .pods
            .iter()
            .find(|pod| pod.name == name)
            .expect("a pod of the scene")
            .inside;
        let tcp = tcp_get(from, to, PORT, SILENCE).map(|answer| answer.identity);
        [tcp, udp_ask(from, to, PORT, SILENCE).map(|answer| answer.identity)]
    }

    /// Waits until the second pods answer, or are silent, on `[blue, red]`; then checks once more.
    fn wait(&self, to: &str, expected: [bool; 2]) -> Result<()> {
        let to: IpAddr = to.parse()?;
        let look = || -> Result<()> {
            for (network, open) in [("blue", expected[0]), ("red", expected[1])] {
                let right = open.then(|| format!("{network}-2")).ok_or(NoAnswer::Timeout);
                let found = self.answers(network, to);
                let same = found.iter().all(|answer| *answer == right);
                ensure!(same, "{network}: {to}: {found:?}, not {right:?}");
            }
            Ok(())
        };
        eventually_sync(patience(), || look().and_then(|()| look())).with_context(|| self.stage.agent.log())
    }
}

fn policy(name: &str, network: &str, spec: &serde_json::Value) -> serde_json::Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta2", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": "team", "name": name,
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": network},
        },
        "spec": spec,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn same_address_in_two_networks_policy_on_one_never_changes_the_other() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let scene = scene().await?;
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    let block = |cidr: &str| json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": cidr}}]}]});
    for (to, v4) in [("10.10.0.12", true), ("fd10::12", false)] {
        let host = |last: &str| {
            if v4 {
                format!("10.10.0.{last}/32")
            } else {
                format!("fd10::{last}/128")
            }
        };
        for (policies, expected) in [
            (vec![], [true, true]),
            (vec![policy("deny", "blue", &deny)], [false, true]),
            (vec![policy("deny", "red", &deny)], [true, false]),
            (vec![policy("deny", "team/blue, team/red", &deny)], [false, false]),
            // The same address, allowed in one network and excluded in the other.
            (
                vec![
                    policy("blue", "blue", &block(&host("12"))),
                    policy("red", "red", &block(&host("99"))),
                ],
                [true, false],
            ),
            (
                vec![
                    policy("blue", "blue", &block(&host("99"))),
                    policy("red", "red", &block(&host("12"))),
                ],
                [false, true],
            ),
        ] {
            scene.put("policies", &policies)?;
            let told = || format!("{to} under {policies:?}");
            scene.wait(to, expected).with_context(told)?;
        }
    }
    ensure!(scene.servers.len() == 4);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn same_virtual_address_in_two_networks_never_mixes() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let scene = scene().await?;
    let service = |network: &str| {
        let name = format!("web-{network}");
        let ports: Vec<_> = ["TCP", "UDP"]
            .map(|protocol| json!({"name": protocol.to_lowercase(), "protocol": protocol, "port": PORT}))
            .into();
        vec![
            json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": {"namespace": "team", "name": name, "labels": {"kni.dev/network": network}},
                "spec": {"clusterIP": SERVICE, "clusterIPs": [SERVICE], "ports": ports},
            }),
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {"namespace": "team", "name": name, "labels": {"kubernetes.io/service-name": name}},
                "endpoints": [{"addresses": ["10.10.0.12"], "conditions": {"ready": true}}],
                "ports": ports,
            }),
        ]
    };
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    scene.put("services", &[service("blue"), service("red")].concat())?;
    scene.wait(SERVICE, [true, true]).context("both serve")?;
    // Evaluated after the translation, in each network by its own policies.
    scene.put("policies", &[policy("deny", "red", &deny)])?;
    scene.wait(SERVICE, [true, false]).context("red is denied")?;
    scene.put("policies", &[])?;
    // The address has no service in red: packets to it are dropped there, and the service of blue is not used.
    scene.put("services", &service("blue"))?;
    scene.wait(SERVICE, [true, false]).context("blue alone serves")?;
    ensure!(
        scene.answers("red", "10.10.0.12".parse()?)[0] == Ok("red-2".into()),
        "{}",
        new_token()
    );
    Ok(())
}
