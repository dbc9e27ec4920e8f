//! `knictl policy`: lists the rules enforced at a pod's interfaces, and how often each decided.

use kni_proto::runtime::{EffectiveRule, GetPolicyRequest, InterfacePolicy};

use crate::{
    cli::PolicyArgs,
    client::{Runtime, answer},
    commands::{List, Outcome},
    decision,
    error::Error,
    table::Column,
    terminal::Terminal,
};

/// A rule and its interface.
struct Row<'a> {
    interface: &'a InterfacePolicy,
    rule: &'a EffectiveRule,
}

const fn columns<'a>() -> [Column<Row<'a>>; 8] {
    [
        Column::new("IFNAME", |r| r.interface.ifname.clone()),
        Column::new("NETWORK", |r| r.interface.network.clone()),
        Column::new("DIRECTION", |r| r.rule.direction.clone()),
        Column::new("RULE", |r| rule(r.rule)),
        Column::new("PEERS", |r| r.rule.peers.clone()),
        Column::new("PORTS", |r| r.rule.ports.clone()),
        Column::new("HITS", |r| r.rule.hits.to_string()),
        Column::wide("POLICY-SET", |r| r.interface.policy_set.to_string()),
    ]
}

/// Shows the rules; beside a table, lists the interfaces that no policy selects.
pub(crate) async fn run(args: PolicyArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let request = GetPolicyRequest {
        pod_namespace: args.pod.namespace,
        pod_name: args.pod.name,
    };
    let document = answer("GetPolicy", agent.get_policy(request)).await?;
    let interfaces = document.interfaces.iter();
    let rows: Vec<Row<'_>> = interfaces
        .flat_map(|interface| interface.rules.iter().map(move |rule| Row { interface, rule }))
        .collect();
    let list = List {
        document: &document,
        rows: &rows,
        columns: &columns(),
        noun: "policy rules",
    };
    let outcome = list.show(args.output.format, terminal)?;
    if args.output.format.is_for_people() {
        for interface in document
            .interfaces
            .iter()
            .filter(|interface| interface.rules.is_empty())
        {
            let InterfacePolicy { ifname, network, .. } = interface;
            terminal.note(&format!(
                "No policy selects {ifname} (network {network}): everything is allowed."
            ));
        }
    }
    Ok(outcome)
}

fn rule(rule: &EffectiveRule) -> String {
    match &rule.rule {
        Some(rule) => decision::rule(rule),
        None => format!("default deny ({})", decision::policies(&rule.isolating)),
    }
}
