//! Tests accepted objects: the examples, values at the limits of the rules, and defaults.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use kni_integration::require;
use serde_json::{Value, json};

use super::scene::{manifest, repository, server};

/// Specs at the limits of rules.
const EDGES: &[(&str, &str)] = &[
    ("PodNetwork", "{subnets: [10.0.0.0/8]}"),
    ("PodNetwork", "{subnets: [192.0.2.0/30]}"),
    ("PodNetwork", "{subnets: ['fd00::/16', 'fe00::/126', '2001:db8::/32']}"),
    ("PodNetwork", "{subnets: [10.0.0.0/16], mtu: 1280}"),
    ("PodNetwork", "{subnets: [10.0.0.0/16], mtu: 65535}"),
    (
        "PodNetwork",
        "{default: true, subnets: [10.0.0.0/16], egress: {mode: Route}}",
    ),
    ("PodNetwork", "{default: true, subnets: [10.0.0.0/16], egress: {}}"),
    (
        "PodNetwork",
        "{subnets: [10.0.0.0/16], serviceSubnets: [10.1.0.0/16, 'fd00:96::/112'], egress: {mode: Masquerade, \
         addresses: [192.0.2.1, '2001:db8::1']}}",
    ),
    (
        "PodNetwork",
        "{subnets: [10.0.0.0/24, 'fd00::/120'], perNodePrefix: {ipv4: 24, ipv6: 120}}",
    ),
    (
        "PodNetwork",
        "{subnets: [10.0.0.0/24], perNodePrefix: {ipv4: 32, ipv6: 16}}",
    ),
    (
        "PodNetwork",
        "{subnets: [10.0.0.0/24], excludeSubnets: [10.0.0.0/24, 10.0.0.7/32], namespaceSelector: {}}",
    ),
    (
        "PodNetwork",
        "{provider: {type: Ebpf}, subnets: [10.0.0.0/24], xdp: true}",
    ),
    (
        "PodNetwork",
        "{provider: {type: Macvlan, parent: eth1.7, allowUplink: true, mode: Passthru}, access: {namespaces: {from: None}}}",
    ),
    (
        "PodNetwork",
        "{provider: {type: HostDevice, devices: [eth1, a_b-c.d], gateways: [10.0.0.1]}, subnets: [10.0.0.0/24], access: \
         {namespaces: {from: Selected, selector: {matchLabels: {team: storage}}}}}",
    ),
    (
        "PodNetwork",
        "{provider: {type: Tap, owner: 4294967294, group: 0, multiQueue: false, devices: []}, access: {namespaces: {from: \
         All}}}",
    ),
    (
        "PodNetwork",
        "{default: true, provider: {type: CNI, confName: 'my network'}, access: {namespaces: {from: All}}}",
    ),
    (
        "PodNetwork",
        "{provider: {type: CNI, file: 10-x.conflist}, access: {namespaces: {from: All}}}",
    ),
    ("PodNetwork", "{subnets: [10.0.0.0/24], access: {}}"),
    (
        "PodNetwork",
        "{subnets: [10.0.0.0/24, 'fd00::/64'], access: {namespaces: {from: Selected, selector: {}}, allowAddresses: true, \
         addressRanges: [10.0.0.0/24, 'fd00::/112'], allowMac: true, allowDefaultRoute: true, requireJoin: true, revoke: \
         true}}",
    ),
    (
        "PodNetwork",
        "{subnets: [10.0.0.0/24], namespaceSelector: {}, access: {allowAddresses: true, lockNamespaces: true}}",
    ),
    (
        "PodNetwork",
        "{default: true, subnets: [10.0.0.0/24], access: {lockNamespaces: true, addressRanges: []}}",
    ),
    (
        "PodNetworkAttachment",
        "{podNetworkName: b23456789-123456789-123456789-123456789-123456789, podSelector: {}, interfaceName: \
         abcdefghijklmno, addresses: [10.0.0.7, 'fd00::7'], mac: 'FE:00:00:00:00:0a', defaultRoute: true}",
    ),
    (
        "PodNetworkAttachment",
        "{podNetworkName: '0', interfaceName: net1, podSelector: {matchLabels: {a.b/c: ''}, matchExpressions: [{key: \
         A_b.c, operator: NotIn, values: ['']}, {key: d, operator: DoesNotExist, values: []}]}}",
    ),
    (
        "EgressPolicy",
        "{podSelector: {}, rules: [{action: Deny, to: [{cidr: 0.0.0.0/0, except: [10.0.0.0/8]}, {cidr: '::/0'}]}, \
         {action: Allow, ports: [{port: 1, endPort: 65535}, {protocol: SCTP}, {protocol: UDP, port: 53, endPort: 53}]}]}",
    ),
    (
        "PodInterface",
        "{podName: p, podUid: u, nodeName: n1, podNetworkName: blue, interfaceName: eth0, sandboxId: s}",
    ),
    ("NodeNetwork", "{}"),
];

#[test]
fn the_edges_of_the_rules_are_inside() -> Result<()> {
    require!(root, netns, api_server);
    let server = server()?;
    for (number, (kind, spec)) in EDGES.iter().enumerate() {
        server
            .create(&manifest(kind, &format!("edge-{number}"), spec))
            .with_context(|| format!("{kind}: {spec}"))?;
    }
    let longest = "n23456789-123456789-123456789-123456789-123456789x";
    ensure!(longest.len() == 50);
    for name in [longest, "0", "nonex"] {
        server.create(&manifest("PodNetwork", name, "{subnets: [10.0.0.0/16]}"))?;
    }
    Ok(())
}

#[test]
fn every_example_of_our_kinds_is_taken() -> Result<()> {
    require!(root, netns, api_server);
    let server = server()?;
    let mut objects = Vec::new();
    collect(&repository().join("deploy/examples"), &mut objects)?;
    ensure!(objects.len() >= 5, "only {} examples are of our kinds", objects.len());
    server.create("{apiVersion: v1, kind: Namespace, metadata: {name: demo}}")?;
    for object in &objects {
        server
            .kubectl_with_input(&["apply", "-f", "-"], object)
            .with_context(|| object.clone())?;
    }
    println!("{} examples were taken", objects.len());
    Ok(())
}

/// The objects of KNI's kinds in the files of a folder and its subfolders.
fn collect(folder: &Path, objects: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, objects)?;
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let ours = text
                .split("\n---\n")
                .filter(|object| object.contains("apiVersion: kni.dev/"));
            objects.extend(ours.map(str::to_owned));
        }
    }
    Ok(())
}

#[test]
fn what_is_left_out_is_filled_in() -> Result<()> {
    require!(root, netns, api_server);
    let server = server()?;
    let cases: [(&str, &str, Value); 4] = [
        (
            "PodNetwork",
            "{subnets: [10.1.0.0/16], egress: {mode: None}, perNodePrefix: {}, mtu: null, provider: null}",
            json!({
                "default": false, "enabled": true, "topology": "Layer3", "subnets": ["10.1.0.0/16"],
                "excludeSubnets": [], "mtu": 1500, "egress": { "mode": "None", "addresses": [] },
                "serviceSubnets": [], "xdp": false, "perNodePrefix": {}, "extendedResource": false,
            }),
        ),
        (
            "PodNetworkAttachment",
            "{podNetworkName: blue, podSelector: {}, interfaceName: net1}",
            json!({
                "podNetworkName": "blue", "podSelector": {}, "interfaceName": "net1", "defaultRoute": false,
            }),
        ),
        (
            "EgressPolicy",
            "{podSelector: {}, rules: [{action: Deny, to: [{cidr: 0.0.0.0/0}], ports: [{port: 80}]}]}",
            json!({
                "podSelector": {}, "defaultAction": "Allow", "egressAddresses": [],
                "rules": [{
                    "action": "Deny", "to": [{ "cidr": "0.0.0.0/0", "except": [] }],
                    "ports": [{ "port": 80, "protocol": "TCP" }],
                }],
            }),
        ),
        ("NodeNetwork", "{}", json!({})),
    ];
    for (kind, spec, filled) in cases {
        server.create(&manifest(kind, "filled", spec))?;
        let object = server.kubectl_json(&["get", kind, "filled"])?;
        assert_eq!(object["spec"], filled, "{kind}");
    }
    Ok(())
}
