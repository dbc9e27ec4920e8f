//! Tests the meaning of a probe in two namespaces without an agent.

use std::{net::IpAddr, sync::Arc, time::Duration};

use anyhow::Result;

use super::{
    Net, Outcome, PORTS, Question, Setting, Table, Via, differences,
    objects::{Addresses, PolicyText},
    probe::{Patience, Probe, probe},
    serve::Serving,
};
use crate::{namespaces::Namespaces, oracle::Protocol, require};

const SERVER: [&str; 2] = ["192.0.2.2", "2001:db8::2"];

fn probes() -> Result<Vec<Probe>> {
    let mut probes = Vec::new();
    for question in Question::all(Net::Default, Via::Address) {
        if (question.from, question.to) != (0, 1) {
            continue;
        }
        let server: IpAddr = SERVER[usize::from(!question.v4)].parse()?;
        probes.push(Probe {
            question,
            to: server,
            name: "x/b".into(),
            server,
        });
    }
    assert_eq!(probes.len(), 3 * PORTS.len() * 2);
    Ok(probes)
}

fn ask(client: &Namespaces) -> Result<Table> {
    probe(client, probes()?, &Arc::new(Patience::new(Duration::from_millis(500))))
}

#[test]
fn answers_silence_and_refusal_are_told_apart() -> Result<()> {
    require!(root, netns, ip, nft);
    let (client, server) = (Namespaces::fresh_net("client")?, Namespaces::fresh_net("server")?);
    client.veth("c0", &server, "s0")?;
    for (family, length) in [(0, 24), (1, 64)] {
        server.add_address("s0", &format!("{}/{length}", SERVER[family]))?;
        client.add_address(
            "c0",
            &format!(
                "{}/{length}",
                SERVER[family].replace(".2.2", ".2.1").replace("::2", "::1")
            ),
        )?;
    }
    let addresses = [SERVER[0].parse()?, SERVER[1].parse()?];
    let serving = Serving::start(&server, "x/b", &addresses)?;
    for (question, outcome) in ask(&client)? {
        assert_eq!(outcome, Outcome::Answered, "{question}");
    }
    server.nft(
        "add table inet t\nadd chain inet t in { type filter hook input priority 0; }\n\
         add rule inet t in udp dport 81 drop\nadd rule inet t in tcp dport 80 drop\n\
         add rule inet t in meta l4proto sctp sctp dport 80 drop\n",
    )?;
    for (question, outcome) in ask(&client)? {
        let dropped = question.port == if question.protocol == Protocol::Udp { 81 } else { 80 };
        let expected = if dropped { Outcome::Silent } else { Outcome::Answered };
        assert_eq!(outcome, expected, "{question}");
    }
    server.nft("delete table inet t\n")?;
    drop(serving);
    let _other = Serving::start(&server, "x/c", &addresses)?;
    for (question, outcome) in ask(&client)? {
        assert!(
            matches!(outcome, Outcome::Odd(_)),
            "{question}: {outcome:?} from another pod"
        );
    }
    Ok(())
}

#[test]
fn a_difference_is_named() {
    let questions = Question::all(Net::Named, Via::ClusterIp);
    let policy = PolicyText::new("x", "deny", "{podSelector: {}, policyTypes: [Ingress]}");
    let world = Setting::default().world(Net::Named, &[policy], &Addresses::invented());
    let expected = questions
        .iter()
        .map(|question| (*question, question.ask(&world)))
        .collect();
    // Into x from y and z, and between the pods of x; each pod reaches itself.
    let denied = (3 * 6 + 3 * 2) * 3 * 2 * 2;
    let open: Table = questions
        .iter()
        .map(|question| (*question, Outcome::Answered))
        .collect();
    assert_eq!(differences(&expected, &open).len(), denied);
    let told = &differences(&expected, &open)[0].1;
    assert!(
        told.contains("IPv") && told.contains("net1") && told.contains("denies"),
        "{told}"
    );
    assert_eq!(differences(&expected, &Table::new()).len(), questions.len());
}
