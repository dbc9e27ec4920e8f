//! Tests that the explanations and the events of both nodes of a packet agree with what real packets do.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use kni_integration::{
    Pod,
    cluster::{Member, objects, patience, wire::OVERLAY_PORT},
    require,
    traffic::{NoAnswer, tcp_get},
    wait,
};
use kube::Api;
use serde_json::{Value, json};

use super::{
    super::scene::{ANSWER, PORT, address, assert_reached, identity, wait_for_silence},
    bed::{Bed, SILENCE},
    enemies::numbers,
    forgery::{dropped, forged},
};

/// The answers of the node that sends, and of the one that receives, if the packet gets there.
struct Answers {
    sender: Value,
    receiver: Option<Value>,
}

impl Answers {
    /// The program, the node and the reason of the last answer.
    fn verdict(&self) -> Result<(String, String, String, bool)> {
        let last = self.receiver.as_ref().unwrap_or(&self.sender);
        let text = |field: &str| {
            last["verdict"][field]
                .as_str()
                .map(str::to_owned)
                .context(field.to_owned())
        };
        let allowed = last["verdict"]["allowed"].as_bool().context("allowed")?;
        Ok((text("node")?, text("program")?, text("reason")?, allowed))
    }

    fn expect(&self, node: &str, program: &str, reason: &str, allowed: bool) -> Result<()> {
        let expected = (node.to_owned(), program.to_owned(), reason.to_owned(), allowed);
        let found = self.verdict()?;
        ensure!(
            found == expected,
            "{found:?} instead of {expected:?}\n{:#}\n{:#?}",
            self.sender,
            self.receiver
        );
        Ok(())
    }

    /// The steps of the last answer.
    fn steps(&self) -> String {
        let last = self.receiver.as_ref().unwrap_or(&self.sender);
        let steps = last["steps"].as_array().into_iter().flatten();
        steps.filter_map(Value::as_str).collect::<Vec<_>>().join("\n")
    }
}

fn explain(member: &Member, words: &[&str]) -> Result<Value> {
    let words = [&["explain"], words, &["-o", "json"]].concat();
    let answer = member.knictl(&words)?;
    serde_json::from_str(&answer).with_context(|| answer)
}

fn member<'a>(bed: &'a Bed, name: &str) -> Result<&'a Member> {
    let mut nodes = bed.cluster.nodes.iter();
    nodes.find(|member| member.name == name).context("a node of that name")
}

/// Asks the first node, and then the one that the answer names.
fn ask(bed: &Bed, first: usize, words: &[&str]) -> Result<Answers> {
    let sender = explain(&bed.cluster.nodes[first - 1], words)?;
    let onward = &sender["onward"];
    if onward.is_null() {
        return Ok(Answers { sender, receiver: None });
    }
    let text = |value: &Value| value.as_str().map(str::to_owned).context("a text");
    let target = match onward["port"].as_u64().context("a port")? {
        0 => "icmp".to_owned(),
        port => format!("tcp/{port}"),
    };
    let question = [
        text(&onward["source"])?,
        text(&onward["destination"])?,
        target,
        "--arrives-from".to_owned(),
        text(&onward["tunnel"]["sender"])?,
        "--number".to_owned(),
        onward["tunnel"]["number"].to_string(),
    ];
    let hint = sender["notAsked"].to_string();
    ensure!(hint.contains(&question.join(" ")), "{hint} does not name {question:?}");
    let there = member(bed, &text(&onward["node"])?)?;
    let words: Vec<&str> = question.iter().map(String::as_str).collect();
    let receiver = Some(explain(there, &words)?);
    Ok(Answers { sender, receiver })
}

/// The question about a connection between two pods by an address family, as both are named.
fn between(bed: &Bed, team: &str, (from, to): (usize, usize)) -> Result<Answers> {
    let names = [from, to].map(|node| identity(bed.pod(team, node)));
    ask(bed, from, &[&names[0], &names[1], &format!("tcp/{PORT}")])
}

fn get(from: &Pod, to: &Pod, v4: bool) -> Result<(), NoAnswer> {
    tcp_get(&from.inside, address(to, v4), PORT, SILENCE).map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn both_nodes_explain_and_report_what_packets_do() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let bed = Bed::start("fabric-explained", &[], None).await?;
    bed.connected().await?;
    what_passes(&bed)?;
    what_a_service_leads_to(&bed).await?;
    what_the_sender_denies(&bed).await?;
    what_the_receiver_denies(&bed).await?;
    what_does_not_belong_there(&bed).await?;
    pods_and_nodes(&bed)?;
    too_large(&bed)?;
    events_name_both_ends(&bed).await
}

fn what_passes(bed: &Bed) -> Result<()> {
    for team in super::bed::TEAMS {
        for (from, to) in [(1, 2), (3, 1)] {
            let answers = between(bed, team, (from, to))?;
            answers.expect(&format!("node{to}"), "from_overlay", "redirected", true)?;
            let sender = &answers.sender;
            ensure!(sender["flow"]["verdict"] == "tunnelled", "{sender:#}");
            ensure!(
                sender["flow"]["destination"]["node"] == format!("node{to}"),
                "{sender:#}"
            );
            let steps = answers.steps();
            let pod = identity(bed.pod(team, from));
            ensure!(steps.contains(&format!("is the confirmed pod {pod}")), "{steps}");
            ensure!(steps.contains(&format!("source: node node{from} at ")), "{steps}");
            assert_reached(bed.pod(team, from), bed.pod(team, to));
            // The receiver's node knows by which way the source's packets come.
            let names = [from, to].map(|node| identity(bed.pod(team, node)));
            let alone = explain(
                &bed.cluster.nodes[to - 1],
                &[&names[0], &names[1], &format!("tcp/{PORT}")],
            )?;
            ensure!(alone["verdict"]["program"] == "from_overlay", "{alone:#}");
            ensure!(alone["allowed"] == true, "{alone:#}");
        }
    }
    // Both on one node: one answer, as ever.
    let pod = identity(bed.pod("plain", 1));
    let answers = ask(bed, 1, &[&pod, &pod, "icmp"])?;
    ensure!(
        answers.receiver.is_none() && answers.sender["notAsked"].is_null(),
        "{:#}",
        answers.sender
    );
    Ok(())
}

async fn what_a_service_leads_to(bed: &Bed) -> Result<()> {
    let backend = bed.pod("plain", 1);
    let service = objects::service(
        "plain",
        "explained",
        80,
        (&address(backend, true).to_string(), PORT),
        &json!({}),
    );
    bed.cluster.apply(&service).await?;
    let api: Api<Service> = Api::namespaced(bed.cluster.client.clone(), "plain");
    let front = api.get("explained").await?.spec.unwrap_or_default().cluster_ip;
    let front = front.context("an address")?;
    let from = bed.pod("plain", 2);
    wait::until("the service leads to its backend", patience(), async || {
        let answer = tcp_get(&from.inside, front.parse()?, 80, ANSWER)?;
        Ok(answer.identity == identity(backend))
    })
    .await?;
    let answers = ask(bed, 2, &[&identity(from), &front, "tcp/80"])?;
    answers.expect("node1", "from_overlay", "redirected", true)?;
    let destination = &answers.sender["flow"]["destination"];
    ensure!(
        destination["podName"] == backend.name.as_str() && destination["node"] == "node1",
        "{destination}"
    );
    Ok(())
}

/// Applies a policy of `red-team`, waits until it has effect, and checks that the explanation and the counters of the
/// packets that are dropped name the same program and reason.
async fn denied(bed: &Bed, policy: &Value, (node, program, reason): (&str, &str, &str)) -> Result<()> {
    bed.cluster.apply(std::slice::from_ref(policy)).await?;
    let (from, to) = (bed.pod("red-team", 1), bed.pod("red-team", 2));
    wait_for_silence(from, to).await?;
    let answers = between(bed, "red-team", (1, 2))?;
    answers.expect(node, program, reason, false)?;
    let steps = answers.steps();
    ensure!(steps.contains("NetworkPolicy red-team/"), "{steps}");
    let there = member(bed, node)?;
    let before = dropped(there, program, reason).await?;
    ensure!(get(from, to, true).is_err(), "the packet passed");
    wait::until("the drop is counted", patience(), async || {
        Ok(dropped(there, program, reason).await? > before)
    })
    .await?;
    // The event of the drop names both ends, on whichever node it is.
    let flows = there.knictl(&["flows", "--drops", "--pod", &identity(from), "-o", "json"])?;
    let flows: Value = serde_json::from_str(&flows)?;
    let drops = flows["flows"].as_array().context("drops")?;
    // Not only the last one: the other end may repeat answers to a connection that began before the policy.
    let event = drops.iter().any(|drop| {
        drop["verdict"] == reason
            && drop["direction"] == program
            && drop["source"]["podName"] == from.name.as_str()
            && drop["destination"]["podName"] == to.name.as_str()
    });
    ensure!(event, "no {reason} in {program} names both ends: {drops:#?}");
    bed.cluster.delete(policy).await?;
    wait::until("packets pass again", patience(), async || {
        Ok(get(from, to, true).is_ok() && get(from, to, false).is_ok())
    })
    .await
    .map(drop)
}

async fn what_the_sender_denies(bed: &Bed) -> Result<()> {
    let spec = json!({ "podSelector": {}, "policyTypes": ["Egress"] });
    let policy = objects::policy("red-team", "no-way-out", &spec);
    denied(bed, &policy, ("node1", "from_pod", "policy_egress")).await
}

async fn what_the_receiver_denies(bed: &Bed) -> Result<()> {
    let spec = json!({ "podSelector": {}, "policyTypes": ["Ingress"] });
    let policy = objects::policy("red-team", "no-way-in", &spec);
    denied(bed, &policy, ("node2", "from_overlay", "policy_ingress")).await
}

/// What a host of the underlay sends through the tunnel, and what the receiver explains about the very packet.
async fn what_does_not_belong_there(bed: &Bed) -> Result<()> {
    let [_, _, blue] = numbers(bed).await?;
    let there = &bed.cluster.nodes[0];
    let (own, remote) = (bed.pod("blue-team", 1), bed.pod("blue-team", 2));
    for v4 in [true, false] {
        let (host, to) = if v4 {
            ("198.51.100.1", there.node.addresses()[0])
        } else {
            ("2001:db8:100::1", there.node.addresses()[1])
        };
        let (host, to): (IpAddr, IpAddr) = (host.parse()?, to.parse()?);
        let socket = bed.cluster.fabric.inside();
        let socket = socket.enter(|| UdpSocket::bind(SocketAddr::new(host, 0)))??;
        let (source, destination) = (address(remote, v4), address(own, v4));
        for (number, source, reason) in [
            // The receiver has no network with the number.
            (77, source, "unknown_network"),
            (blue, source, "foreign_node"),
            (blue, destination, "owner_unknown"),
        ] {
            let answer = explain(
                there,
                &[
                    &source.to_string(),
                    &destination.to_string(),
                    &format!("udp/{PORT}"),
                    "--arrives-from",
                    &host.to_string(),
                    "--number",
                    &number.to_string(),
                ],
            )?;
            ensure!(
                answer["verdict"]["reason"] == reason && answer["verdict"]["program"] == "from_overlay",
                "{answer:#}"
            );
            let before = dropped(there, "from_overlay", reason).await?;
            socket.send_to(&forged(number, source, destination), (to, OVERLAY_PORT))?;
            wait::until(&format!("the packet is dropped as {reason}"), patience(), async || {
                Ok(dropped(there, "from_overlay", reason).await? == before + 1)
            })
            .await?;
        }
    }
    Ok(())
}

/// A pod of the default network and another node.
fn pods_and_nodes(bed: &Bed) -> Result<()> {
    let pod = identity(bed.pod("plain", 1));
    let there = bed.cluster.nodes[1].node.addresses()[0];
    let answers = ask(bed, 1, &[&pod, there, "icmp"])?;
    answers.expect("node2", "from_overlay", "passed_to_stack", true)?;
    let destination = &answers.sender["flow"]["destination"];
    ensure!(
        destination["node"] == "node2" && destination["podName"] == "",
        "{destination}"
    );
    ensure!(answers.steps().contains("is this node itself"), "{}", answers.steps());
    bed.pod("plain", 1).inside.run("ping", &["-c", "1", "-W", "5", there])?;
    // Nothing of a pod is for the tunnel's own port.
    let answers = ask(bed, 1, &[&pod, there, &format!("udp/{OVERLAY_PORT}")])?;
    answers.expect("node1", "from_pod", "overlay_port", false)
}

fn too_large(bed: &Bed) -> Result<()> {
    let names = [1, 2].map(|node| identity(bed.pod("plain", node)));
    let answers = ask(bed, 1, &[&names[0], &names[1], "udp/9", "--length", "1500"])?;
    answers.expect("node1", "from_pod", "too_big", false)?;
    let steps = answers.steps();
    ensure!(steps.contains("packets of at most 1450 bytes"), "{steps}");
    Ok(())
}

/// A new flow, and the names that its event has on a node.
async fn event(bed: &Bed, node: usize, pod: &Pod, wanted: &Value) -> Result<()> {
    wait::until(&format!("node{node} reports {wanted}"), patience(), async || {
        let flows = bed.cluster.nodes[node - 1].knictl(&["flows", "--pod", &identity(pod), "-o", "json"])?;
        let flows: Value = serde_json::from_str(&flows)?;
        let all = flows["flows"].as_array().context("flows")?;
        let fits = |flow: &Value| {
            let ends = ["source", "destination"].map(|end| {
                let end = &flow[end];
                json!({ "ip": end["ip"], "namespace": end["podNamespace"], "pod": end["podName"], "node": end["node"] })
            });
            json!({ "verdict": flow["verdict"], "source": ends[0], "destination": ends[1] }) == *wanted
        };
        ensure!(all.iter().any(fits), "{:#}", all.last().unwrap_or(&Value::Null));
        Ok(true)
    })
    .await
    .map(drop)
}

async fn events_name_both_ends(bed: &Bed) -> Result<()> {
    let named = |pod: &Pod, v4: bool, node: &str| {
        json!({
            "ip": address(pod, v4).to_string(), "namespace": pod.namespace, "pod": pod.name, "node": node,
        })
    };
    for team in ["plain", "blue-team"] {
        let (from, to) = (bed.pod(team, 2), bed.pod(team, 3));
        for v4 in [true, false] {
            get(from, to, v4)?;
            let sent = json!({
                "verdict": "tunnelled", "source": named(from, v4, ""), "destination": named(to, v4, "node3"),
            });
            event(bed, 2, from, &sent).await?;
            let received = json!({
                "verdict": "redirected", "source": named(from, v4, "node2"), "destination": named(to, v4, ""),
            });
            event(bed, 3, to, &received).await?;
            // The pod is found by its name on both nodes.
            event(bed, 3, from, &received).await?;
        }
    }
    // A node and a pod of another node, both ways.
    let (pod, there) = (bed.pod("plain", 1), &bed.cluster.nodes[1]);
    let ip = there.node.addresses()[0];
    let node = json!({ "ip": ip, "namespace": "", "pod": "", "node": there.name });
    let sent = json!({ "verdict": "tunnelled", "source": named(pod, true, ""), "destination": node });
    let refused = tcp_get(&pod.inside, ip.parse()?, 9, SILENCE);
    ensure!(refused.is_err(), "the node has no such server");
    event(bed, 1, pod, &sent).await?;
    tcp_get(&there.node, address(pod, true), PORT, ANSWER)?;
    let received = json!({ "verdict": "redirected", "source": node, "destination": named(pod, true, "") });
    event(bed, 1, pod, &received).await
}
