//! Tests that bpftool shows the rows of every map by their field names, and the programs at the interfaces.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, ensure};
use kni_common::{
    Direction,
    layout::{ALL_MAPS, MapKind},
};
use kni_dataplane::{Dataplane, DataplaneOptions, HookChoice};
use kni_integration::{
    Namespaces,
    frames::{Ip, Link, Payload},
    model::{ANYBODY, Allowed, Asked, Endpoint, Enforced, PortRow, Seen, Service},
    programs::{Lockstep, Programs, ROOT, options},
    require,
};
use kni_model::EndpointId;

const A4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const B4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 3);
const A6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
const B6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 3);

fn endpoint(ipv4: Ipv4Addr, ipv6: Ipv6Addr, id: u8) -> Endpoint {
    Endpoint {
        network: 77,
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        mac: [2, 0, 0, 0, 0, id],
        host_mac: [2, 0, 0, 0, 1, id],
        host_access: false,
    }
}

fn number<T: TryFrom<u64>>(value: u64) -> T {
    T::try_from(value).ok().expect("a number that fits")
}

/// A policy and a service, each used once.
fn fill_beside(step: &mut Lockstep) -> Result<()> {
    let lifetimes = step.model.lifetimes;
    step.configure(lifetimes, number(SHARE), 0)?;
    let row = PortRow {
        protocol: Some(17),
        port: (8080, 16),
        ordinal: number(ORDINAL),
        allow: true,
    };
    step.set_ports(PORTS, &[row])?;
    step.allow(SET, ANYBODY, Asked::Egress, Allowed::Ports(PORTS), number(RULE))?;
    step.identify(77, "192.0.2.0/24".parse()?, number(IDENTITY))?;
    let service = Service {
        id: number(SERVICE),
        backends: vec![(B4.into(), 8080)],
        affinity: 1000,
        ..Service::default()
    };
    let address = Ipv4Addr::new(10, 96, 0, 1);
    step.serve((77, address.into(), 17, 80), &service)?;
    let selected = Enforced {
        policy: SET,
        ..Enforced::default()
    };
    step.enforce(3, selected)?;
    step.publish(
        3,
        &endpoint(
            Ipv4Addr::new(10, 0, 0, 4),
            Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 4),
            3,
        ),
    )?;
    let link = Link::new([2, 0, 0, 0, 0, 3], [2, 0, 0, 0, 1, 3]);
    let asked = Ip::new([10, 0, 0, 4].into(), address.into()).packet(&Payload::udp(4000, 80, b""));
    step.run(Direction::FromPod, 3, &link.frame(&asked))?;
    step.programs().explain(Seen::from_pod(3), &link.frame(&asked))?;
    Ok(())
}

/// Creates rows by packets and endpoints.
pub(super) fn fill(step: &mut Lockstep) -> Result<()> {
    step.set_routes(77, &["10.0.0.0/24".parse()?, "fd00::/64".parse()?], false)?;
    step.publish(1, &endpoint(A4, A6, 1))?;
    step.publish(2, &endpoint(B4, B6, 2))?;
    let link = Link::new([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 1, 1]);
    for (a, b) in [(IpAddr::from(A4), IpAddr::from(B4)), (A6.into(), B6.into())] {
        let first = &Ip::new(a, b).fragments(&Payload::udp(4000, 53, &[0; 40]), 24)[0];
        step.run(Direction::FromPod, 1, &link.frame(first))?;
        let spoofed = Ip::new(b, a).packet(&Payload::udp(4000, 53, b""));
        step.run(Direction::FromPod, 1, &link.frame(&spoofed))?;
    }
    Ok(())
}

/// A map, the field names of its key (not for arrays) and value, and a value that the above rows must contain.
type Fields = (&'static str, &'static [&'static str], (&'static str, u64));

/// For a map without rows.
const NO_ROW: (&str, u64) = ("", 0);

const SHARE: u64 = 4321;
const RULE: u64 = 1234;
const ORDINAL: u64 = 321;
const IDENTITY: u64 = 2345;
const SERVICE: u64 = 3456;
const SET: u32 = 8;
/// Network 77 and protocol 17 in the key of a flow.
const UDP_IN_77: u64 = (77 << 8) + 17;
const PORTS: u32 = 9;

const FIELDS: &[Fields] = &[
    (
        "ENDPOINTS",
        &[
            "from_pod",
            "to_pod",
            "destination",
            "source",
            "network",
            "generation",
            "incarnation",
            "epoch",
            "flags",
            "ipv4",
            "ipv6",
        ],
        ("network", 77),
    ),
    (
        "ENDPOINT_POLICIES",
        &["policy", "identity4", "identity6", "ifindex"],
        ("policy", SET as u64),
    ),
    (
        "ADDRESSES",
        &["network", "address", "endpoint", "incarnation"],
        ("network", 77),
    ),
    (
        "ROUTES",
        &["prefix_len", "network", "address", "action", "flags", "node"],
        ("action", 2),
    ),
    (
        "FLOWS4",
        &[
            "scope",
            "first",
            "second",
            "ports",
            "last_seen",
            "lifetime",
            "first_kind",
            "second_kind",
            "flags",
            "id",
            "generation",
            "source",
            "destination",
        ],
        ("scope", UDP_IN_77),
    ),
    (
        "FLOWS6",
        &["scope", "first", "second", "ports", "flags"],
        ("scope", UDP_IN_77),
    ),
    (
        "FRAGMENTS",
        &[
            "network",
            "identification",
            "source",
            "destination",
            "protocol",
            "direction",
            "seen",
            "ports",
        ],
        ("direction", 1),
    ),
    ("COUNTERS", &["packets", "bytes"], ("packets", 2)),
    (
        "DROPS",
        &["endpoint", "verdict", "direction", "packets", "bytes"],
        ("verdict", 39),
    ),
    ("EVENT_GATES", &["window", "drops", "flows", "lost"], ("drops", 2)),
    (
        "CONFIG",
        &["hz", "tcp_established", "flows_per_endpoint"],
        ("flows_per_endpoint", SHARE),
    ),
    (
        "FLOW_SHARES",
        &[
            "window",
            "limit",
            "connections",
            "datagrams",
            "inbound",
            "counted",
            "opened",
        ],
        ("opened", 2),
    ),
    (
        "POLICY",
        &["set", "identity", "direction", "ports", "rule"],
        ("rule", RULE),
    ),
    (
        "PORTS",
        &["prefix_len", "ports", "protocol", "port", "ordinal", "allow"],
        ("ordinal", ORDINAL),
    ),
    (
        "IDENTITIES",
        &["prefix_len", "network", "address", "identity"],
        ("identity", IDENTITY),
    ),
    ("HITS", &["set", "rule", "ordinal", "direction"], ("rule", RULE)),
    (
        "SERVICES",
        &[
            "network", "address", "port", "protocol", "service", "backends", "count", "affinity",
        ],
        ("service", SERVICE),
    ),
    ("BACKENDS", &["backends", "slot", "address", "port"], ("slot", 0)),
    (
        "AFFINITY",
        &["service", "network", "client", "last_used", "address"],
        ("service", SERVICE),
    ),
    (
        "EXPLANATION",
        &["verdict", "egress", "ingress", "beyond", "jiffies"],
        ("version", 2),
    ),
    ("MASQUERADE", &["ipv4", "first", "last", "ipv6"], ("last", 0)),
    // These maps are empty here: their rows require an uplink, other nodes, fragments for pods, or interfaces of CNI
    // plugins.
    ("FRAGMENTS_OUTSIDE", &[], NO_ROW),
    ("NAT4", &[], NO_ROW),
    ("NAT6", &[], NO_ROW),
    ("INTERFACES", &[], NO_ROW),
    ("NODES", &["underlay", "generation", "mtu", "ifindex"], ("mtu", 0)),
    ("HOST_PORTS", &[], NO_ROW),
    ("NODE_PORTS", &[], NO_ROW),
    ("NODE_PEERS", &[], NO_ROW),
    ("SOURCES", &[], NO_ROW),
    ("SHARED_EGRESS", &["key", "value"], ("value", 0)),
    ("EGRESS_SHARES", &[], NO_ROW),
    ("NUMBERS", &[], NO_ROW),
    ("NETWORKS", &[], NO_ROW),
    (
        "OVERLAY",
        &["ipv4", "ipv6", "port", "forwards_egress", "host_network"],
        ("host_network", 0),
    ),
];

#[test]
fn bpftool_shows_the_fields_of_every_map() -> Result<()> {
    require!(root, netns, bpf, ip, bpftool);
    Lockstep::inside("dump", 4096, |step| {
        fill(step)?;
        fill_beside(step)?;
        let node = Namespaces::current("dump")?;
        let folder = step.programs().dataplane().pin_path();
        for spec in ALL_MAPS {
            let path = folder.join(spec.name);
            let path = path.to_str().context("a path")?;
            if spec.kind == MapKind::RingBuf {
                // A ring buffer has no rows: bpftool cannot dump one.
                let shown = node.run("bpftool", &["map", "show", "pinned", path])?;
                ensure!(shown.contains("ringbuf") && shown.contains(spec.name), "{shown}");
                continue;
            }
            let (_, fields, value) = FIELDS
                .iter()
                .find(|(name, ..)| *name == spec.name)
                .with_context(|| format!("no fields of {} are known here", spec.name))?;
            let text = node.run("bpftool", &["map", "dump", "pinned", path])?;
            for field in *fields {
                ensure!(
                    text.contains(&format!("\"{field}\":")),
                    "{} has no {field}: {text}",
                    spec.name
                );
            }
            if *value == NO_ROW {
                continue;
            }
            let (field, value) = value;
            let shown = format!("\"{field}\": {value}");
            ensure!(text.contains(&shown), "{} does not show {shown}: {text}", spec.name);
            let lines: Vec<&str> = text.lines().take(14).collect();
            println!("{}:\n{}", spec.name, lines.join("\n"));
        }
        Ok(())
    })
}

/// `bpftool net` of 7.3 and newer lists TCX; older ones list clsact only, and show a TCX link as a link of its program.
#[test]
fn bpftool_shows_the_programs() -> Result<()> {
    require!(root, netns, bpf, ip, bpftool);
    for hook in [HookChoice::Clsact, HookChoice::Tcx] {
        Programs::inside("net", 4096, |programs| {
            drop(programs);
            let node = Namespaces::current("net")?;
            let (dataplane, _events) = Dataplane::open(&DataplaneOptions { hook, ..options(4096)? })?;
            dataplane.attach("kni3", EndpointId(3))?;
            let (views, problems) = dataplane.programs("kni3", EndpointId(3));
            ensure!(problems.is_empty() && views.len() == 2, "{problems:?}");
            let net = node.run("bpftool", &["net"])?;
            println!("{hook:?}: {net}");
            for view in views {
                if hook == HookChoice::Clsact {
                    let side = if view.name == "from_pod" { "ingress" } else { "egress" };
                    let line = net
                        .lines()
                        .find(|line| line.starts_with("kni3(") && line.contains(side));
                    let shown = line.is_some_and(|line| line.contains(&view.name));
                    ensure!(shown, "{} is not at kni3: {net}", view.name);
                } else if !net.contains(&format!("{} prog_id {}", view.name, view.id)) {
                    let pin = format!("{ROOT}/links/3-{}", view.name);
                    let link = node.run("bpftool", &["link", "show", "pinned", &pin])?;
                    println!("{pin}: {link}");
                    ensure!(
                        link.contains(&format!("prog {}", view.id)),
                        "{} is not shown: {link}",
                        view.name
                    );
                }
                let program = node.run("bpftool", &["prog", "show", "id", &view.id.to_string()])?;
                ensure!(program.contains(&format!("name {}", view.name)), "{program}");
                ensure!(program.contains("map_ids"), "{program}");
            }
            Ok(())
        })?;
    }
    Ok(())
}
