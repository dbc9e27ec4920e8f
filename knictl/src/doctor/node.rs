//! Checks one node by the answers of its agent. Pure.

use std::env;

use kni_proto::runtime::{
    GetStatusResponse, Interface, ListInterfacesResponse, ListMapsResponse, ListNetworksResponse, NetworkStatus,
    ProbeTunnelResponse,
};

use super::{Check, Finding};

/// A table with a larger share of its rows in use is reported, in percent.
const TABLE_NEARLY_FULL: u64 = 80;
/// A network with a larger share of its addresses in use is reported, in percent.
const NETWORK_NEARLY_FULL: u128 = 90;

/// What an agent answered.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeFacts {
    pub(crate) status: GetStatusResponse,
    pub(crate) networks: ListNetworksResponse,
    pub(crate) interfaces: ListInterfacesResponse,
    pub(crate) maps: ListMapsResponse,
    /// What other nodes answered.
    pub(crate) tunnel: ProbeTunnelResponse,
    /// Why they could not be asked.
    pub(crate) tunnel_problem: Option<String>,
}

/// The checks of a node; `scope` names it.
pub(crate) fn checks(scope: &str, facts: &NodeFacts) -> Vec<Check> {
    let check = |name, title, findings| Check::new(scope, name, title, findings);
    vec![
        check(
            "agent-ready",
            "The agent attaches pods, and nothing is degraded",
            ready(&facts.status),
        ),
        check(
            "agent-version",
            "The agent has the version of this program",
            version(&facts.status),
        ),
        check("manifests", "All manifests are accepted", refused(&facts.networks)),
        check(
            "networks-ready",
            "Pods can join all networks of the node",
            not_ready(&facts.networks.networks),
        ),
        check(
            "networks-free",
            "All networks of the node have free addresses",
            full(&facts.networks.networks),
        ),
        check(
            "interfaces-healthy",
            "All pod interfaces and their programs are complete",
            unhealthy(&facts.interfaces),
        ),
        check(
            "policy-enforced",
            "Policies hold at all pod interfaces",
            unenforced(&facts.interfaces),
        ),
        check(
            "tables",
            "All tables of the programs have free rows",
            tables(&facts.maps),
        ),
        check("tunnel", &tunnel_title(&facts.tunnel), tunnel(facts)),
        check(
            "endpoints",
            "There is room for more pod interfaces",
            endpoints(&facts.status),
        ),
    ]
}

fn ready(status: &GetStatusResponse) -> Vec<Finding> {
    let object = "agent";
    let remedy = "see the log of the agent, and docs/troubleshooting.md for the reason";
    if status.ready {
        let degraded = status
            .reasons
            .iter()
            .map(|reason| Finding::warning(object, reason, remedy));
        let warning = status.uplink.iter().filter(|uplink| !uplink.warning.is_empty());
        let of_uplink = warning.map(|uplink| {
            Finding::warning(
                "uplink",
                &uplink.warning,
                "do what the warning names, as in docs/design/egress.md",
            )
        });
        return degraded.chain(of_uplink).collect();
    }
    if status.reasons.is_empty() {
        return vec![Finding::failure(object, "it is not ready, and names no reason", remedy)];
    }
    let reasons = status.reasons.iter();
    reasons.map(|reason| Finding::failure(object, reason, remedy)).collect()
}

fn version(status: &GetStatusResponse) -> Vec<Finding> {
    let own = env!("CARGO_PKG_VERSION");
    if status.version == own {
        return Vec::new();
    }
    vec![Finding::warning(
        "agent",
        format!("it has version {}, this program {own}", status.version),
        "use the knictl of the agent's image, or finish the upgrade",
    )]
}

fn refused(networks: &ListNetworksResponse) -> Vec<Finding> {
    let refused = networks.refused.iter();
    refused
        .map(|manifest| {
            let problem = match manifest.field.as_str() {
                "" => manifest.reason.clone(),
                field => format!("{field}: {}", manifest.reason),
            };
            let place = format!("{}:{}", manifest.file, manifest.line);
            Finding::failure(
                place,
                problem,
                "correct the object; until then its last valid state is in force",
            )
        })
        .collect()
}

fn not_ready(networks: &[NetworkStatus]) -> Vec<Finding> {
    let broken = networks.iter().filter(|network| !network.ready);
    broken
        .map(|network| {
            let object = format!("network {}", network.name);
            Finding::failure(
                object,
                network.reason.clone(),
                "remove the cause that the reason names (docs/troubleshooting.md); pods that wait are attached then",
            )
        })
        .collect()
}

fn full(networks: &[NetworkStatus]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for network in networks {
        let number = |text: &str| text.parse::<u128>().unwrap_or(0);
        let (used, total) = (number(&network.used_addresses), number(&network.total_addresses));
        let object = || format!("network {}", network.name);
        let problem = || format!("{used} of {total} addresses of the node are in use");
        let remedy = "add a subnet to the network, or remove pods";
        if total > 0 && used >= total {
            findings.push(Finding::warning(object(), problem() + ": new pods wait", remedy));
        } else if total > 0 && used.saturating_mul(100) / total >= NETWORK_NEARLY_FULL {
            findings.push(Finding::warning(object(), problem(), remedy));
        }
    }
    findings
}

fn named(interface: &Interface) -> String {
    let Interface {
        pod_namespace,
        pod_name,
        ifname,
        ..
    } = interface;
    format!("interface {ifname} of pod {pod_namespace}/{pod_name}")
}

fn unhealthy(interfaces: &ListInterfacesResponse) -> Vec<Finding> {
    let remedy = "the agent repairs programs and links by itself; if this stays, delete the pod";
    let mut findings = Vec::new();
    for interface in interfaces.interfaces.iter().filter(|interface| !interface.healthy) {
        let problem = match interface.problems.as_slice() {
            [] => "it is not healthy".to_owned(),
            problems => problems.join("; "),
        };
        findings.push(Finding::failure(named(interface), problem, remedy));
    }
    findings
}

fn unenforced(interfaces: &ListInterfacesResponse) -> Vec<Finding> {
    let open = interfaces
        .interfaces
        .iter()
        .filter(|interface| !interface.policy_enforced);
    open.map(|interface| {
        Finding::warning(
            named(interface),
            format!("policies do not hold at interfaces of kind {}", interface.kind),
            "use a network whose provider has programs where policies are needed (docs/design/providers.md)",
        )
    })
    .collect()
}

fn tables(maps: &ListMapsResponse) -> Vec<Finding> {
    let mut findings = Vec::new();
    for map in &maps.maps {
        // Arrays have all their rows from the start, and LRU maps make room by themselves.
        let kind = map.kind.to_lowercase();
        if kind.contains("lru") || kind.contains("array") || kind.contains("ring") || map.max_entries == 0 {
            continue;
        }
        let (entries, capacity) = (u64::from(map.entries), u64::from(map.max_entries));
        if entries * 100 / capacity < TABLE_NEARLY_FULL {
            continue;
        }
        let problem = format!("{entries} of {capacity} rows are in use");
        let remedy = "raise the table's size (docs/reference/configuration.md), or remove policies or Services";
        findings.push(if entries >= capacity {
            Finding::failure(format!("map {}", map.name), problem, remedy)
        } else {
            Finding::warning(format!("map {}", map.name), problem, remedy)
        });
    }
    findings
}

fn tunnel_title(probe: &ProbeTunnelResponse) -> String {
    let title = "Other nodes answer through the tunnel";
    if !probe.obstacle.is_empty() {
        return format!("{title} (not asked: {})", probe.obstacle);
    }
    let asked = probe.nodes.len();
    let silent = probe
        .nodes
        .iter()
        .filter(|node| !node.answers && !node.answers_through_tunnel);
    let silent = match silent.count() {
        0 => String::new(),
        silent => format!("; {silent} answer no echo requests at all, which proves nothing"),
    };
    let others = match probe.others {
        0 => String::new(),
        others => format!(", {others} others were not"),
    };
    format!("{title} ({asked} were asked{others}{silent})")
}

/// A node that answers by the underlay and not through the tunnel. One that answers neither may be down, or answer no
/// echo requests: that shows nothing.
fn tunnel(facts: &NodeFacts) -> Vec<Finding> {
    if let Some(problem) = &facts.tunnel_problem {
        return vec![Finding::warning(
            "agent",
            problem,
            "see the log of the agent: kubectl -n kni-system logs, with the name of its pod",
        )];
    }
    let port = facts.tunnel.port;
    let nodes = facts.tunnel.nodes.iter();
    let lost = nodes.filter(|node| node.answers && !node.answers_through_tunnel);
    lost.map(|node| {
        let problem = format!(
            "{} answers, but not through the tunnel: a firewall on the way or on one of the two nodes drops UDP port {port}",
            node.underlay
        );
        let remedy = format!("let UDP port {port} pass between the addresses of the nodes, in both directions");
        Finding::warning(format!("node {}", node.node), problem, remedy)
    })
    .collect()
}

fn endpoints(status: &GetStatusResponse) -> Vec<Finding> {
    let used = u64::from(status.attachments) + u64::from(status.warm_sandboxes) + u64::from(status.pending_removals);
    let capacity = u64::from(status.endpoints_capacity);
    if capacity == 0 || used * 100 / capacity < TABLE_NEARLY_FULL {
        return Vec::new();
    }
    let problem = format!("{used} of {capacity} endpoint numbers are in use");
    vec![Finding::warning(
        "agent",
        problem,
        "raise --max-endpoints and start the agent again (docs/reference/cli.md)",
    )]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kni_proto::runtime::{Map, ProbedNode, RefusedManifest};

    use super::*;

    fn healthy() -> NodeFacts {
        NodeFacts {
            status: GetStatusResponse {
                ready: true,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                endpoints_capacity: 1023,
                attachments: 10,
                ..Default::default()
            },
            networks: ListNetworksResponse {
                networks: vec![network(3)],
                refused: vec![],
            },
            interfaces: ListInterfacesResponse {
                interfaces: vec![Interface {
                    healthy: true,
                    policy_enforced: true,
                    ..Default::default()
                }],
            },
            maps: ListMapsResponse {
                maps: vec![
                    map("FLOWS", "lru_hash", 100),
                    map("CONFIG", "array", 100),
                    map("POLICY", "lpm_trie", 10),
                ],
            },
            tunnel: ProbeTunnelResponse {
                nodes: vec![probed(true, true), probed(false, false)],
                port: 4789,
                ..Default::default()
            },
            tunnel_problem: None,
        }
    }

    fn network(used: u32) -> NetworkStatus {
        NetworkStatus {
            name: "blue".to_owned(),
            ready: true,
            used_addresses: used.to_string(),
            total_addresses: "62".to_owned(),
            ..Default::default()
        }
    }

    fn map(name: &str, kind: &str, entries: u32) -> Map {
        Map {
            name: name.to_owned(),
            kind: kind.to_owned(),
            max_entries: 100,
            entries,
            ..Default::default()
        }
    }

    fn probed(answers: bool, answers_through_tunnel: bool) -> ProbedNode {
        ProbedNode {
            node: "n2".to_owned(),
            underlay: "192.0.2.2".to_owned(),
            answers,
            answers_through_tunnel,
        }
    }

    #[test]
    fn a_node_that_answers_only_by_the_underlay_names_the_port() {
        let facts = healthy();
        assert_eq!(
            tunnel_title(&facts.tunnel),
            "Other nodes answer through the tunnel (2 were asked; 1 answer no echo requests at all, which proves nothing)"
        );
        let of = |tunnel| NodeFacts {
            tunnel,
            ..NodeFacts::default()
        };
        let findings = tunnel(&of(ProbeTunnelResponse {
            nodes: vec![probed(true, false)],
            port: 4790,
            ..Default::default()
        }));
        assert_eq!(findings[0].object, "node n2");
        assert_eq!(
            findings[0].problem,
            "192.0.2.2 answers, but not through the tunnel: a firewall on the way or on one of the two nodes drops UDP \
             port 4790"
        );
        let obstacle = of(ProbeTunnelResponse {
            obstacle: "no".to_owned(),
            ..Default::default()
        });
        assert_eq!(
            tunnel_title(&obstacle.tunnel),
            "Other nodes answer through the tunnel (not asked: no)"
        );
        assert_eq!(tunnel(&obstacle), []);
    }

    /// Names of the checks that found something.
    fn found(facts: &NodeFacts) -> Vec<String> {
        let checks = checks("node n1", facts).into_iter();
        checks
            .filter(|check| !check.findings.is_empty())
            .map(|check| check.name)
            .collect()
    }

    #[test]
    fn a_healthy_node_passes_everything() {
        assert_eq!(found(&healthy()), Vec::<String>::new());
        assert!(checks("node n1", &healthy()).len() >= 9);
    }

    #[test]
    fn each_check_finds_its_problem_and_no_other() {
        type Damage = fn(&mut NodeFacts);
        let cases: [(&str, Damage); 13] = [
            ("agent-ready", |facts| facts.status.ready = false),
            ("agent-ready", |facts| {
                let uplink = facts.status.uplink.get_or_insert_default();
                uplink.warning = "the node's own processes do not reach host ports".to_owned();
            }),
            ("agent-ready", |facts| {
                facts.status.reasons.push("the uplink has no address".to_owned());
            }),
            ("agent-version", |facts| facts.status.version = "0.0.1".to_owned()),
            ("manifests", |facts| {
                facts.networks.refused.push(RefusedManifest::default());
            }),
            ("networks-ready", |facts| facts.networks.networks[0].ready = false),
            ("networks-free", |facts| facts.networks.networks[0] = network(60)),
            ("interfaces-healthy", |facts| {
                facts.interfaces.interfaces[0].healthy = false;
            }),
            ("policy-enforced", |facts| {
                facts.interfaces.interfaces[0].policy_enforced = false;
            }),
            ("tables", |facts| facts.maps.maps[2].entries = 81),
            ("endpoints", |facts| facts.status.warm_sandboxes = 900),
            ("tunnel", |facts| facts.tunnel.nodes.push(probed(true, false))),
            ("tunnel", |facts| facts.tunnel_problem = Some("no socket".to_owned())),
        ];
        for (name, damage) in cases {
            let mut facts = healthy();
            damage(&mut facts);
            assert_eq!(found(&facts), [name]);
            for finding in checks("node n1", &facts).iter().flat_map(|check| &check.findings) {
                assert!(crate::doctor::has_advice(finding), "{finding:?}");
            }
        }
        let damaged: BTreeSet<&str> = cases.iter().map(|(name, _)| *name).collect();
        let all = checks("node n1", &healthy());
        assert_eq!(damaged, all.iter().map(|check| check.name.as_str()).collect());
    }

    #[test]
    fn a_full_network_says_that_pods_wait() {
        let mut facts = healthy();
        facts.networks.networks[0] = network(62);
        let findings = full(&facts.networks.networks);
        assert_eq!(
            findings[0].problem,
            "62 of 62 addresses of the node are in use: new pods wait"
        );
    }
}
