//! Tests that pods of two nodes reach each other: by address, through Services, and by name from the other node's DNS
//! server.

use std::{collections::BTreeSet, fs};

use anyhow::{Context as _, Result, ensure};
use kni_local_node::image;
use serde_json::{Value, json};

use super::scene::Clustered;

/// A pod of one node, and the Service that has no other endpoint.
struct Peer {
    pod: String,
    addresses: Vec<String>,
    service: String,
    cluster_ips: Vec<String>,
}

/// Creates a pod on each node, which asks the other one in every way. The nodes have pods of `CoreDNS`, one each, and
/// those of Deployment `web`.
pub(super) fn pods_of_both_nodes_reach_each_other(cluster: &Clustered) -> Result<()> {
    let peers = create(cluster)?;
    for (from, to) in [(0, 1), (1, 0)].map(|(from, to)| (&peers[from], &peers[to])) {
        let addresses = to.addresses.iter().map(|address| (address, "7000"));
        let targets = addresses.chain(to.cluster_ips.iter().map(|ip| (ip, "80")));
        for (address, port) in targets {
            for protocol in ["tcp", "udp"] {
                answers(cluster, from, to, address, port, protocol)?;
            }
        }
        let resolved = cluster.kubectl(&["exec", &from.pod, "--", "/kni-probe", "resolve", &to.service])?;
        let resolved: BTreeSet<&str> = resolved.lines().collect();
        let wanted: BTreeSet<&str> = to.cluster_ips.iter().map(String::as_str).collect();
        assert_eq!(resolved, wanted, "addresses of {} for {}", to.service, from.pod);
        let name = format!("{}.default.svc.cluster.local", to.service);
        answers(cluster, from, to, &name, "80", "tcp")?;
        // A pod with the usual settings asks the Service of both DNS servers.
        let usual = ["exec", "deployment/web", "--", "/kni-probe", "ask", &to.service, "80"];
        let heard = cluster.kubectl(&usual)?;
        ensure!(
            heard.starts_with(&to.pod),
            "a pod asks for {} and hears {heard:?}",
            to.service
        );
    }
    Ok(())
}

fn answers(cluster: &Clustered, from: &Peer, to: &Peer, address: &str, port: &str, protocol: &str) -> Result<()> {
    let ask = ["/kni-probe", "ask", address, port, "--protocol", protocol];
    let heard = cluster.kubectl(&[&["exec", &from.pod, "--"], &ask[..]].concat())?;
    ensure!(
        heard.split(' ').next() == Some(&to.pod),
        "{} asks {address}:{port} by {protocol} for {} and hears {heard:?}",
        from.pod,
        to.pod
    );
    Ok(())
}

fn create(cluster: &Clustered) -> Result<[Peer; 2]> {
    let dns = cluster.list(&["pods", "-n", "kube-system", "-l", "k8s-app=kube-dns"])?;
    // Each node's pod asks the DNS server of the other node, by another family.
    let server = |node: &str, family: usize| {
        let mut pods = dns.iter().filter(|pod| pod["spec"]["nodeName"] == node);
        let pod = pods.next().with_context(|| format!("a pod of CoreDNS on {node}"))?;
        let ip = pod["status"]["podIPs"][family]["ip"].as_str();
        Ok::<_, anyhow::Error>(
            ip.with_context(|| format!("addresses of CoreDNS on {node}"))?
                .to_owned(),
        )
    };
    let mut objects = pod_and_service("node1", &server("node2", 0)?);
    objects.extend(pod_and_service("node2", &server("node1", 1)?));
    let file = cluster.folder.join("traffic.json");
    fs::write(
        &file,
        json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string(),
    )?;
    let applied = cluster.kubectl(&["apply", "--server-side", "-f", &file.display().to_string()]);
    fs::remove_file(&file)?;
    applied?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "pod", "-l", "on", "--timeout=120s"])?;
    Ok([peer(cluster, "node1")?, peer(cluster, "node2")?])
}

fn pod_and_service(node: &str, dns: &str) -> Vec<Value> {
    let name = format!("peer-{node}");
    let serve = ["serve", "--tcp", "7000", "--udp", "7000", "--name", &name];
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "default", "labels": { "on": node } },
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "dnsPolicy": "None",
            "dnsConfig": { "nameservers": [dns], "searches": ["default.svc.cluster.local"] },
            "containers": [
                { "name": "serves", "image": image::PROBE, "imagePullPolicy": "Never", "args": serve },
            ],
        },
    });
    let port = |protocol: &str| json!({ "name": protocol.to_lowercase(), "port": 80, "targetPort": 7000, "protocol": protocol });
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": format!("on-{node}"), "namespace": "default" },
        "spec": {
            "selector": { "on": node },
            "ipFamilyPolicy": "RequireDualStack",
            "ports": [port("TCP"), port("UDP")],
        },
    });
    vec![pod, service]
}

fn peer(cluster: &Clustered, node: &str) -> Result<Peer> {
    let (pod, service) = (format!("peer-{node}"), format!("on-{node}"));
    let words = |object: &str, path: &str| -> Result<Vec<String>> {
        let words = cluster.kubectl(&["get", object, "-o", &format!("jsonpath={path}")])?;
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        ensure!(words.len() == 2, "{path} of {object}: {words:?}");
        Ok(words)
    };
    Ok(Peer {
        addresses: words(&format!("pod/{pod}"), "{.status.podIPs[*].ip}")?,
        cluster_ips: words(&format!("service/{service}"), "{.spec.clusterIPs[*]}")?,
        pod,
        service,
    })
}
