//! Defines the architecture as tables: the layer of each crate, and the crates that may use each external crate.

/// The layers from bottom to top: a crate depends only on crates of lower layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Layer {
    /// Definitions shared by several programs: wire formats, layouts of maps, objects.
    Contract,
    /// The types of the agent and their conversions; ordered by rank, as services are.
    Model(u8),
    /// Pure decisions: no I/O, no async, no clock.
    Engine,
    /// One external system each.
    Driver,
    /// Order, locks and rollback; of two services, the one of the higher rank may use the other.
    Service(u8),
    /// Implements a protocol and makes no decisions.
    Edge,
    /// Connects all parts of the agent.
    Root,
    /// Programs besides the agent, and tools.
    Program,
    /// Tests of the whole system.
    Test,
}

impl Layer {
    /// The name in a `//! Layer:` line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Contract => "contract",
            Self::Model(_) => "model",
            Self::Engine => "engine",
            Self::Driver => "driver",
            Self::Service(_) => "service",
            Self::Edge => "edge",
            Self::Root => "root",
            Self::Program => "program",
            Self::Test => "test",
        }
    }
}

/// Every crate of the workspace: its folder and its layer.
pub(super) const CRATES: &[(&str, Layer)] = &[
    ("h2-authority", Layer::Contract),
    ("kni-api", Layer::Contract),
    ("kni-common", Layer::Contract),
    ("proto", Layer::Contract),
    ("kni-agent/model", Layer::Model(1)),
    ("kni-agent/object", Layer::Model(1)),
    ("kni-agent/crd", Layer::Model(2)),
    ("kni-agent/metrics", Layer::Model(2)),
    ("kni-agent/ipam", Layer::Engine),
    ("kni-agent/policy", Layer::Engine),
    ("kni-agent/services", Layer::Engine),
    ("kni-agent/dataplane", Layer::Driver),
    ("kni-agent/netlink", Layer::Driver),
    ("kni-agent/plugins", Layer::Driver),
    ("kni-agent/store", Layer::Driver),
    ("kni-agent/claims", Layer::Service(1)),
    ("kni-agent/tasks", Layer::Service(0)),
    ("kni-agent/cluster", Layer::Service(1)),
    ("kni-agent/enforcement", Layer::Service(1)),
    ("kni-agent/flows", Layer::Service(1)),
    ("kni-agent/reflectors", Layer::Service(2)),
    ("kni-agent/uplink", Layer::Service(2)),
    ("kni-agent/fabric", Layer::Service(2)),
    ("kni-agent/pods", Layer::Service(3)),
    ("kni-agent/inspect", Layer::Service(4)),
    ("kni-agent/controllers", Layer::Service(5)),
    ("kni-agent/grpc", Layer::Edge),
    ("kni-agent/http", Layer::Edge),
    ("kni-agent/manifests", Layer::Edge),
    ("kni-agent", Layer::Root),
    ("kni-cni", Layer::Program),
    ("kni-conformance", Layer::Program),
    ("kni-controller", Layer::Program),
    ("kni-ebpf", Layer::Program),
    ("knictl", Layer::Program),
    ("local-node", Layer::Program),
    ("local-node/probe", Layer::Program),
    ("simulated-nodes", Layer::Program),
    ("xtask", Layer::Program),
    ("tests/integration", Layer::Test),
];

/// The folder of the crates whose external crates have owners, and whose headers state their layers.
pub(super) const AGENT: &str = "kni-agent";

/// The crates that may use an external crate or an item of std.
struct Outside {
    /// Leading names of a path, such as `std::fs`; a `*` at the end stands for any rest of that name. One that begins
    /// with a capital letter matches anywhere in a path.
    pattern: &'static str,
    who: Who,
}

/// The name of the root crate of the agent in the tables of owners.
const ROOT: &str = "root";

enum Who {
    /// These crates, and no other.
    Only(&'static [&'static str]),
    /// These crates, and the root layer.
    OnlyAndRoot(&'static [&'static str]),
    /// Every crate but these.
    NotIn(&'static [&'static str]),
}

impl Who {
    fn names(&self) -> &'static [&'static str] {
        match self {
            Self::Only(names) | Self::OnlyAndRoot(names) | Self::NotIn(names) => names,
        }
    }
}

const PURE: &[&str] = &["ipam", "model", "policy", "services"];

const OUTSIDE: &[Outside] = &[
    Outside {
        pattern: "aya",
        who: Who::Only(&["dataplane"]),
    },
    Outside {
        pattern: "aya_*",
        who: Who::Only(&["dataplane"]),
    },
    Outside {
        pattern: "rtnetlink",
        who: Who::Only(&["netlink"]),
    },
    Outside {
        pattern: "netlink_*",
        who: Who::Only(&["netlink"]),
    },
    Outside {
        pattern: "redb",
        who: Who::Only(&["store"]),
    },
    Outside {
        pattern: "prometheus_client",
        who: Who::Only(&["metrics"]),
    },
    Outside {
        pattern: "tonic",
        who: Who::OnlyAndRoot(&["grpc"]),
    },
    Outside {
        pattern: "tonic_*",
        who: Who::OnlyAndRoot(&["grpc"]),
    },
    Outside {
        pattern: "kni_proto",
        // The pods crate replays the deletes that the CNI plugin writes.
        who: Who::OnlyAndRoot(&["grpc", "pods"]),
    },
    Outside {
        pattern: "kube",
        who: Who::OnlyAndRoot(&["claims", "cluster", "controllers", "crd", "manifests", "reflectors"]),
    },
    Outside {
        pattern: "kube_*",
        who: Who::OnlyAndRoot(&["claims", "cluster", "controllers", "crd", "manifests", "reflectors"]),
    },
    Outside {
        // The tests of the driver inspect the kernel with iproute2.
        pattern: "std::process::Command",
        who: Who::Only(&["netlink", "plugins"]),
    },
    Outside {
        pattern: "tokio::process",
        who: Who::Only(&["plugins"]),
    },
    Outside {
        pattern: "tokio",
        who: Who::NotIn(PURE),
    },
    Outside {
        pattern: "tokio_*",
        who: Who::NotIn(PURE),
    },
    Outside {
        pattern: "std::fs",
        who: Who::NotIn(PURE),
    },
    Outside {
        pattern: "SystemTime",
        who: Who::NotIn(PURE),
    },
    Outside {
        pattern: "Instant",
        who: Who::NotIn(PURE),
    },
];

/// The layer of the crate in `folder`, if the table has it.
pub(super) fn layer(folder: &str) -> Option<Layer> {
    CRATES.iter().find(|(name, _)| *name == folder).map(|(_, layer)| *layer)
}

/// The reason why the crate in the folder `from` must not depend on the one in the folder `to`; `None` if it may.
pub(super) fn refuse_dependency(from: &str, to: &str) -> Option<String> {
    let (from_layer, to_layer) = (layer(from)?, layer(to)?);
    let direction = match to_layer.cmp(&from_layer) {
        std::cmp::Ordering::Less => return None,
        std::cmp::Ordering::Equal => "sideways",
        std::cmp::Ordering::Greater => "upward",
    };
    let (from_name, to_name) = (from_layer.name(), to_layer.name());
    Some(format!(
        "`{from}` ({from_name}) depends on `{to}` ({to_name}), which is {direction}; dependencies go down only"
    ))
}

/// The name of the crate in `folder` of the agent in the tables of owners.
pub(super) fn owner(folder: &str) -> &str {
    folder.rsplit_once('/').map_or(ROOT, |(_, name)| name)
}

/// Stale rows of the tables: rows for crates that do not exist.
pub(super) fn stale(members: &[String]) -> Vec<String> {
    let is_member = |folder: &str| members.iter().any(|member| member == folder);
    let rows = CRATES
        .iter()
        .filter(|(folder, _)| !is_member(folder))
        .map(|(folder, _)| format!("the table of layers has `{folder}`, which is no member of the workspace"));
    let owners = OUTSIDE.iter().flat_map(|rule| {
        let strangers = rule
            .who
            .names()
            .iter()
            .filter(|name| !is_member(&format!("{AGENT}/{name}")));
        strangers.map(|name| {
            format!(
                "the owners of `{}` have `{name}`, which is no crate of the agent",
                rule.pattern
            )
        })
    });
    rows.chain(owners).collect()
}

/// The reason why the crate `module` of the agent must not use the external path `names`; `None` if it may.
pub(super) fn refuse_outside(module: &str, names: &[String]) -> Option<String> {
    let rule = OUTSIDE
        .iter()
        .find(|rule| matches(rule.pattern, names) && !allows(&rule.who, module))?;
    let pattern = rule.pattern;
    Some(match rule.who {
        Who::Only(modules) => format!("`{pattern}` belongs to {} only, not to `{module}`", modules.join(", ")),
        Who::OnlyAndRoot(modules) => {
            format!(
                "`{pattern}` belongs to {} and the root only, not to `{module}`",
                modules.join(", ")
            )
        }
        Who::NotIn(_) => format!("`{module}` is pure and may not use `{pattern}`"),
    })
}

fn allows(who: &Who, module: &str) -> bool {
    match who {
        Who::Only(modules) => modules.contains(&module),
        Who::OnlyAndRoot(modules) => modules.contains(&module) || module == ROOT,
        Who::NotIn(modules) => !modules.contains(&module),
    }
}

fn matches(pattern: &str, names: &[String]) -> bool {
    if pattern.starts_with(char::is_uppercase) {
        return names.iter().any(|name| name == pattern);
    }
    if let Some(start) = pattern.strip_suffix('*') {
        return names.first().is_some_and(|name| name.starts_with(start));
    }
    let wanted: Vec<&str> = pattern.split("::").collect();
    names.len() >= wanted.len() && names.iter().zip(wanted).all(|(name, want)| name == want)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Vec<String> {
        text.split("::").map(str::to_owned).collect()
    }

    #[test]
    fn dependencies_go_down_only() {
        for (from, to) in [
            ("kni-agent/grpc", "kni-agent/pods"),
            ("kni-agent/pods", "kni-agent/store"),
            ("kni-agent/store", "kni-agent/model"),
            ("kni-agent/controllers", "kni-agent/pods"),
            ("kni-agent/pods", "kni-agent/uplink"),
            ("kni-agent", "kni-agent/http"),
            ("tests/integration", "local-node"),
        ] {
            assert_eq!(refuse_dependency(from, to), None, "{from} -> {to}");
        }
        for (from, to) in [
            ("kni-agent/store", "kni-agent/netlink"),
            ("kni-agent/flows", "kni-agent/enforcement"),
            ("kni-agent/grpc", "kni-agent/http"),
            ("knictl", "local-node"),
        ] {
            assert!(
                refuse_dependency(from, to).unwrap().contains("sideways"),
                "{from} -> {to}"
            );
        }
        for (from, to) in [
            ("kni-agent/model", "kni-agent/ipam"),
            ("kni-agent/ipam", "kni-agent/store"),
            ("kni-agent/pods", "kni-agent/grpc"),
            ("kni-agent/uplink", "kni-agent/pods"),
            ("kni-common", "kni-agent/model"),
            ("kni-agent", "knictl"),
        ] {
            assert!(
                refuse_dependency(from, to).unwrap().contains("upward"),
                "{from} -> {to}"
            );
        }
    }

    #[test]
    fn a_row_without_a_crate_is_stale() {
        let members: Vec<String> = CRATES.iter().map(|(folder, _)| (*folder).to_owned()).collect();
        assert_eq!(stale(&members), Vec::<String>::new());
        let fewer: Vec<String> = members
            .iter()
            .filter(|folder| !folder.ends_with("/ipam"))
            .cloned()
            .collect();
        let found = stale(&fewer);
        assert!(found[0].contains("layers has `kni-agent/ipam`"), "{found:?}");
        assert!(found[1].contains("have `ipam`"), "{found:?}");
    }

    #[test]
    fn outside_crates_have_owners() {
        for (module, used) in [
            ("dataplane", "aya::maps"),
            ("netlink", "netlink_packet_route::link"),
            ("store", "redb::Database"),
            ("grpc", "tonic::Status"),
            ("root", "tonic::transport"),
            ("crd", "kube::CustomResource"),
            ("pods", "tokio::sync"),
            ("store", "std::fs::File"),
            ("ipam", "std::time::Duration"),
        ] {
            assert_eq!(refuse_outside(module, &path(used)), None, "{module}: {used}");
        }
        for (module, used) in [
            ("pods", "aya::maps"),
            ("root", "aya_obj"),
            ("dataplane", "netlink_sys::Socket"),
            ("pods", "redb::Database"),
            ("plugins", "kni_proto::v1"),
            ("store", "kube::Client"),
            ("ipam", "tokio::sync"),
            ("model", "std::fs"),
            ("policy", "std::time::Instant"),
            ("policy", "time::SystemTime::now"),
        ] {
            assert!(refuse_outside(module, &path(used)).is_some(), "{module}: {used}");
        }
    }
}
