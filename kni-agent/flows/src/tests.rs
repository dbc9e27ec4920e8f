//! Tests the views for operators with records as the programs write them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use kni_common::{
    Direction, Verdict,
    address::from_ip,
    event::{EVENT_VERSION, FlowEvent, PolicyTrail},
    flow::Ports,
};
use kni_dataplane::{FlowRecord, SupposedTunnel};
use kni_model::{
    Attachment, EndpointId, MacAddr, NetnsIdentity, Network, NetworkId, NetworkName, NetworkSpec, Phase, PodRef,
    Sandbox,
    flow_view::{ExplainQuestion, FlowView, Onward, PeerView, TrailView},
    network::EgressMode,
    policy::{PolicyDirection, PolicyKind, PolicyRef, RuleRef},
    view::Owner,
};

use super::{Naming, RemotePod, drops, ends, name, steps};

/// x/a on main (endpoint 1) and blue (endpoint 2), y/b on main (endpoint 3). Both networks have the same addresses.
struct Fake(Vec<Arc<Sandbox>>);

const DENYING_SET: u32 = 77;
const ALLOWING_SET: u32 = 78;

fn policy(kind: PolicyKind, name: &str) -> PolicyRef {
    PolicyRef {
        kind,
        namespace: "x".to_owned(),
        name: name.to_owned(),
    }
}

fn attachment(endpoint: u32, network: u32, ifname: &str, last: u8) -> Attachment {
    Attachment {
        endpoint: EndpointId(endpoint),
        network: network_name(network),
        definition: None,
        network_id: network.try_into().unwrap(),
        ifname: ifname.parse().unwrap(),
        ifindex: 2,
        host_ifname: format!("kni{endpoint}").parse().unwrap(),
        host_ifindex: 1_000_000 + endpoint,
        mac: MacAddr([2, 0, 0, 0, 0, last]),
        host_mac: MacAddr([2, 0, 0, 0, 1, last]),
        ipv4: Some(Ipv4Addr::new(10, 0, 0, last)),
        ipv6: (network == 1).then(|| Ipv6Addr::from(0xfd00 << 112 | u128::from(last))),
        mtu: 1500,
        default_route: true,
        host_access: network == 1,
        routes: Vec::new(),
        xdp: false,
        kind: kni_model::InterfaceKind::Veth,
        bandwidth: kni_model::Bandwidth::default(),
    }
}

fn network_name(id: u32) -> NetworkName {
    if id == 1 { "main" } else { "blue" }.parse().unwrap()
}

fn sandbox(namespace: &str, name: &str, attachments: Vec<Attachment>) -> Arc<Sandbox> {
    Arc::new(Sandbox {
        id: format!("{namespace}-{name}").parse().unwrap(),
        pod: PodRef {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: String::new(),
        },
        phase: Phase::Ready,
        netns: "/run/netns/x".into(),
        netns_identity: NetnsIdentity { dev: 1, inode: 1 },
        labels: BTreeMap::new(),
        port_mappings: Vec::new(),
        container_ports: Vec::new(),
        attachments,
        cni: None,
        parent: None,
    })
}

impl Fake {
    fn new() -> Self {
        Self(vec![
            sandbox("x", "a", vec![attachment(1, 1, "eth0", 2), attachment(2, 2, "net1", 2)]),
            sandbox("y", "b", vec![attachment(3, 1, "eth0", 3)]),
        ])
    }

    fn all(&self) -> impl Iterator<Item = (&Arc<Sandbox>, &Attachment)> {
        self.0
            .iter()
            .flat_map(|sandbox| sandbox.attachments.iter().map(move |a| (sandbox, a)))
    }
}

impl Naming for Fake {
    fn owner(&self, endpoint: EndpointId) -> Option<Owner> {
        self.attachment(endpoint).map(|(sandbox, attachment)| Owner {
            network: attachment.network,
            pod: sandbox.pod.clone(),
            ifname: attachment.ifname.to_string(),
            sandbox: sandbox.id.clone(),
        })
    }

    fn endpoint_at(&self, network: NetworkId, address: IpAddr) -> Option<EndpointId> {
        let has = |a: &Attachment| {
            a.network_id == network && [a.ipv4.map(IpAddr::V4), a.ipv6.map(IpAddr::V6)].contains(&Some(address))
        };
        self.all()
            .find(|(_, attachment)| has(attachment))
            .map(|(_, attachment)| attachment.endpoint)
    }

    fn network_name(&self, network: NetworkId) -> Option<NetworkName> {
        Some(network_name(network.get()))
    }

    fn service_name(&self, service: u32) -> Option<String> {
        (service == 9).then(|| "y/web:http".to_owned())
    }

    fn trail(&self, trail: &PolicyTrail, direction: PolicyDirection, allowed: bool) -> Option<TrailView> {
        let rule = RuleRef {
            policy: policy(PolicyKind::NetworkPolicy, "web"),
            direction,
            index: 1,
        };
        (trail.set != 0).then(|| TrailView {
            allowed,
            rule: (trail.set == ALLOWING_SET).then_some(rule),
            isolating: vec![policy(PolicyKind::NetworkPolicy, "default-deny")],
        })
    }

    fn refusal_of(&self, _namespace: &str, name: &str) -> Option<String> {
        (name == "refused").then(|| "network blue: spec.access.namespaces: no".to_owned())
    }

    fn sandbox_of(&self, namespace: &str, name: &str) -> Option<Arc<Sandbox>> {
        self.0
            .iter()
            .find(|s| s.pod.namespace == namespace && s.pod.name == name)
            .cloned()
    }

    fn attachment(&self, endpoint: EndpointId) -> Option<(Arc<Sandbox>, Attachment)> {
        self.all()
            .find(|(_, a)| a.endpoint == endpoint)
            .map(|(s, a)| (Arc::clone(s), a.clone()))
    }

    fn networks(&self) -> Vec<Network> {
        [1, 2]
            .map(|id: u32| Network {
                id: id.try_into().unwrap(),
                spec: NetworkSpec {
                    name: network_name(id),
                    default: id == 1,
                    enabled: true,
                    subnets: vec!["10.0.0.0/24".parse().unwrap()],
                    exclude_subnets: Vec::new(),
                    mtu: 1500,
                    egress: EgressMode::implied(id == 1),
                    egress_addresses: Vec::new(),
                    service_subnets: Vec::new(),
                    xdp: false,
                    provider: kni_model::Provider::Ebpf,
                    blocks: None,
                    access: kni_model::Access::default(),
                    number: None,
                    fabric: kni_model::Fabric::None,
                },
            })
            .into()
    }

    fn remote_at(&self, network: NetworkId, address: IpAddr) -> Option<Arc<RemotePod>> {
        Some(remote()).filter(|remote| remote.network == network && remote.addresses.contains(&address))
    }

    fn remote_pod(&self, namespace: &str, name: &str) -> Vec<Arc<RemotePod>> {
        let found = (namespace, name) == ("z", "far");
        found.then(remote).into_iter().collect()
    }

    fn node_at(&self, _network: Option<NetworkId>, address: IpAddr) -> Option<String> {
        (address == IpAddr::from([192, 0, 2, 2])).then(|| "n2".to_owned())
    }

    fn own_node(&self) -> String {
        "n1".to_owned()
    }
}

/// z/far on main, on node n2.
fn remote() -> Arc<RemotePod> {
    Arc::new(RemotePod {
        pod: PodRef {
            namespace: "z".to_owned(),
            name: "far".to_owned(),
            uid: String::new(),
        },
        ifname: "eth0".parse().unwrap(),
        network: 1.try_into().unwrap(),
        addresses: vec!["10.0.1.3".parse().unwrap(), "fd00:1::3".parse().unwrap()],
        node: "n2".to_owned(),
    })
}

const fn trail(set: u32) -> PolicyTrail {
    PolicyTrail {
        set,
        identity: 0,
        rule: 5,
        ordinal: 0,
    }
}

/// From x/a to y/b TCP 80 on main, as `from_pod` at x/a reports it.
fn event(verdict: Verdict) -> FlowEvent {
    let address = |text: &str| from_ip(text.parse().unwrap());
    let ports = Ports {
        source: 40_000_u16.to_be_bytes(),
        destination: 80_u16.to_be_bytes(),
    };
    FlowEvent {
        version: EVENT_VERSION,
        verdict: verdict as u16,
        direction: Direction::FromPod as u16,
        ethertype: 0x0800,
        endpoint: 1,
        network: 1,
        length: 74,
        source: address("10.0.0.2"),
        destination: address("10.0.0.3"),
        ports,
        protocol: 6,
        peer: 3,
        translated_source: address("10.0.0.2"),
        translated_destination: address("10.0.0.3"),
        translated_ports: ports,
        ..FlowEvent::default()
    }
}

fn named(event: FlowEvent) -> FlowView {
    name::flow(&record(event), &Fake::new())
}

fn record(event: FlowEvent) -> FlowRecord {
    FlowRecord {
        event,
        direction: Direction::from_code(event.direction).unwrap(),
        verdict: Verdict::from_code(event.verdict).unwrap(),
    }
}

#[test]
fn a_default_deny_names_the_policies_that_isolate() {
    let flow = named(FlowEvent {
        ingress: trail(DENYING_SET),
        ..event(Verdict::PolicyIngress)
    });
    assert_eq!(
        flow.explanation,
        "dropped: policy_ingress: NetworkPolicy x/default-deny isolates y/b (ingress) and no rule allows x/a TCP 80"
    );
    assert_eq!((flow.network.as_str(), flow.ifname.as_str()), ("main", "eth0"));
    assert_eq!(flow.source.pod.unwrap().to_string(), "x/a");
    assert_eq!((flow.egress, flow.external), (None, None), "no policy was consulted");
    assert!(!flow.ingress.unwrap().allowed);
}

#[test]
fn a_rule_that_allowed_is_named() {
    let flow = named(FlowEvent {
        egress: trail(ALLOWING_SET),
        ..event(Verdict::Redirected)
    });
    assert!(
        flow.explanation
            .ends_with("; egress allowed by NetworkPolicy x/web egress[1]"),
        "{}",
        flow.explanation
    );
    assert_eq!((flow.translated_source, flow.translated_destination), (None, None));
}

#[test]
fn behind_a_service_stands_the_pod_that_it_leads_to() {
    let mut event = event(Verdict::Redirected);
    event.destination = from_ip("10.96.0.1".parse().unwrap());
    event.translated_ports.destination = 8080_u16.to_be_bytes();
    event.service = 9;
    let flow = named(event);
    assert_eq!(flow.service.as_deref(), Some("y/web:http"));
    assert_eq!(flow.destination.pod.as_ref().unwrap().to_string(), "y/b");
    assert_eq!(flow.translated_destination, Some(("10.0.0.3".parse().unwrap(), 8080)));
    assert_eq!(flow.translated_source, None);
    let steps = steps::of(&flow, 0, &steps::Crossing::None);
    assert_eq!(
        steps,
        [
            "x/a sends TCP 80 from 10.0.0.2 to 10.96.0.1 by eth0 (network main)",
            "10.96.0.1:80 is service y/web:http, which leads to 10.0.0.3:8080",
            "10.0.0.3 is pod y/b of this node",
            "egress: no policy selects x/a",
            "ingress: no policy selects y/b",
            "redirected: delivered directly to a pod on this node",
        ]
    );
}

#[test]
fn what_met_no_endpoint_has_no_names() {
    let flow = named(FlowEvent {
        version: EVENT_VERSION,
        verdict: Verdict::NoEndpoint as u16,
        ..FlowEvent::default()
    });
    assert_eq!(
        (flow.source.ip, flow.destination.ip, flow.translated_source),
        (None, None, None)
    );
    assert_eq!((flow.network.as_str(), flow.pod.name.as_str()), ("", ""));
    assert_eq!(
        flow.explanation,
        "dropped: no_endpoint: the interface belongs to no endpoint"
    );
}

#[test]
fn an_echo_has_no_ports_but_drop_events_keep_its_identifier() {
    let event = FlowEvent {
        protocol: 1,
        ..event(Verdict::NoDestination)
    };
    let flow = named(event);
    assert_eq!((flow.source.port, flow.destination.port), (0, 0));
    let drop = drops::event(&flow, &record(event));
    assert_eq!((drop.source_port, drop.destination_port), (40_000, 80));
    assert_eq!(drop.network.unwrap().as_str(), "main");
}

#[test]
fn steps_end_where_the_packet_did() {
    let denied = named(FlowEvent {
        egress: trail(DENYING_SET),
        ..event(Verdict::PolicyEgress)
    });
    let steps_of = steps::of(&denied, 0, &steps::Crossing::None);
    assert_eq!(steps_of.len(), 4, "{steps_of:?}");
    assert_eq!(
        steps_of[2],
        "egress: isolated by NetworkPolicy x/default-deny, and no rule allows it"
    );
    let node = named(FlowEvent {
        direction: Direction::ToPod as u16,
        endpoint: 3,
        peer: 0,
        source: from_ip("192.0.2.1".parse().unwrap()),
        translated_source: from_ip("192.0.2.1".parse().unwrap()),
        ..event(Verdict::Delivered)
    });
    assert_eq!(
        steps::of(&node, 0, &steps::Crossing::None),
        [
            "the node sends TCP 80 from 192.0.2.1 to y/b at 10.0.0.3 by eth0 (network main)",
            "ingress: the node itself may always reach its pods",
            "delivered: accepted from the node's network stack",
        ]
    );
}

fn resolved(source: &str, destination: &str, network: Option<&str>) -> Result<(u32, u32, String, String), String> {
    let question = ExplainQuestion {
        source: source.to_owned(),
        destination: destination.to_owned(),
        protocol: 6,
        port: 80,
        network: network.map(str::to_owned),
        ..ExplainQuestion::default()
    };
    let ends = ends::find(&question, &Fake::new()).map_err(|error| error.to_string())?;
    let endpoint = |end: &Option<Attachment>| end.as_ref().map_or(0, |end| end.endpoint.0);
    Ok((
        endpoint(&ends.source),
        endpoint(&ends.destination),
        ends.source_ip.to_string(),
        ends.destination_ip.to_string(),
    ))
}

fn found(source: u32, destination: u32, from: &str, to: &str) -> (u32, u32, String, String) {
    (source, destination, from.to_owned(), to.to_owned())
}

#[test]
fn ends_are_found_in_the_network_of_the_question() {
    assert_eq!(resolved("x/a", "y/b", None), Ok(found(1, 3, "10.0.0.2", "10.0.0.3")));
    assert_eq!(
        resolved("x/a", "10.0.0.3", None),
        Ok(found(1, 3, "10.0.0.2", "10.0.0.3"))
    );
    assert_eq!(resolved("x/a", "fd00::3", None), Ok(found(1, 3, "fd00::2", "fd00::3")));
    assert_eq!(
        resolved("x/a", "10.0.0.3", Some("blue")),
        Ok(found(2, 0, "10.0.0.2", "10.0.0.3"))
    );
    assert_eq!(
        resolved("x/a@net1", "10.0.0.3", None),
        Ok(found(2, 0, "10.0.0.2", "10.0.0.3"))
    );
    assert_eq!(
        resolved("192.0.2.1", "x/a@net1", None),
        Ok(found(0, 2, "192.0.2.1", "10.0.0.2"))
    );
    assert_eq!(
        resolved("192.0.2.1", "10.0.0.3", None),
        Ok(found(0, 3, "192.0.2.1", "10.0.0.3"))
    );
    assert_eq!(resolved("x/a", "z/far", None), Ok(found(1, 0, "10.0.0.2", "10.0.1.3")));
    assert_eq!(resolved("z/far", "x/a", None), Ok(found(0, 1, "10.0.1.3", "10.0.0.2")));
    assert_eq!(
        resolved("10.0.0.3", "8.8.8.8", None),
        Ok(found(3, 0, "10.0.0.3", "8.8.8.8"))
    );
}

#[test]
fn questions_about_nothing_say_what_is_missing() {
    for (source, destination, network, expected) in [
        ("x/nobody", "y/b", None, "pod x/nobody is not attached on this node"),
        ("x/a@net7", "y/b", None, "pod x/a by net7 is not attached on this node"),
        (
            "x/a",
            "y/b",
            Some("blue"),
            "pod y/b to network blue is not attached on this node",
        ),
        ("x/a", "y/b", Some("red"), "network red is not attached on this node"),
        (
            "x/a@net1",
            "fd00::3",
            None,
            "destination: both ends must have addresses of one family",
        ),
        (
            "192.0.2.1",
            "192.0.2.2",
            None,
            "source: neither end is a pod of this node on network main",
        ),
        ("web", "y/b", None, "source: \"web\" is neither namespace/pod,"),
        ("x/a", "y/b@", None, "destination: \"y/b@\" is neither namespace/pod,"),
    ] {
        let error = resolved(source, destination, network).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
}

fn onward(number: Option<u32>) -> Onward {
    Onward {
        node: Some("n2".to_owned()),
        underlay: "192.0.2.2".parse().unwrap(),
        sender: Some("192.0.2.1".parse().unwrap()),
        number,
        tunnel_port: 4789,
        mtu: 1450,
        source: "10.0.0.2".parse().unwrap(),
        destination: "10.0.1.3".parse().unwrap(),
        port: 80,
    }
}

#[test]
fn a_pod_of_another_node_has_its_name_and_its_node() {
    let far = from_ip("10.0.1.3".parse().unwrap());
    let sent = FlowEvent {
        destination: far,
        translated_destination: far,
        peer: 0,
        ..event(Verdict::Tunnelled)
    };
    let flow = named(sent);
    let PeerView { pod, node, .. } = &flow.destination;
    assert_eq!(
        (pod.as_ref().unwrap().to_string(), node.as_deref()),
        ("z/far".to_owned(), Some("n2"))
    );
    assert_eq!(flow.source.node, None, "a pod of this node");
    assert_eq!(
        steps::of(&flow, 0, &steps::Crossing::Out(onward(Some(5000)))),
        [
            "x/a sends TCP 80 from 10.0.0.2 to 10.0.0.3 by eth0 (network main)".replace("10.0.0.3", "10.0.1.3"),
            "10.0.1.3 is pod z/far of node n2".to_owned(),
            "egress: no policy selects x/a".to_owned(),
            "way: through the tunnel to node n2 at 192.0.2.2, UDP port 4789, as number 5000 (network main); packets of at \
             most 1450 bytes"
                .to_owned(),
            format!("tunnelled: {}", Verdict::Tunnelled.explanation()),
        ]
    );
    // Behind a Service the backend is named.
    let service = from_ip("10.96.0.1".parse().unwrap());
    let flow = named(FlowEvent {
        destination: service,
        service: 9,
        ..sent
    });
    assert_eq!(flow.destination.pod.unwrap().to_string(), "z/far");
    let node = from_ip("192.0.2.2".parse().unwrap());
    let flow = named(FlowEvent {
        destination: node,
        translated_destination: node,
        ..sent
    });
    assert_eq!(
        (flow.destination.pod, flow.destination.node.as_deref()),
        (None, Some("n2"))
    );
    let steps = steps::of(
        &named(FlowEvent {
            destination: node,
            translated_destination: node,
            ..sent
        }),
        0,
        &steps::Crossing::Out(onward(None)),
    );
    assert_eq!(steps[1], "192.0.2.2 is node n2");
    assert_eq!(
        steps[2..4],
        ["egress: no policy selects x/a", "leaving: no policy selects x/a"]
    );
}

/// From z/far to x/a, as `from_overlay` reports it.
fn arriving(verdict: Verdict) -> FlowView {
    let (far, own) = (
        from_ip("10.0.1.3".parse().unwrap()),
        from_ip("10.0.0.2".parse().unwrap()),
    );
    named(FlowEvent {
        direction: Direction::FromOverlay as u16,
        source: far,
        translated_source: far,
        destination: own,
        translated_destination: own,
        peer: 0,
        ingress: if verdict == Verdict::PolicyIngress {
            trail(DENYING_SET)
        } else {
            PolicyTrail::default()
        },
        ..event(verdict)
    })
}

#[test]
fn an_arrival_has_the_steps_of_its_program() {
    let crossing = |owner: Option<&str>| steps::Crossing::In {
        tunnel: SupposedTunnel {
            number: 5000,
            sender: "192.0.2.2".parse().unwrap(),
        },
        sender: Some("n2".to_owned()),
        owner: owner.map(|underlay| steps::Owner {
            name: None,
            underlay: underlay.parse().unwrap(),
            overlay: true,
            is_node: false,
        }),
    };
    let denied = steps::of(&arriving(Verdict::PolicyIngress), 0, &crossing(Some("192.0.2.2")));
    let begin = "TCP 80 from 10.0.1.3 to 10.0.0.2 arrives through the tunnel from node n2 at 192.0.2.2";
    assert_eq!(
        denied,
        [
            begin,
            "number: 5000 is that of network main",
            "destination: 10.0.0.2 is pod x/a of this node",
            "source: an unnamed node at 192.0.2.2 has 10.0.1.3",
            "identity: 10.0.1.3 is the confirmed pod z/far",
            "ingress: isolated by NetworkPolicy x/default-deny, and no rule allows it",
            "dropped: policy_ingress: NetworkPolicy x/default-deny isolates x/a (ingress) and no rule allows z/far TCP 80",
        ]
    );
    let foreign = steps::of(&arriving(Verdict::ForeignNode), 0, &crossing(Some("192.0.2.3")));
    assert_eq!(
        foreign[3],
        "source: an unnamed node at 192.0.2.3 has 10.0.1.3, not 192.0.2.2"
    );
    let unowned = steps::of(&arriving(Verdict::OwnerUnknown), 0, &crossing(None));
    assert_eq!(unowned[3], "source: no node is known to have 10.0.1.3");
    let unknown = FlowView {
        network: String::new(),
        ..arriving(Verdict::UnknownNetwork)
    };
    let unknown = steps::of(&unknown, 0, &crossing(None));
    assert_eq!(unknown[..2], [begin, "number: 5000 is that of no network of this node"]);
    assert_eq!(unknown.len(), 3);
}
