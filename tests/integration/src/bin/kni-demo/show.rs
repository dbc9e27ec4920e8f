//! Runs the demo: attaches pods, and shows their connectivity and the dropped packets.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Kubelet, Pod,
    agent::SOCKET,
    traffic::{Matrix, Probe, Servers},
};

use crate::{
    progress::{part, print_line},
    spoof,
    stage::{PORT, Stage},
};

const NAMESPACE: &str = "demo";
const PATIENCE: Duration = Duration::from_millis(700);

/// Name, network, fixed addresses. The addresses of the first two pods of each network are equal; only red has a third
/// pod, with an address that no pod of blue has.
const PODS: [(&str, &str, [&str; 2]); 5] = [
    ("blue-1", "blue", ["10.10.0.11", "fd10::11"]),
    ("blue-2", "blue", ["10.10.0.12", "fd10::12"]),
    ("red-1", "red", ["10.10.0.11", "fd10::11"]),
    ("red-2", "red", ["10.10.0.12", "fd10::12"]),
    ("red-3", "red", ["10.10.0.13", "fd10::13"]),
];

/// Runs all parts; returns the remaining pods, which are all pods with `keep`.
pub(crate) async fn show(stage: &Stage, keep: bool) -> Result<Vec<Pod>> {
    let kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
    let pods = create(&kubelet).await?;
    part("What an operator sees");
    stage.knictl(&["interfaces", "-o", "wide"])?;
    let servers: Vec<_> = pods
        .iter()
        .map(|pod| Servers::start(&pod.inside, &pod.name, PORT))
        .collect::<Result<_>>()?;
    let servers: Vec<_> = servers.iter().collect();
    connectivity(&pods, &servers)?;
    spoof::show(stage, &kubelet, &pods[0], &servers).await?;
    if keep {
        return Ok(pods);
    }
    take_away(&kubelet, pods).await?;
    Ok(Vec::new())
}

async fn create(kubelet: &Kubelet) -> Result<Vec<Pod>> {
    part("Creating pods through KNI, as the kubelet does");
    let mut pods = Vec::new();
    for (name, network, addresses) in PODS {
        let ips = addresses.join(",");
        let annotations = [("kni.dev/network", network), ("kni.dev/ips", ips.as_str())];
        let pod = kubelet
            .run_pod(NAMESPACE, name, &annotations)
            .await
            .with_context(|| format!("pod {name}"))?;
        let expected: Vec<IpAddr> = addresses.iter().map(|ip| ip.parse()).collect::<Result<_, _>>()?;
        ensure!(
            pod.ips() == expected,
            "pod {name} got {:?} instead of {expected:?}",
            pod.ips()
        );
        print_line(format!(
            "{name:7} network {network:5} {:27} {}",
            ips,
            pod.netns.display()
        ));
        pods.push(pod);
    }
    Ok(pods)
}

fn connectivity(pods: &[Pod], servers: &[&Servers]) -> Result<()> {
    part("Who answers whom (each server answers with its pod's name; an echo counts for the pod that saw it)");
    let find = |name: &str| pods.iter().find(|pod| pod.name == name).context("a pod is missing");
    let mut probes = Vec::new();
    for (from, network, own) in PODS {
        for (to, of, addresses) in PODS {
            // An address of the own network must be answered by its own pod; for other addresses no answer is expected.
            let twin = PODS.iter().any(|(_, n, a)| *n == network && *a == addresses);
            let expected = if of == network { Some(to) } else { None };
            if from == to || addresses == own || (expected.is_none() && twin) {
                continue;
            }
            for address in addresses {
                probes.push(Probe {
                    from: &find(from)?.inside,
                    to: address.parse()?,
                    expected,
                });
            }
        }
    }
    ensure!(
        probes.iter().any(|probe| probe.expected.is_none()),
        "nothing is to be silent: the matrix proves nothing"
    );
    let matrix = Matrix::run(&probes, servers, PORT, PATIENCE);
    print_line(&matrix);
    let failures = matrix.failures().len();
    ensure!(
        failures == 0,
        "{failures} of {} answers are not as expected",
        matrix.rows.len()
    );
    print_line(format!("all {} answers are as expected", matrix.rows.len()));
    Ok(())
}

async fn take_away(kubelet: &Kubelet, pods: Vec<Pod>) -> Result<()> {
    part("Detaching and deleting the pods, as the kubelet does");
    for pod in pods {
        let (id, name) = (pod.id.clone(), pod.name.clone());
        kubelet.kill_pod(pod).await.with_context(|| format!("pod {name}"))?;
        let left = kubelet.query(&id).await.with_context(|| format!("query of {name}"))?;
        ensure!(left.ipconfigs.is_empty(), "pod {name} still has {:?}", left.ipconfigs);
        print_line(format!("{name} is gone"));
    }
    Ok(())
}
