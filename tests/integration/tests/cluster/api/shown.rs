//! Tests the columns that `kubectl get` prints, in normal and wide lists.

use anyhow::{Context as _, Result, ensure};
use kni_integration::{api_server::ApiServer, require};

use super::scene::{manifest, server};

/// An object with a status where its kind has one, the columns of a wide list without the age, and their values.
struct Shown {
    kind: &'static str,
    short: &'static str,
    spec: &'static str,
    status: &'static str,
    columns: &'static [(&'static str, &'static str)],
    wide: &'static [(&'static str, &'static str)],
}

const SHOWN: [Shown; 9] = [
    Shown {
        kind: "AddressBlock",
        short: "abl",
        spec: "{network: shown, networkUID: u-1, cidr: 'fd10::40/122', nodeName: node1, nodeUID: u-2}",
        status: "",
        columns: &[("NETWORK", "shown"), ("CIDR", "fd10::40/122"), ("NODE", "node1")],
        wide: &[("NETWORK-UID", "u-1"), ("NODE-UID", "u-2")],
    },
    Shown {
        kind: "NetworkNumber",
        short: "nn",
        spec: "{network: shown, networkUID: u-1}",
        status: "",
        columns: &[("NETWORK", "shown"), ("RELEASED", "")],
        wide: &[("NETWORK-UID", "u-1")],
    },
    Shown {
        kind: "NetworkMembers",
        short: "nmb",
        spec: "{network: shown, networkUID: u-1, nodeName: node1, nodeUID: u-2}",
        status: r#"{"summary": "3/4"}"#,
        columns: &[("NETWORK", "shown"), ("NODE", "node1"), ("CONFIRMED", "3/4")],
        wide: &[],
    },
    Shown {
        kind: "NodeEndpoint",
        short: "nep",
        spec: "{nodeName: shown, nodeUID: u-2, addresses: [192.0.2.1, 'fd00::1'], port: 4789, mtu: 1500, epoch: 7}",
        status: r#"{"addresses": ["192.0.2.1"], "refused": [{"address": "fd00::1", "reason": "not its own"}]}"#,
        columns: &[("CONFIRMED", r#"["192.0.2.1"]"#), ("PORT", "4789"), ("MTU", "1500")],
        wide: &[
            ("REPORTED", r#"["192.0.2.1","fd00::1"]"#),
            ("REFUSED", "not its own"),
            ("EPOCH", "7"),
        ],
    },
    Shown {
        kind: "PodNetwork",
        short: "pnw",
        spec: "{subnets: [10.1.0.0/16, 'fd10::/64'], egress: {mode: Masquerade}, provider: {type: Ebpf}, mtu: 9000}",
        status: r#"{"addresses": {"used": 7, "total": 9223372036854775807}, "nodes": {"ready": 2, "total": 3},
                    "interfaces": 5, "namespaces": ["a", "b"], "number": 7340033, "fabric": "Overlay",
                    "summary": {"subnets": "10.1.0.0/16,fd10::/64", "total": ">9e18", "namespaces": "a,b"}}"#,
        columns: &[
            ("SUBNETS", "10.1.0.0/16,fd10::/64"),
            ("READY", "True"),
            ("PROGRAMMED", "False"),
            ("USED", "7"),
            ("TOTAL", ">9e18"),
        ],
        wide: &[
            ("DEFAULT", "false"),
            ("PROVIDER", "Ebpf"),
            ("EGRESS", "Masquerade"),
            ("FABRIC", "Overlay"),
            ("MTU", "9000"),
            ("NODES", "2"),
            ("INTERFACES", "5"),
            ("NAMESPACES", "a,b"),
            ("NUMBER", "7340033"),
        ],
    },
    Shown {
        kind: "PodNetworkAttachment",
        short: "pna",
        spec: "{podNetworkName: blue, podSelector: {matchLabels: {app: a}}, interfaceName: net1, addresses: \
               [10.1.0.7], mac: '02:00:00:00:00:07'}",
        status: r#"{"selected": 4, "attached": 3, "summary": {"addresses": "10.1.0.7", "pods": "app=a"}}"#,
        columns: &[
            ("NETWORK", "blue"),
            ("INTERFACE", "net1"),
            ("SELECTED", "4"),
            ("ATTACHED", "3"),
            ("READY", "True"),
        ],
        wide: &[
            ("ACCEPTED", "True"),
            ("ADDRESSES", "10.1.0.7"),
            ("MAC", "02:00:00:00:00:07"),
            ("DEFAULT-ROUTE", "false"),
            ("PODS", "app=a"),
        ],
    },
    Shown {
        kind: "PodInterface",
        short: "pif",
        spec: "{podName: web, podUid: u, nodeName: node1, podNetworkName: blue, interfaceName: net1, sandboxId: abc}",
        status: r#"{"addresses": [{"ip": "10.1.0.7", "family": "IPv4"}, {"ip": "fd10::7", "family": "IPv6"}],
                    "mac": "02:00:00:00:00:07", "mtu": 1500, "hostInterfaceName": "kni7"}"#,
        columns: &[
            ("POD", "web"),
            ("NETWORK", "blue"),
            ("INTERFACE", "net1"),
            ("IPV4", "10.1.0.7"),
            ("IPV6", "fd10::7"),
            ("NODE", "node1"),
            ("READY", "True"),
        ],
        wide: &[
            ("MAC", "02:00:00:00:00:07"),
            ("MTU", "1500"),
            ("HOST-INTERFACE", "kni7"),
            ("POLICY", "False"),
            ("SANDBOX", "abc"),
        ],
    },
    Shown {
        kind: "NodeNetwork",
        short: "nnw",
        spec: "{}",
        status: r#"{"networkNames": ["blue", "red"], "networks": [{"name": "blue"}, {"name": "red"}], "interfaces": 5,
                    "features": {"hook": "tcx"}, "agentVersion": "0.1.0", "tunnelEndpoints": ["198.51.100.11", "2001:db8:100::11"],
                    "policies": {"known": 3, "programmed": true},
                    "summary": {"networks": "blue,red", "tunnelEndpoints": "198.51.100.11,2001:db8:100::11"}}"#,
        columns: &[
            ("READY", "True"),
            ("NETWORKS", "blue,red"),
            ("INTERFACES", "5"),
            ("HOOK", "tcx"),
            ("VERSION", "0.1.0"),
        ],
        wide: &[
            ("DEGRADED", "False"),
            ("POLICIES", "3"),
            ("PROGRAMMED", "true"),
            ("TUNNEL-ENDPOINTS", "198.51.100.11,2001:db8:100::11"),
        ],
    },
    Shown {
        kind: "EgressPolicy",
        short: "egp",
        spec: "{podSelector: {}, defaultAction: Deny, podNetworkNames: [blue], egressAddresses: [192.0.2.1]}",
        status: r#"{"summary": {"networks": "blue", "pods": "*", "addresses": "192.0.2.1"}}"#,
        columns: &[("DEFAULT-ACTION", "Deny"), ("PROGRAMMED", "False")],
        wide: &[
            ("ACCEPTED", "True"),
            ("NETWORKS", "blue"),
            ("PODS", "*"),
            ("ADDRESSES", "192.0.2.1"),
        ],
    },
];

impl Shown {
    /// The object's name.
    fn name(&self) -> &'static str {
        match self.kind {
            "AddressBlock" => "shown.v6-fd10--40-122",
            "NetworkNumber" => "7340033",
            "NetworkMembers" => "shown.0123456789abcdef.0",
            _ => "shown",
        }
    }
}

#[test]
fn lists_show_what_matters() -> Result<()> {
    require!(root, netns, api_server);
    let server = server()?;
    for shown in &SHOWN {
        server.create(&manifest(shown.kind, shown.name(), shown.spec))?;
        if !shown.status.is_empty() {
            write_status(&server, shown)?;
        }
        let narrow = list(&server, shown, &[])?;
        let wide = list(&server, shown, &["-o", "wide"])?;
        let age = (
            "AGE",
            wide.get(1 + shown.columns.len()).map_or("", |(_, cell)| cell.as_str()),
        );
        let expected = [&[("NAME", shown.name())], shown.columns, &[age], shown.wide].concat();
        let expected: Vec<_> = expected
            .iter()
            .map(|(name, cell)| ((*name).to_owned(), (*cell).to_owned()))
            .collect();
        assert_eq!(wide, expected, "{}", shown.kind);
        // The normal list is a prefix of the wide one; the age may have increased.
        let heads = |list: &[(String, String)]| list.iter().map(|(head, _)| head.clone()).collect::<Vec<_>>();
        assert_eq!(
            heads(&narrow),
            heads(&expected[..shown.columns.len() + 2]),
            "{}",
            shown.kind
        );
    }
    let all = server.kubectl(&[
        "get",
        "abl,nn,nmb,nep,pnw,pna,pif,nnw,egp",
        "--all-namespaces",
        "-o",
        "wide",
    ])?;
    for shown in &SHOWN {
        let object = format!("{}.kni.dev/{}", shown.kind.to_lowercase(), shown.name());
        ensure!(all.contains(&object), "{object} is not in\n{all}");
    }
    let category = server.kubectl(&["get", "kni", "--all-namespaces", "-o", "name"])?;
    for shown in &SHOWN {
        ensure!(
            category.contains(&format!("{}.kni.dev/{}", shown.kind.to_lowercase(), shown.name())),
            "{category}"
        );
    }
    println!("{all}");
    Ok(())
}

/// Writes the status subresource, as controllers do; it does not affect the rest of the object.
fn write_status(server: &ApiServer, shown: &Shown) -> Result<()> {
    let mut status: serde_json::Value = serde_json::from_str(shown.status)?;
    let conditions = ["Accepted", "Ready"].map(|name| (name, "True"));
    let others = ["Programmed", "PolicyEnforced", "Degraded"].map(|name| (name, "False"));
    let conditions = conditions.iter().chain(&others).map(|(name, status)| {
        serde_json::json!({
            "type": name, "status": status, "reason": "Test", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    });
    status["conditions"] = conditions.collect();
    let patch = serde_json::json!({ "status": status, "spec": { "mtu": 1 } }).to_string();
    server
        .kubectl(&[
            "patch",
            shown.kind,
            shown.name(),
            "--subresource=status",
            "--type=merge",
            "--patch",
            &patch,
        ])
        .with_context(|| shown.kind.to_owned())?;
    Ok(())
}

/// Column names and cells in the line of the object.
fn list(server: &ApiServer, shown: &Shown, more: &[&str]) -> Result<Vec<(String, String)>> {
    let text = server.kubectl(&[&["get", shown.short, shown.name()], more].concat())?;
    let mut lines = text.lines();
    let heads = lines.next().context("no heads")?;
    let cells = lines.next().context("no object")?;
    // Columns start at the positions of their names.
    let mut starts: Vec<usize> = heads
        .char_indices()
        .filter(|(at, char)| *char != ' ' && (*at == 0 || heads[..*at].ends_with(' ')))
        .map(|(at, _)| at)
        .collect();
    starts.push(heads.len().max(cells.len()));
    let cut = |line: &str, from: usize, to: usize| {
        let line = line.get(from..to.min(line.len())).unwrap_or_default();
        line.trim().to_owned()
    };
    let pairs = starts
        .windows(2)
        .map(|pair| (cut(heads, pair[0], pair[1]), cut(cells, pair[0], pair[1])));
    Ok(pairs.collect())
}
