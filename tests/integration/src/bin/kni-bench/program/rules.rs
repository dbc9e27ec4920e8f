//! Measures the cost of a new flow with few and many policy rules, and the time for applying rows.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_common::policy::{INGRESS, PORTS_ALL, PolicyKey, PolicyValue};
use kni_dataplane::Dataplane;
use kni_model::{
    EndpointId, NetworkId, PodRef, PolicyStep,
    policy::{
        Operator, Policy, PolicyInterface, PolicyKind, PolicyPeer, PolicyPod, PolicyPort, PolicyRef, PolicyRule,
        PolicyScope, PortMatch, Requirement, Selector,
    },
};
use kni_policy::PolicyEngine;
use serde_json::{Map, Value, json};

use super::{
    RECEIVER, SENDER,
    case::{Case, V4, V6},
};
use crate::{
    Effort, report,
    statistics::{least, median, paired_ratio, percentile},
};

/// Rules that select the receiver, one of which allows the sender.
const RULES: [usize; 3] = [10, 1_000, 10_000];
/// Pause between a change of the rules and the measurement.
const PAUSE: Duration = Duration::from_millis(100);
/// Rows that are applied together.
const ROWS: [u32; 2] = [1_000, 16_000];

/// Measures both.
pub(super) fn measure(
    dataplane: &Dataplane,
    network: NetworkId,
    new_flow: &Case,
    effort: Effort,
    mut cost: impl FnMut(&Case) -> Result<f64>,
    json: &mut Map<String, Value>,
) -> Result<()> {
    let mut engine = PolicyEngine::new(dataplane.policy_tables()?);
    engine.put_pod(pod("sender", SENDER, network, V4[0], V6[0])?);
    engine.put_pod(pod("receiver", RECEIVER, network, V4[1], V6[1])?);
    let mut costs = RULES.map(|_| Vec::new());
    let mut rows = [0; 3];
    for round in 0..effort.rounds as usize {
        for turn in 0..RULES.len() {
            // A different order in each round: no case always runs after the same one.
            let step = (turn + round) % RULES.len();
            engine.set_policies(policies(RULES[step])?);
            let steps = engine.plan();
            dataplane.apply_policy(&steps)?;
            engine.confirm();
            rows[step] = engine.tables().policy.len();
            // Removed rows are freed in the background, on this CPU as well.
            std::thread::sleep(PAUSE);
            costs[step].push(cost(new_flow)?);
        }
    }
    ensure!(rows[2] > rows[0], "the rules made no rows");
    engine.set_policies(Vec::<Policy>::new());
    dataplane.apply_policy(&engine.plan())?;
    engine.confirm();
    show_costs(&costs, rows, json);
    let rounds = if effort.quick { 5 } else { 100 };
    let times = ROWS
        .into_iter()
        .map(|count| apply(dataplane, count, rounds))
        .collect::<Result<Vec<_>>>()?;
    show_rows(&times, json);
    Ok(())
}

fn show_costs(costs: &[Vec<f64>; 3], rows: [usize; 3], json: &mut Map<String, Value>) {
    let [fewest, ..] = costs;
    let mut table = Vec::new();
    let mut all = Map::new();
    for ((rules, costs), rows) in RULES.iter().zip(costs).zip(rows) {
        table.push(vec![
            rules.to_string(),
            rows.to_string(),
            format!("{:.0}", median(costs)),
            format!("{:.0}", least(costs)),
            format!("{:.3}", paired_ratio(costs, fewest)),
        ]);
        let value = json!({ "rows": rows, "median_ns": median(costs), "min_ns": least(costs), "rounds_ns": costs });
        all.insert(rules.to_string(), value);
    }
    report::heading("A new flow (IPv4 TCP SYN) judged by policy rules, ns net of an empty program");
    report::table(&["rules", "rows", "median", "min", "to the fewest"], &table);
    json.insert("policy_rules".into(), Value::Object(all));
}

fn show_rows(times: &[Vec<f64>], json: &mut Map<String, Value>) {
    let mut table = Vec::new();
    let mut all = Map::new();
    for (count, times) in ROWS.iter().zip(times) {
        let (p50, p99) = (percentile(times, 0.5), percentile(times, 0.99));
        table.push(vec![count.to_string(), format!("{p50:.2}"), format!("{p99:.2}")]);
        all.insert(count.to_string(), json!({ "p50_ms": p50, "p99_ms": p99 }));
    }
    report::heading("Policy rows into force, the flip of an endpoint's generation included, ms");
    report::table(&["rows", "p50", "p99"], &table);
    json.insert("policy_apply".into(), Value::Object(all));
}

/// Milliseconds for writing `count` new rows and switching the endpoint to them; their removal is not counted.
fn apply(dataplane: &Dataplane, count: u32, rounds: u32) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for round in 0..rounds {
        let set = 1_000_000 + round;
        let keys: Vec<PolicyKey> = (0..count)
            .map(|identity| PolicyKey {
                set,
                identity,
                direction: INGRESS,
            })
            .collect();
        let value = PolicyValue {
            ports: PORTS_ALL,
            rule: 1,
        };
        let force = |policy| {
            let enforcement = kni_model::Enforcement {
                policy,
                identity4: 0,
                identity6: 0,
            };
            PolicyStep::Enforce(vec![(EndpointId(RECEIVER), enforcement)])
        };
        let steps = [
            PolicyStep::PutPolicy(keys.iter().map(|key| (*key, value)).collect()),
            force(set),
        ];
        let started = Instant::now();
        dataplane.apply_policy(&steps)?;
        times.push(started.elapsed().as_secs_f64() * 1e3);
        dataplane.apply_policy(&[force(0), PolicyStep::RemovePolicy(keys)])?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(times)
}

fn pod(name: &str, endpoint: u32, network: NetworkId, ipv4: &str, ipv6: &str) -> Result<PolicyPod> {
    Ok(PolicyPod {
        sandbox: name.parse()?,
        pod: PodRef {
            namespace: "bench".into(),
            name: name.into(),
            uid: String::new(),
        },
        labels: BTreeMap::from([("name".into(), name.into())]),
        ports: Vec::new(),
        interfaces: vec![PolicyInterface {
            endpoint: Some(EndpointId(endpoint)),
            ifname: "eth0".parse()?,
            network: "bench".parse()?,
            definition: None,
            network_id: network,
            primary: true,
            ipv4: Some(ipv4.parse()?),
            ipv6: Some(ipv6.parse()?),
        }],
    })
}

/// `count` policies of one rule each that select the receiver: peers by label and by address, each with a different
/// port; the last one allows the sender.
fn policies(count: usize) -> Result<Vec<Policy>> {
    (0..count)
        .map(|index| {
            let last = index + 1 == count;
            let label = if last {
                "sender".to_owned()
            } else {
                format!("peer-{index}")
            };
            let number = u16::try_from(index)?;
            let [high, low] = number.to_be_bytes();
            let mut peers = vec![PolicyPeer::Pods {
                namespaces: None,
                pods: named(&label),
            }];
            if !last {
                peers.push(PolicyPeer::Block {
                    cidr: format!("172.16.{high}.{low}/32").parse()?,
                    except: Vec::new(),
                });
            }
            let port = if last { 80 } else { 1_000 + number % 50_000 };
            Ok(Policy {
                reference: PolicyRef {
                    kind: PolicyKind::NetworkPolicy,
                    namespace: "bench".into(),
                    name: format!("policy-{index:05}"),
                },
                scope: PolicyScope::Primary,
                pods: named("receiver"),
                ingress: Some(vec![PolicyRule {
                    peers,
                    ports: vec![PolicyPort {
                        protocol: 6,
                        port: PortMatch::Range(port, port),
                    }],
                }]),
                egress: None,
                external: None,
            })
        })
        .collect()
}

fn named(name: &str) -> Selector {
    Selector {
        requirements: vec![Requirement {
            key: "name".into(),
            operator: Operator::In(BTreeSet::from([name.to_owned()])),
        }],
    }
}
