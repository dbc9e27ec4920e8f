//! Tests the methods of `kni.runtime.v1.Runtime` about flows, policy and services.

use std::{path::PathBuf, sync::Arc};

use kni_common::{Direction, Verdict};
use kni_model::{
    PodRef,
    flow_view::{
        EffectiveRuleView, ExplainQuestion, ExplainView, FlowFilter, FlowView, Onward, PeerView, PolicyOfInterface,
        ProbedNode, QuestionError, ServiceView, TrailView, TunnelProbe,
    },
    policy::{PolicyDirection, PolicyKind, PolicyRef, RuleRef},
    view::{
        Count, DropEventView, DropView, EndpointCounts, InterfaceFilter, InterfaceView, MapView, NetworkView,
        ProgramView, RefusedManifest, StatusView, UplinkView,
    },
};
use kni_proto::runtime::{
    Arrival, ExplainRequest, Flow, FlowFilter as WireFilter, GetPolicyRequest, ListFlowsRequest, ListServicesRequest,
    Policy, ProbeTunnelRequest, Rule, SocketAddress, WatchFlowsRequest, runtime_client::RuntimeClient,
};
use tokio::sync::broadcast;
use tonic::Code;

use super::{
    Served,
    fake::{Fake, event},
    soon,
};
use crate::Inspect;

fn pod(name: &str) -> PodRef {
    PodRef {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
        uid: "uid".to_owned(),
    }
}

fn policy(name: &str) -> PolicyRef {
    PolicyRef {
        kind: PolicyKind::NetworkPolicy,
        namespace: "shop".to_owned(),
        name: name.to_owned(),
    }
}

/// A drop by a default deny behind a service, distinguished from others by its time.
fn flow(time_ns: u64) -> FlowView {
    FlowView {
        time_ns,
        verdict: Verdict::PolicyIngress,
        direction: Direction::FromPod,
        network: "blue".to_owned(),
        source: PeerView {
            ip: Some("10.1.0.2".parse().unwrap()),
            port: 4000,
            pod: Some(pod("web-0")),
            node: None,
        },
        destination: PeerView {
            ip: Some("10.96.0.1".parse().unwrap()),
            port: 80,
            pod: None,
            node: Some("n2".to_owned()),
        },
        translated_source: None,
        translated_destination: Some(("10.1.0.3".parse().unwrap(), 8080)),
        service: Some("shop/db:http".to_owned()),
        protocol: 6,
        length: 74,
        ethertype: 0x0800,
        pod: pod("web-0"),
        ifname: "eth0".to_owned(),
        egress: Some(TrailView {
            allowed: true,
            rule: Some(RuleRef {
                policy: policy("out"),
                direction: PolicyDirection::Egress,
                index: 2,
            }),
            isolating: vec![policy("out")],
        }),
        ingress: Some(TrailView {
            allowed: false,
            rule: None,
            isolating: vec![policy("deny")],
        }),
        external: None,
        explanation: "dropped".to_owned(),
    }
}

/// A forwarded flow.
fn passed(time_ns: u64) -> FlowView {
    FlowView {
        verdict: Verdict::Redirected,
        ..flow(time_ns)
    }
}

fn program() -> ProgramView {
    ProgramView {
        name: "from_pod".to_owned(),
        id: 77,
        hook: "tcx/ingress".to_owned(),
        link_id: 78,
    }
}

impl Inspect for Fake {
    fn networks(&self) -> Vec<NetworkView> {
        self.networks.lock().unwrap().clone()
    }

    fn refused(&self) -> Vec<RefusedManifest> {
        let (file, field, reason) = ("bad.yaml".to_owned(), "spec.mtu".to_owned(), "too small".to_owned());
        vec![RefusedManifest {
            file,
            line: 3,
            field,
            reason,
        }]
    }

    fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView> {
        self.note(format!("{filter:?}"));
        let sandboxes = self.sandboxes.lock().unwrap();
        let views = sandboxes.values().flat_map(|sandbox| {
            sandbox.attachments.iter().map(|attachment| InterfaceView {
                sandbox: Arc::clone(sandbox),
                attachment: attachment.clone(),
                programs: vec![program()],
                provisional: false,
                counts: EndpointCounts {
                    from_pod: Count { packets: 5, bytes: 500 },
                    ..EndpointCounts::default()
                },
                problems: vec!["the route is missing".to_owned()],
            })
        });
        views.collect()
    }

    fn drops(&self) -> Vec<DropView> {
        let event = event(0);
        vec![DropView {
            network: event.network,
            pod: event.pod,
            ifname: event.ifname,
            direction: event.direction,
            reason: event.reason,
            count: Count { packets: 2, bytes: 120 },
        }]
    }

    fn maps(&self) -> Vec<MapView> {
        vec![MapView {
            name: "ENDPOINTS".to_owned(),
            id: 9,
            kind: "array".to_owned(),
            key_size: 4,
            value_size: 48,
            max_entries: 1024,
            entries: 2,
            pin: PathBuf::from("/sys/fs/bpf/kni/v1/maps/ENDPOINTS"),
            purpose: "endpoints".to_owned(),
        }]
    }

    fn status(&self) -> StatusView {
        StatusView {
            ready: true,
            reasons: vec!["one manifest is refused".to_owned()],
            state_lost: None,
            hook: "tcx".to_owned(),
            pin_path: PathBuf::from("/sys/fs/bpf/kni/v1"),
            sandboxes: 1,
            attachments: 2,
            endpoints_capacity: 1023,
            warm_sandboxes: 8,
            pending_removals: 4,
            pending_links: 2,
            uplink: UplinkView {
                ifname: "uplink0".to_owned(),
                ifindex: 2,
                sources: vec![[192, 0, 2, 2].into()],
                dedicated: vec![[192, 0, 2, 77].into()],
                programs: vec![program()],
                xdp: "native".to_owned(),
                host_ports: 3,
                warning: String::new(),
            },
        }
    }

    fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView> {
        self.events.subscribe()
    }

    fn flows(&self, filter: &FlowFilter) -> Vec<Arc<FlowView>> {
        self.note(format!("{filter:?}"));
        vec![Arc::new(flow(1)), Arc::new(passed(2))]
    }

    fn subscribe_flows(&self) -> broadcast::Receiver<Arc<FlowView>> {
        self.flows.subscribe()
    }

    fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError> {
        self.note(format!("{question:?}"));
        match question.source.as_str() {
            "shop/gone" => Err(QuestionError::NotFound {
                what: "pod shop/gone".to_owned(),
            }),
            "shop/broken" => Err(QuestionError::Failed("the device is gone\nindeed".to_owned())),
            _ => Ok(ExplainView {
                flow: flow(3),
                steps: vec!["route: service".to_owned(), "ingress: denied".to_owned()],
                node: "n1".to_owned(),
                onward: Some(Onward {
                    node: Some("n2".to_owned()),
                    underlay: "192.0.2.2".parse().unwrap(),
                    sender: Some("192.0.2.1".parse().unwrap()),
                    number: Some(5000),
                    tunnel_port: 4789,
                    mtu: 1450,
                    source: "10.1.0.2".parse().unwrap(),
                    destination: "10.1.1.3".parse().unwrap(),
                    port: 8080,
                }),
            }),
        }
    }

    fn probe_tunnel(&self) -> Result<TunnelProbe, QuestionError> {
        Ok(TunnelProbe {
            nodes: vec![ProbedNode {
                node: "n2".to_owned(),
                underlay: "192.0.2.2".parse().unwrap(),
                answers: true,
                answers_through_tunnel: false,
            }],
            others: 3,
            port: 4789,
            obstacle: String::new(),
        })
    }

    fn policy(&self, pod: &PodRef) -> Result<Vec<PolicyOfInterface>, QuestionError> {
        self.note(format!("{pod}"));
        let rules = vec![EffectiveRuleView {
            direction: PolicyDirection::Ingress,
            rule: None,
            isolating: vec![policy("deny")],
            peers: "any".to_owned(),
            ports: "all".to_owned(),
            hits: 9,
        }];
        Ok(vec![PolicyOfInterface {
            ifname: "eth0".parse().unwrap(),
            network: "blue".parse().unwrap(),
            policy_set: 77,
            rules,
        }])
    }

    fn services(&self) -> Vec<ServiceView> {
        vec![ServiceView {
            service: "shop/db:http".to_owned(),
            network: "blue".to_owned(),
            address: "fd96::1".parse().unwrap(),
            port: 80,
            protocol: 132,
            backends: vec![("fd00::3".parse().unwrap(), 8080)],
            affinity_seconds: Some(60),
            problem: String::new(),
        }]
    }
}

fn wire_policy(name: &str) -> Policy {
    Policy {
        kind: "NetworkPolicy".to_owned(),
        namespace: "shop".to_owned(),
        name: name.to_owned(),
    }
}

fn check_drop(flow: &Flow) {
    let (source, destination) = (flow.source.clone().unwrap(), flow.destination.clone().unwrap());
    assert_eq!(
        (
            source.ip.as_str(),
            source.port,
            source.pod_namespace.as_str(),
            source.pod_name.as_str()
        ),
        ("10.1.0.2", 4000, "shop", "web-0")
    );
    assert_eq!(
        (destination.ip.as_str(), destination.port, destination.pod_name.as_str()),
        ("10.96.0.1", 80, "")
    );
    assert_eq!((flow.verdict.as_str(), flow.allowed), ("policy_ingress", false));
    assert_eq!(
        (flow.direction.as_str(), flow.network.as_str(), flow.protocol.as_str()),
        ("from_pod", "blue", "TCP")
    );
    assert_eq!(flow.translated_source, None);
    let translated = SocketAddress {
        ip: "10.1.0.3".to_owned(),
        port: 8080,
    };
    assert_eq!(flow.translated_destination, Some(translated));
    assert_eq!((flow.service.as_str(), flow.ifname.as_str()), ("shop/db:http", "eth0"));
    assert_eq!((flow.length, flow.ethertype, flow.lost), (74, 0x0800, 0));
    assert_eq!(flow.explanation, "dropped");
    check_decisions(flow);
}

fn check_decisions(flow: &Flow) {
    let egress = flow.egress.clone().unwrap();
    let rule = Rule {
        policy: Some(wire_policy("out")),
        direction: "egress".to_owned(),
        index: 2,
    };
    assert_eq!((egress.allowed, egress.rule), (true, Some(rule)));
    let ingress = flow.ingress.clone().unwrap();
    assert_eq!(
        (ingress.allowed, ingress.rule, ingress.isolating),
        (false, None, vec![wire_policy("deny")])
    );
    assert_eq!(flow.beyond, None);
}

#[tokio::test]
async fn history_tells_all_of_a_flow() {
    let served = Served::start().await;
    let mut client = RuntimeClient::new(served.connect("one").await);
    let filter = WireFilter {
        pod_namespace: "a".to_owned(),
        pod_name: "b".to_owned(),
        network: "c".to_owned(),
        drops_only: true,
    };
    let request = ListFlowsRequest { filter: Some(filter) };
    let flows = client.list_flows(request).await.unwrap().into_inner().flows;
    let asked = r#"FlowFilter { pod_namespace: "a", pod_name: "b", network: "c", drops_only: true }"#;
    assert_eq!(served.backend.calls(), [asked]);
    check_drop(&flows[0]);
    assert_eq!((flows[1].verdict.as_str(), flows[1].allowed), ("redirected", true));
    client.list_flows(ListFlowsRequest::default()).await.unwrap();
    assert_eq!(served.backend.calls(), [format!("{:?}", FlowFilter::default())]);
    served.stop().await;
}

#[tokio::test]
async fn watched_flows_are_filtered_and_count_what_was_lost() {
    let mut served = Served::start().await;
    let mut client = RuntimeClient::new(served.connect("two").await);
    let filter = WireFilter {
        drops_only: true,
        ..WireFilter::default()
    };
    let request = WatchFlowsRequest { filter: Some(filter) };
    let mut flows = client.watch_flows(request).await.unwrap().into_inner();
    let send = |view: FlowView| assert_eq!(served.backend.flows.send(Arc::new(view)).unwrap(), 1);
    send(passed(1));
    send(flow(2));
    let first = soon(flows.message()).await.unwrap().unwrap();
    assert_eq!(first.time_ns, 2, "what is not asked for is left out");
    check_drop(&first);
    // The channel holds four; nothing reads it while this task sends without a pause.
    for time in 3..=22 {
        send(flow(time));
    }
    let mut seen = vec![2];
    while seen.last() != Some(&22) {
        let flow = soon(flows.message()).await.unwrap().unwrap();
        let before = seen.last().copied().unwrap();
        assert_eq!(flow.time_ns, before + flow.lost + 1, "lost events are counted");
        seen.push(flow.time_ns);
    }
    assert!(seen.len() < 20, "some were lost: {seen:?}");
    served.request_stop();
    assert_eq!(soon(flows.message()).await.unwrap(), None, "the stream ends in order");
    soon(&mut served.server).await.unwrap().unwrap();
}

#[tokio::test]
async fn explanations_and_their_errors() {
    let served = Served::start().await;
    let mut client = RuntimeClient::new(served.connect("one").await);
    let question = ExplainRequest {
        source: "shop/web-0".to_owned(),
        destination: "10.96.0.1".to_owned(),
        protocol: "tcp".to_owned(),
        port: 80,
        network: "blue".to_owned(),
        length: 1400,
        arrival: Some(Arrival {
            sender: "192.0.2.3".to_owned(),
            number: 5000,
        }),
    };
    let answer = client.explain(question.clone()).await.unwrap().into_inner();
    assert_eq!((answer.allowed, answer.steps.len()), (false, 2));
    check_drop(&answer.flow.unwrap());
    let onward = answer.onward.unwrap();
    let tunnel = onward.tunnel.unwrap();
    assert_eq!((answer.node.as_str(), onward.node.as_str()), ("n1", "n2"));
    assert_eq!((tunnel.sender.as_str(), tunnel.number), ("192.0.2.1", 5000));
    assert_eq!(
        (onward.destination.as_str(), onward.port, onward.mtu),
        ("10.1.1.3", 8080, 1450)
    );
    let asked = "ExplainQuestion { source: \"shop/web-0\", destination: \"10.96.0.1\", protocol: 6, port: 80, \
                 network: Some(\"blue\"), length: Some(1400), \
                 arrival: Some(Arrival { sender: 192.0.2.3, number: 5000 }) }";
    assert_eq!(served.backend.calls(), [asked]);
    for (source, code, message) in [
        ("", Code::InvalidArgument, "source: is empty"),
        (
            "shop/gone",
            Code::NotFound,
            "pod shop/gone is not attached on this node",
        ),
        ("shop/broken", Code::Internal, "the device is gone indeed"),
    ] {
        let source = source.to_owned();
        let status = client
            .explain(ExplainRequest {
                source,
                ..question.clone()
            })
            .await
            .unwrap_err();
        assert_eq!((status.code(), status.message()), (code, message));
    }
    let probe = client.probe_tunnel(ProbeTunnelRequest {}).await.unwrap().into_inner();
    let node = &probe.nodes[0];
    assert_eq!((probe.others, probe.port, node.node.as_str()), (3, 4789, "n2"));
    assert_eq!((node.answers, node.answers_through_tunnel), (true, false));
    served.stop().await;
}

#[tokio::test]
async fn policy_and_services() {
    let served = Served::start().await;
    let mut client = RuntimeClient::new(served.connect("one").await);
    let request = GetPolicyRequest {
        pod_namespace: "shop".to_owned(),
        pod_name: "web-0".to_owned(),
    };
    let answer = client.get_policy(request).await.unwrap().into_inner().interfaces;
    assert_eq!(served.backend.calls(), ["shop/web-0"]);
    let eth0 = &answer[0];
    assert_eq!(
        (eth0.ifname.as_str(), eth0.network.as_str(), eth0.policy_set),
        ("eth0", "blue", 77)
    );
    let deny = &eth0.rules[0];
    assert_eq!((deny.direction.as_str(), deny.hits), ("ingress", 9));
    assert_eq!(
        (deny.rule.clone(), deny.isolating.clone()),
        (None, vec![wire_policy("deny")])
    );
    assert_eq!((deny.peers.as_str(), deny.ports.as_str()), ("any", "all"));

    let services = client
        .list_services(ListServicesRequest {})
        .await
        .unwrap()
        .into_inner()
        .services;
    let service = &services[0];
    assert_eq!(
        (service.service.as_str(), service.address.as_str(), service.port),
        ("shop/db:http", "fd96::1", 80)
    );
    assert_eq!((service.protocol.as_str(), service.affinity_seconds), ("SCTP", 60));
    assert_eq!(service.backends[0].ip, "fd00::3");
    served.stop().await;
}
