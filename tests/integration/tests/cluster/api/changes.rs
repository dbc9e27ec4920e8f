//! Tests which changes of objects are allowed.

use anyhow::{Context as _, Result, ensure};
use kni_integration::require;
use serde_json::Value;

use super::scene::{manifest, server};

/// An object, and a change of its spec.
pub(crate) struct Change {
    kind: &'static str,
    before: &'static str,
    patch: &'static str,
    /// Parts of the refusal: the field, and the start of the advice. `None`: the change is accepted.
    refused: Option<[&'static str; 2]>,
}

/// The message of the rule for a field with only one value today: the rule is for a second value.
const TOPOLOGY: &str = "topology cannot be changed";

/// Whether a change of [`CHANGES`] is refused with this message.
pub(crate) fn is_heard(message: &str) -> bool {
    let mut refusals = CHANGES.iter().filter_map(|change| change.refused);
    message.starts_with(TOPOLOGY) || refusals.any(|[_, advice]| message.contains(advice))
}

const fn refused(
    kind: &'static str,
    before: &'static str,
    patch: &'static str,
    field: &'static str,
    advice: &'static str,
) -> Change {
    Change {
        kind,
        before,
        patch,
        refused: Some([field, advice]),
    }
}

const fn taken(kind: &'static str, before: &'static str, patch: &'static str) -> Change {
    Change {
        kind,
        before,
        patch,
        refused: None,
    }
}

const NETWORK: &str = "PodNetwork";
const ATTACHMENT: &str = "PodNetworkAttachment";
const EGRESS: &str = "EgressPolicy";
const INTERFACE: &str = "PodInterface";
const CLAIM: &str = "EgressAddressClaim";
const BLOCK: &str = "AddressBlock";
const NUMBER: &str = "NetworkNumber";
const MEMBERS: &str = "NetworkMembers";
const ENDPOINT: &str = "NodeEndpoint";
/// Its name is that of the node.
const REACHED: &str = "{nodeName: change-node, nodeUID: v, addresses: [192.0.2.1], port: 4789, mtu: 1500, epoch: 1}";
const REPORT: &str = "{network: blue, networkUID: u, nodeName: n1, nodeUID: v}";
const PLAIN: &str = "{subnets: [10.1.0.0/16, 'fd10::/64']}";
const BLOCKS: &str = "{subnets: [10.1.0.0/16], perNodePrefix: {ipv4: 26}}";
const MACVLAN: &str = "{provider: {type: Macvlan, parent: eth1}, access: {namespaces: {from: None}}}";
const FIXED: &str = "{podNetworkName: blue, podSelector: {}, interfaceName: net1, mac: '02:00:00:00:00:01', \
                     addresses: [10.10.0.7]}";
const JOINED: &str = "{podNetworkName: blue, podSelector: {}, interfaceName: net1}";
const MADE: &str = "{podName: p, podUid: u, nodeName: n1, podNetworkName: blue, interfaceName: eth0, sandboxId: s}";

/// Changes of every immutable field, and of mutable fields beside them.
pub(crate) const CHANGES: &[Change] = &[
    refused(
        NETWORK,
        PLAIN,
        "{subnets: [10.1.0.0/16]}",
        "spec.subnets",
        "subnets can be added, but not removed",
    ),
    refused(
        NETWORK,
        PLAIN,
        "{subnets: [10.1.0.0/17, 'fd10::/64']}",
        "spec.subnets",
        "subnets can be added",
    ),
    refused(NETWORK, PLAIN, "{subnets: []}", "spec.subnets", "subnets can be added"),
    refused(
        CLAIM,
        "{address: 192.0.2.1, podNetworkName: blue}",
        "{address: 192.0.2.2}",
        "spec.address",
        "address cannot be changed",
    ),
    refused(
        NETWORK,
        PLAIN,
        "{default: true}",
        "spec.default",
        "default cannot be changed",
    ),
    refused(
        NETWORK,
        PLAIN,
        "{perNodePrefix: {ipv4: 27}}",
        "spec.perNodePrefix",
        "perNodePrefix cannot be changed",
    ),
    refused(
        NETWORK,
        BLOCKS,
        "{perNodePrefix: {ipv4: 27}}",
        "spec.perNodePrefix",
        "perNodePrefix cannot be changed",
    ),
    refused(
        NETWORK,
        BLOCKS,
        "{perNodePrefix: null}",
        "spec.perNodePrefix",
        "perNodePrefix cannot be changed",
    ),
    refused(
        NETWORK,
        PLAIN,
        "{provider: {type: Tap}}",
        "spec.provider",
        "provider cannot be changed",
    ),
    refused(
        NETWORK,
        MACVLAN,
        "{provider: {parent: eth2}}",
        "spec.provider",
        "provider cannot be changed",
    ),
    refused(
        NETWORK,
        MACVLAN,
        "{provider: null, subnets: [10.1.0.0/16]}",
        "spec.provider",
        "provider cannot be changed",
    ),
    taken(NETWORK, PLAIN, "{subnets: ['fd10::/64', 10.1.0.0/16, 10.2.0.0/16]}"),
    taken(NETWORK, PLAIN, "{provider: {type: Ebpf}}"),
    taken(NETWORK, PLAIN, "{access: {namespaces: {from: All}}}"),
    taken(NETWORK, MACVLAN, "{access: {namespaces: {from: All}, revoke: true}}"),
    refused(
        NETWORK,
        MACVLAN,
        "{access: null}",
        "spec.access",
        "name the namespaces that may join",
    ),
    taken(
        NETWORK,
        PLAIN,
        "{enabled: false, mtu: 9000, xdp: true, extendedResource: true}",
    ),
    taken(
        NETWORK,
        PLAIN,
        "{excludeSubnets: [10.1.0.0/24], serviceSubnets: [10.96.0.0/16], egress: {mode: Masquerade}}",
    ),
    taken(NETWORK, PLAIN, "{namespaceSelector: {matchLabels: {team: a}}}"),
    taken(NETWORK, MACVLAN, "{enabled: false, subnets: [10.1.0.0/16]}"),
    refused(
        ATTACHMENT,
        FIXED,
        "{podNetworkName: red}",
        "spec.podNetworkName",
        "podNetworkName cannot be changed",
    ),
    refused(
        ATTACHMENT,
        FIXED,
        "{interfaceName: net2}",
        "spec.interfaceName",
        "interfaceName cannot be changed",
    ),
    refused(
        ATTACHMENT,
        FIXED,
        "{mac: '02:00:00:00:00:02'}",
        "spec.mac",
        "mac cannot be changed",
    ),
    refused(ATTACHMENT, FIXED, "{mac: null}", "spec.mac", "mac cannot be changed"),
    refused(
        ATTACHMENT,
        JOINED,
        "{mac: '02:00:00:00:00:02'}",
        "spec.mac",
        "mac cannot be changed",
    ),
    refused(
        ATTACHMENT,
        FIXED,
        "{addresses: [10.10.0.8]}",
        "spec.addresses",
        "addresses cannot be changed",
    ),
    refused(
        ATTACHMENT,
        FIXED,
        "{addresses: null}",
        "spec.addresses",
        "addresses cannot be changed",
    ),
    refused(
        ATTACHMENT,
        JOINED,
        "{addresses: [10.10.0.8]}",
        "spec.addresses",
        "addresses cannot be changed",
    ),
    taken(
        ATTACHMENT,
        FIXED,
        "{podSelector: {matchLabels: {app: a}}, defaultRoute: true}",
    ),
    taken(
        EGRESS,
        "{podSelector: {}}",
        "{podSelector: {matchLabels: {app: a}}, podNetworkNames: [blue], defaultAction: Deny}",
    ),
    refused(
        INTERFACE,
        MADE,
        "{podName: q}",
        "spec.podName",
        "podName cannot be changed",
    ),
    refused(
        INTERFACE,
        MADE,
        "{podUid: v}",
        "spec.podUid",
        "podUid cannot be changed",
    ),
    refused(
        INTERFACE,
        MADE,
        "{nodeName: n2}",
        "spec.nodeName",
        "nodeName cannot be changed",
    ),
    refused(
        INTERFACE,
        MADE,
        "{podNetworkName: red}",
        "spec.podNetworkName",
        "podNetworkName cannot be changed",
    ),
    refused(
        INTERFACE,
        MADE,
        "{interfaceName: net1}",
        "spec.interfaceName",
        "interfaceName cannot be changed",
    ),
    taken(INTERFACE, MADE, "{sandboxId: t}"),
    refused(
        BLOCK,
        "{network: blue, networkUID: u, cidr: 10.1.0.64/26, nodeName: n1, nodeUID: v}",
        "{nodeName: n2}",
        "spec",
        "an address block cannot be changed",
    ),
    refused(
        BLOCK,
        "{network: blue, networkUID: u, cidr: 10.1.0.128/26, nodeName: n1, nodeUID: v}",
        "{networkUID: w, nodeUID: w}",
        "spec",
        "an address block cannot be changed",
    ),
    // Its node was registered again.
    taken(
        BLOCK,
        "{network: blue, networkUID: u, cidr: 10.1.0.192/26, nodeName: n1, nodeUID: v}",
        "{nodeUID: w}",
    ),
    refused(
        NUMBER,
        "{network: blue, networkUID: u}",
        "{networkUID: v}",
        "spec",
        "the number of a network cannot be changed",
    ),
    refused(
        MEMBERS,
        REPORT,
        "{network: red}",
        "spec.network",
        "network cannot be changed",
    ),
    refused(
        MEMBERS,
        REPORT,
        "{networkUID: w}",
        "spec.networkUID",
        "networkUID cannot be changed",
    ),
    refused(
        MEMBERS,
        REPORT,
        "{nodeName: n2}",
        "spec.nodeName",
        "nodeName cannot be changed",
    ),
    refused(
        MEMBERS,
        REPORT,
        "{nodeUID: w}",
        "spec.nodeUID",
        "nodeUID cannot be changed",
    ),
    taken(
        MEMBERS,
        REPORT,
        "{members: [{namespace: a, podName: b, podUID: c, interface: eth0}]}",
    ),
    refused(
        ENDPOINT,
        REACHED,
        "{nodeUID: w}",
        "spec.nodeUID",
        "nodeUID cannot be changed",
    ),
    refused(
        ENDPOINT,
        REACHED,
        "{nodeName: n2}",
        "spec.nodeName",
        "nodeName cannot be changed",
    ),
    taken(
        ENDPOINT,
        REACHED,
        "{addresses: ['2001:db8::1', 192.0.2.1], port: 4790, mtu: 9000, epoch: 2}",
    ),
    taken(NETWORK, PLAIN, "{fabric: Native}"),
    taken(NETWORK, "{subnets: [10.1.0.0/16], fabric: Overlay}", "{fabric: null}"),
];

#[test]
fn what_cannot_change_is_refused_and_the_rest_is_taken() -> Result<()> {
    require!(root, netns, api_server);
    let server = server()?;
    for (number, change) in CHANGES.iter().enumerate() {
        let name = match change.kind {
            BLOCK => block_name(change.before).context("a block has a range")?,
            NUMBER => "16777215".to_owned(),
            MEMBERS => format!("blue.change.{number}"),
            _ => format!("change-{number}"),
        };
        let object = change.before.replace("change-node", &name);
        let what = || format!("{} {}: {}", change.kind, change.before, change.patch);
        server
            .create(&manifest(change.kind, &name, &object))
            .with_context(what)?;
        let patch = format!("spec: {}", change.patch);
        let args = ["patch", change.kind, &name, "--type=merge", "--patch", &patch];
        if let Some(words) = change.refused {
            let message = server.refusal(&args, "").with_context(what)?;
            ensure!(words.iter().all(|word| message.contains(word)), "{}: {message}", what());
        } else {
            let before = spec(&server.kubectl_json(&["get", change.kind, &name])?);
            server.kubectl(&args).with_context(what)?;
            let after = spec(&server.kubectl_json(&["get", change.kind, &name])?);
            ensure!(before != after, "{}: nothing changed", what());
        }
    }
    Ok(())
}

#[test]
fn the_topology_has_a_rule_of_its_own() -> Result<()> {
    require!(root, netns, api_server);
    let definition = server()?.kubectl_json(&["get", "crd", "podnetworks.kni.dev"])?;
    let spec = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let rule = &spec["properties"]["topology"]["x-kubernetes-validations"][0];
    ensure!(rule["rule"] == "self == oldSelf", "{rule}");
    ensure!(rule["message"].as_str().is_some_and(|text| text.starts_with(TOPOLOGY)));
    Ok(())
}

/// The name that a block's range gives it.
fn block_name(object: &str) -> Option<String> {
    let (_, range) = object.split_once("cidr: ")?;
    let (range, _) = range.split_once(',')?;
    Some(format!("blue.v4-{}", range.replace(['.', '/'], "-")))
}

fn spec(object: &Value) -> Value {
    object["spec"].clone()
}
