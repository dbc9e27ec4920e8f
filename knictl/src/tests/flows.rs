//! Tests `flows`, `explain`, `policy` and `services`: the requests, and each format of the answers.

use std::{future::pending, time::Duration};

use kni_proto::runtime::{
    Arrival, EffectiveRule, ExplainRequest, ExplainResponse, Flow, FlowFilter, GetPolicyRequest, GetPolicyResponse,
    InterfacePolicy, ListServicesResponse, Onward, Peer, Policy, PolicyDecision, Rule, ServicePort, SocketAddress,
};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{Ran, knictl, knictl_on};
use crate::{
    cli::Format,
    commands::explain::{Explanation, Half},
    event::Timed,
    fake::{After, Agent, Answers},
    terminal::Terminal,
};

fn policy(name: &str) -> Policy {
    Policy {
        kind: "NetworkPolicy".into(),
        namespace: "shop".into(),
        name: name.into(),
    }
}

fn rule(name: &str, direction: &str, index: u32) -> Rule {
    Rule {
        policy: Some(policy(name)),
        direction: direction.into(),
        index,
    }
}

fn peer(ip: &str, port: u32, pod: &str) -> Peer {
    let pod_namespace = if pod.is_empty() { "" } else { "shop" };
    Peer {
        ip: ip.into(),
        port,
        pod_namespace: pod_namespace.into(),
        pod_name: pod.into(),
        node: String::new(),
    }
}

/// Denied by the receiver's default deny, behind a service.
fn denied() -> Flow {
    Flow {
        time_ns: 1_000_000_000,
        verdict: "policy_ingress".into(),
        allowed: false,
        direction: "from_pod".into(),
        network: "blue".into(),
        source: Some(peer("10.0.0.5", 4000, "web-0")),
        destination: Some(peer("10.96.0.1", 80, "")),
        translated_source: None,
        translated_destination: Some(SocketAddress {
            ip: "10.0.0.6".into(),
            port: 8080,
        }),
        service: "shop/db:http".into(),
        protocol: "TCP".into(),
        length: 74,
        ethertype: 0x0800,
        pod_namespace: "shop".into(),
        pod_name: "web-0".into(),
        ifname: "eth0".into(),
        egress: Some(PolicyDecision {
            allowed: true,
            rule: Some(rule("out", "egress", 2)),
            isolating: vec![policy("out")],
        }),
        ingress: Some(PolicyDecision {
            allowed: false,
            rule: None,
            isolating: vec![policy("deny")],
        }),
        beyond: None,
        explanation: "no rule allows it".into(),
        lost: 0,
    }
}

/// A forwarded echo request over IPv6 with a hostile name, after lost events.
fn passed() -> Flow {
    Flow {
        time_ns: 2_000_000_000,
        verdict: "redirected".into(),
        allowed: true,
        source: Some(peer("fd00::5", 7, "web-0")),
        destination: Some(peer("fd00::6", 7, "db\u{1b}[2J\n")),
        translated_destination: None,
        service: String::new(),
        protocol: "ICMPv6".into(),
        ethertype: 0x86dd,
        egress: None,
        ingress: None,
        explanation: "delivered".into(),
        lost: 3,
        ..denied()
    }
}

fn pod_policy() -> GetPolicyResponse {
    let rules = vec![
        EffectiveRule {
            direction: "ingress".into(),
            rule: Some(rule("web", "ingress", 0)),
            isolating: vec![policy("web"), policy("deny")],
            peers: "pods app=lb".into(),
            ports: "TCP 80".into(),
            hits: 17,
        },
        EffectiveRule {
            direction: "ingress".into(),
            rule: None,
            isolating: vec![policy("web"), policy("deny")],
            peers: "any".into(),
            ports: "all".into(),
            hits: 4,
        },
    ];
    let interface = |ifname: &str, network: &str, policy_set, rules| InterfacePolicy {
        ifname: ifname.into(),
        network: network.into(),
        policy_set,
        rules,
    };
    GetPolicyResponse {
        interfaces: vec![
            interface("eth0", "blue", 77, rules),
            interface("net1", "red", 0, vec![]),
        ],
    }
}

fn services() -> ListServicesResponse {
    let service = ServicePort {
        service: "shop/db:http".into(),
        network: "blue".into(),
        address: "10.96.0.1".into(),
        port: 80,
        protocol: "TCP".into(),
        backends: vec![
            SocketAddress {
                ip: "10.0.0.6".into(),
                port: 8080,
            },
            SocketAddress {
                ip: "10.0.0.7".into(),
                port: 8080,
            },
        ],
        affinity_seconds: 10_800,
        problem: String::new(),
    };
    let empty = ServicePort {
        address: "fd96::1".into(),
        backends: vec![],
        affinity_seconds: 0,
        problem: "no endpoint is ready".into(),
        ..service.clone()
    };
    ListServicesResponse {
        services: vec![service, empty],
    }
}

fn answers() -> Answers {
    Answers {
        flows: vec![denied(), passed()],
        explanation: ExplainResponse {
            allowed: false,
            flow: Some(denied()),
            steps: vec!["route: service".into(), "ingress policy of shop/db: denied".into()],
            ..ExplainResponse::default()
        },
        policy: pod_policy(),
        services: services(),
        ..Answers::default()
    }
}

fn ok(out: &str) -> Ran {
    Ran {
        code: 0,
        out: out.to_owned(),
        err: String::new(),
    }
}

async fn document(agent: &Agent, args: &[&str], form: &str) -> Value {
    let ran = knictl(agent, &[args, &["-o", form]].concat()).await;
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{args:?}");
    match form {
        "json" => serde_json::from_str(&ran.out).unwrap(),
        _ => serde_saphyr::from_str(&ran.out).unwrap(),
    }
}

#[tokio::test]
async fn flows_are_a_table() {
    let agent = Agent::serve(answers());
    let expected = "\
TIME                          VERDICT          NETWORK   PROTOCOL   SOURCE                        DESTINATION                            SERVICE        EXPLANATION
1970-01-01T00:00:01.000000Z   policy_ingress   blue      TCP        10.0.0.5:4000 (shop/web-0)    10.96.0.1:80                           shop/db:http   no rule allows it
1970-01-01T00:00:02.000000Z   redirected       blue      ICMPv6     fd00::5 (shop/web-0)          fd00::6 (shop/db\\u{1b}[2J\\n)           <none>         delivered
";
    let squeeze = |text: &str| {
        text.lines()
            .map(|line| {
                line.split("   ")
                    .map(str::trim)
                    .filter(|cell| !cell.is_empty())
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .collect::<Vec<_>>()
    };
    let ran = knictl(&agent, &["flows"]).await;
    assert_eq!(squeeze(&ran.out), squeeze(expected));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let wide = squeeze(&knictl(&agent, &["flows", "-o", "wide"]).await.out);
    let more = [
        "from_pod",
        "shop/web-0",
        "eth0",
        "74",
        "<none>",
        "10.0.0.6:8080",
        "allowed by NetworkPolicy shop/out egress[2]",
        "denied: NetworkPolicy shop/deny isolates the pod and no rule allows it",
        "<none>",
    ];
    assert_eq!(wide[1][7..16], more);
}

const LINES: [&str; 2] = [
    "1970-01-01T00:00:01.000000Z blue policy_ingress from_pod TCP 10.0.0.5:4000 (shop/web-0) > 10.96.0.1:80 \
     (shop/db:http) as 10.0.0.6:8080 len 74 no rule allows it",
    "1970-01-01T00:00:02.000000Z blue redirected from_pod ICMPv6 fd00::5 (shop/web-0) > fd00::6 \
     (shop/db\\u{1b}[2J\\n) len 74 delivered (3 events lost before)",
];

#[tokio::test]
async fn followed_flows_are_lines() {
    let agent = Agent::serve(answers());
    let ran = knictl(&agent, &["flows", "--follow"]).await;
    assert_eq!(ran.out.lines().collect::<Vec<_>>(), LINES);
    assert_eq!((ran.code, ran.err.as_str()), (0, "The agent ended the stream.\n"));
    let wide = knictl(&agent, &["flows", "-f", "-o", "wide"]).await.out;
    let told = " [egress allowed by NetworkPolicy shop/out egress[2]] [ingress denied: NetworkPolicy shop/deny isolates \
                the pod and no rule allows it] no rule allows it\n";
    assert!(wide.contains(told), "{wide}");
    let stays = Agent::serve(Answers {
        after: After::Stays,
        ..answers()
    });
    let ran = knictl_on(&stays.socket(), &["flows", "-f"], sleep(Duration::from_millis(500))).await;
    assert_eq!((ran.code, ran.out.lines().count(), ran.err.as_str()), (0, 2, ""));
}

#[tokio::test]
async fn flows_as_documents() {
    let agent = Agent::serve(answers());
    let expected = json!({
        "time": "1970-01-01T00:00:01.000000Z", "timeNs": 1_000_000_000_u64, "verdict": "policy_ingress",
        "allowed": false, "direction": "from_pod", "network": "blue",
        "source": {"ip": "10.0.0.5", "port": 4000, "podNamespace": "shop", "podName": "web-0", "node": ""},
        "destination": {"ip": "10.96.0.1", "port": 80, "podNamespace": "", "podName": "", "node": ""},
        "service": "shop/db:http", "protocol": "TCP", "length": 74, "ethertype": 0x0800, "podNamespace": "shop",
        "podName": "web-0", "ifname": "eth0", "explanation": "no rule allows it", "lost": 0,
        "translatedSource": null, "translatedDestination": {"ip": "10.0.0.6", "port": 8080},
        "egress": {
            "allowed": true,
            "isolating": [{"kind": "NetworkPolicy", "namespace": "shop", "name": "out"}],
            "rule": {
                "policy": {"kind": "NetworkPolicy", "namespace": "shop", "name": "out"},
                "direction": "egress", "index": 2,
            },
        },
        "ingress": {
            "allowed": false,
            "isolating": [{"kind": "NetworkPolicy", "namespace": "shop", "name": "deny"}],
            "rule": null,
        },
        "beyond": null,
    });
    for form in ["json", "yaml"] {
        assert_eq!(document(&agent, &["flows"], form).await["flows"][0], expected);
    }
    let lines = knictl_on(&agent.socket(), &["flows", "-f", "-o", "json"], pending())
        .await
        .out;
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), &lines[0]), (2, &expected));
    assert_eq!(lines[1]["lost"], 3);
}

#[tokio::test]
async fn what_is_typed_reaches_the_agent() {
    let agent = Agent::serve(answers());
    let filters = ["--drops", "--pod", "shop/web-0", "--network", "blue"];
    for args in [
        [&["flows"], &filters[..]].concat(),
        [&["flows", "-f"], &filters[..]].concat(),
        vec!["flows"],
        vec!["explain", "shop/web-0@net1", "10.0.0.6", "tcp/80", "--network", "red"],
        vec!["explain", "10.9.9.9", "shop/web-0", "icmp"],
        "explain 10.0.1.5 10.0.2.6 udp/53 --arrives-from 192.0.2.1 --number 5000 --length 1400"
            .split(' ')
            .collect(),
        vec!["policy", "shop/web-0"],
    ] {
        assert_eq!(knictl(&agent, &args).await.code, 0, "{args:?}");
    }
    let asked = agent.asked();
    let all = FlowFilter {
        pod_namespace: "shop".into(),
        pod_name: "web-0".into(),
        network: "blue".into(),
        drops_only: true,
    };
    assert_eq!(asked.flows, [all.clone(), all, FlowFilter::default()]);
    let question = |source: &str, destination: &str, protocol: &str, port, network: &str| ExplainRequest {
        source: source.into(),
        destination: destination.into(),
        protocol: protocol.into(),
        port,
        network: network.into(),
        ..ExplainRequest::default()
    };
    let arriving = ExplainRequest {
        length: 1400,
        arrival: Some(Arrival {
            sender: "192.0.2.1".into(),
            number: 5000,
        }),
        ..question("10.0.1.5", "10.0.2.6", "udp", 53, "")
    };
    let questions = [
        question("shop/web-0@net1", "10.0.0.6", "tcp", 80, "red"),
        question("10.9.9.9", "shop/web-0", "icmp", 0, ""),
        arriving,
    ];
    assert_eq!(asked.questions, questions);
    let pod = GetPolicyRequest {
        pod_namespace: "shop".into(),
        pod_name: "web-0".into(),
    };
    assert_eq!(asked.pods, [pod]);
}

#[tokio::test]
async fn explanations_say_who_decided() {
    let agent = Agent::serve(answers());
    let args = ["explain", "shop/web-0", "10.96.0.1", "tcp/80"];
    let expected = "\
Verdict:       dropped: policy_ingress
Explanation:   no rule allows it
Network:       blue
Packet:        TCP 10.0.0.5:4000 (shop/web-0) > 10.96.0.1:80 (shop/db:http) as 10.0.0.6:8080 len 74
Steps:         route: service
               ingress policy of shop/db: denied
Decided by:    egress: allowed by NetworkPolicy shop/out egress[2]
               ingress: denied: NetworkPolicy shop/deny isolates the pod and no rule allows it
";
    assert_eq!(knictl(&agent, &args).await, ok(expected));
    for form in ["json", "yaml"] {
        let document = document(&agent, &args, form).await;
        assert_eq!(document["allowed"], false);
        assert_eq!(document["flow"]["verdict"], "policy_ingress");
        assert_eq!(document["steps"][1], "ingress policy of shop/db: denied");
    }
    let agent = Agent::serve(Answers {
        explanation: ExplainResponse {
            allowed: true,
            flow: Some(passed()),
            steps: vec![],
            ..ExplainResponse::default()
        },
        ..Answers::default()
    });
    let ran = knictl(&agent, &args).await;
    assert!(
        ran.out.starts_with("Verdict:       allowed: redirected\n"),
        "{}",
        ran.out
    );
    assert_eq!(document(&agent, &args, "json").await["allowed"], true);
}

/// A packet that another node decides about.
fn leaving() -> ExplainResponse {
    let far = Peer {
        node: "n2".into(),
        ..peer("10.0.1.6", 8080, "db")
    };
    ExplainResponse {
        allowed: true,
        flow: Some(Flow {
            verdict: "tunnelled".into(),
            allowed: true,
            destination: Some(far),
            translated_destination: None,
            service: String::new(),
            egress: None,
            ingress: None,
            explanation: "tunnelled: sent".into(),
            ..denied()
        }),
        steps: vec!["10.0.1.6 is pod shop/db of node n2".into()],
        node: "n1".into(),
        onward: Some(Onward {
            node: "n2".into(),
            underlay: "192.0.2.2".into(),
            tunnel: Some(Arrival {
                sender: "192.0.2.1".into(),
                number: 5000,
            }),
            tunnel_port: 4789,
            mtu: 1450,
            source: "10.0.0.5".into(),
            destination: "10.0.1.6".into(),
            port: 8080,
        }),
    }
}

#[tokio::test]
async fn an_answer_of_one_node_says_how_to_ask_the_other() {
    let agent = Agent::serve(Answers {
        explanation: leaving(),
        ..Answers::default()
    });
    let args = ["explain", "shop/web-0", "10.96.0.1", "tcp/80", "--length", "1400"];
    let expected = "\
Verdict:       allowed here, the rest is not decided: tunnelled (from_pod on node n1)
Explanation:   tunnelled: sent
Network:       blue
Packet:        TCP 10.0.0.5:4000 (shop/web-0) > 10.0.1.6:8080 (shop/db on n2) len 74
Sender:        node n1, from_pod
               10.0.1.6 is pod shop/db of node n2
Receiver:      node n2 decides the rest, and was not asked: knictl asks the agent of one node only
               both nodes, with a kubeconfig: kubectl kni explain shop/web-0 10.96.0.1 tcp/80 --length 1400
               node n2 alone, there: knictl explain 10.0.0.5 10.0.1.6 tcp/8080 --length 1400 --arrives-from 192.0.2.1 \
                    --number 5000
Decided by:    <none>
";
    let squeezed = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    let ran = knictl(&agent, &args).await;
    assert_eq!((squeezed(&ran.out), ran.code), (squeezed(expected), 0), "{}", ran.out);
    let document = document(&agent, &args, "json").await;
    assert_eq!(
        (&document["allowed"], &document["verdict"]["complete"]),
        (&json!(true), &json!(false))
    );
    assert_eq!(
        document["onward"]["tunnel"],
        json!({"sender": "192.0.2.1", "number": 5000})
    );
    assert_eq!(document["receiver"], Value::Null);
    // Another knictl reads what this one writes.
    let half: Half = serde_json::from_value(document).unwrap();
    let receiver: Half = serde_json::from_value(json!({
        "allowed": false, "flow": serde_json::to_value(Timed::from(denied())).unwrap(), "steps": ["ingress: denied"],
    }))
    .unwrap();
    let joined = Explanation::joined(half, Some(receiver.on("n2")), vec![]);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    joined
        .show(Format::Table, &mut Terminal::new(&mut out, &mut err))
        .unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(
        text.starts_with("Verdict:       dropped: policy_ingress (from_pod on node n2)\n"),
        "{text}"
    );
    assert!(
        text.contains("node n1, from_pod") && text.contains("node n2, from_pod"),
        "{text}"
    );
}

/// What the sender's node drops, no other node decides.
#[tokio::test]
async fn a_drop_on_the_way_to_another_node_names_the_node() {
    let dropped = ExplainResponse {
        allowed: false,
        onward: None,
        ..leaving()
    };
    let agent = Agent::serve(Answers {
        explanation: dropped,
        ..Answers::default()
    });
    let ran = knictl(&agent, &["explain", "shop/web-0", "shop/db", "tcp/80"]).await;
    let expected = "Verdict:       dropped: tunnelled (from_pod on node n1)\n";
    assert!(
        ran.out.starts_with(expected) && ran.out.contains("Steps:"),
        "{}",
        ran.out
    );
}

#[tokio::test]
async fn policy_shows_rules_and_hits() {
    let agent = Agent::serve(answers());
    let ran = knictl(&agent, &["policy", "shop/web-0"]).await;
    let expected = "\
IFNAME   NETWORK   DIRECTION   RULE                                                           PEERS         PORTS    HITS
eth0     blue      ingress     NetworkPolicy shop/web ingress[0]                              pods app=lb   TCP 80   17
eth0     blue      ingress     default deny (NetworkPolicy shop/web, NetworkPolicy shop/deny) any           all      4
";
    let columns = |text: &str| {
        text.lines()
            .map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    assert_eq!(columns(&ran.out), columns(expected), "{}", ran.out);
    assert_eq!(
        (ran.code, ran.err.as_str()),
        (0, "No policy selects net1 (network red): everything is allowed.\n")
    );
    for form in ["json", "yaml"] {
        let document = document(&agent, &["policy", "shop/web-0"], form).await;
        let eth0 = &document["interfaces"][0];
        assert_eq!((&eth0["ifname"], &eth0["policySet"]), (&json!("eth0"), &json!(77)));
        assert_eq!(eth0["rules"][0]["rule"]["policy"]["name"], "web");
        assert_eq!(eth0["rules"][1]["rule"], Value::Null);
        assert_eq!(eth0["rules"][1]["hits"], 4);
        assert_eq!(document["interfaces"][1]["rules"], json!([]));
    }
}

#[tokio::test]
async fn services_show_where_they_lead() {
    let agent = Agent::serve(answers());
    let expected = "\
SERVICE        NETWORK   ADDRESS     PORT     BACKENDS                      PROBLEM
shop/db:http   blue      10.96.0.1   80/TCP   10.0.0.6:8080,10.0.0.7:8080   <none>
shop/db:http   blue      fd96::1     80/TCP   <none>                        no endpoint is ready
";
    assert_eq!(knictl(&agent, &["services"]).await, ok(expected));
    let wide = knictl(&agent, &["services", "-o", "wide"]).await.out;
    assert!(wide.contains("   10800s   "), "{wide}");
    let document = document(&agent, &["services"], "json").await;
    assert_eq!(
        document["services"][0]["backends"][1],
        json!({"ip": "10.0.0.7", "port": 8080})
    );
}
