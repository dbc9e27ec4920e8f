//! The architecture of kni-agent as tables: which module is in which layer, and who may use which outside crate.

/// The layers from bottom to top: an import may only go to a smaller one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Layer {
    /// The words of the house.
    Model,
    /// Pure decisions: no I/O, no async, no clock.
    Engine,
    /// One outside thing each.
    Driver,
    /// Order, locks and undo.
    Service,
    /// Speaks a protocol, decides nothing.
    Edge,
    /// Wires everything together.
    Root,
}

impl Layer {
    /// The name in a `//! Layer:` line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Engine => "engine",
            Self::Driver => "driver",
            Self::Service => "service",
            Self::Edge => "edge",
            Self::Root => "root",
        }
    }
}

const MODULES: &[(&str, Layer)] = &[
    ("lib", Layer::Root),
    ("main", Layer::Root),
    ("agent", Layer::Root),
    ("cli", Layer::Root),
    ("cni_install", Layer::Root),
    ("cni_journal", Layer::Root),
    ("config_file", Layer::Root),
    ("container", Layer::Root),
    ("footprint", Layer::Root),
    ("privileges", Layer::Root),
    ("telemetry", Layer::Root),
    ("metrics", Layer::Root),
    ("readiness", Layer::Root),
    ("grpc", Layer::Edge),
    ("controllers", Layer::Edge),
    ("http", Layer::Edge),
    ("manifests", Layer::Edge),
    ("attach", Layer::Service),
    ("policy_sync", Layer::Service),
    ("flows", Layer::Service),
    ("uplink", Layer::Service),
    ("reconcile", Layer::Service),
    ("cni", Layer::Driver),
    ("netlink", Layer::Driver),
    ("dataplane", Layer::Driver),
    ("store", Layer::Driver),
    ("ipam", Layer::Engine),
    ("policy", Layer::Engine),
    ("services", Layer::Engine),
    ("model", Layer::Model),
    ("crd", Layer::Model),
];

/// Imports that do not go down, on purpose: an object of Kubernetes turns into our words, and the HTTP server shows what
/// the two of the root hold.
const EXCEPTIONS: &[(&str, &str)] = &[("crd", "model"), ("http", "metrics"), ("http", "readiness")];

/// Who may name an outside crate, or an item of std.
struct Outside {
    /// Leading names of a path, such as `std::fs`; a `*` at the end stands for any rest of that name. One that begins
    /// with a capital letter matches anywhere in a path.
    pattern: &'static str,
    who: Who,
}

enum Who {
    /// These modules, and no other.
    Only(&'static [&'static str]),
    /// These modules, and the root layer.
    OnlyAndRoot(&'static [&'static str]),
    /// Every module but these.
    NotIn(&'static [&'static str]),
}

const PURE: &[&str] = &["ipam", "policy", "services", "model"];

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
        pattern: "tonic",
        who: Who::OnlyAndRoot(&["grpc"]),
    },
    Outside {
        pattern: "tonic_*",
        who: Who::OnlyAndRoot(&["grpc"]),
    },
    Outside {
        pattern: "kni_proto",
        who: Who::OnlyAndRoot(&["grpc"]),
    },
    Outside {
        pattern: "kube",
        who: Who::OnlyAndRoot(&["crd", "controllers", "manifests"]),
    },
    Outside {
        pattern: "kube_*",
        who: Who::OnlyAndRoot(&["crd", "controllers", "manifests"]),
    },
    Outside {
        // The driver's own tests look at the kernel with the tools of iproute2.
        pattern: "std::process::Command",
        who: Who::Only(&["cni", "netlink"]),
    },
    Outside {
        pattern: "tokio::process",
        who: Who::Only(&["cni"]),
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

/// The layer of a top-level module, if the table has it.
pub(super) fn layer(module: &str) -> Option<Layer> {
    MODULES
        .iter()
        .find(|(name, _)| *name == module)
        .map(|(_, layer)| *layer)
}

/// Why `from` may not import `to`, if so.
pub(super) fn refuse_import(from: &str, to: &str) -> Option<String> {
    if from == to || EXCEPTIONS.contains(&(from, to)) {
        return None;
    }
    let from_layer = layer(from)?;
    let Some(to_layer) = layer(to) else {
        return Some(format!(
            "`crate::{to}` is in no layer: name the module itself, or add it to the table"
        ));
    };
    let direction = match to_layer.cmp(&from_layer) {
        std::cmp::Ordering::Less => return None,
        std::cmp::Ordering::Equal if from_layer == Layer::Root => return None,
        std::cmp::Ordering::Equal => "sideways",
        std::cmp::Ordering::Greater => "upward",
    };
    let (from_name, to_name) = (from_layer.name(), to_layer.name());
    Some(format!(
        "`{from}` ({from_name}) imports `{to}` ({to_name}), which is {direction}; imports go down only"
    ))
}

/// Why `module` may not use the outside path `names`, if so.
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
        Who::OnlyAndRoot(modules) => modules.contains(&module) || layer(module) == Some(Layer::Root),
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
    fn imports_go_down_only() {
        for (from, to) in [
            ("grpc", "attach"),
            ("attach", "store"),
            ("store", "model"),
            ("ipam", "crd"),
            ("agent", "cli"),
        ] {
            assert_eq!(refuse_import(from, to), None, "{from} -> {to}");
        }
        for (from, to) in [
            ("store", "netlink"),
            ("attach", "reconcile"),
            ("model", "crd"),
            ("grpc", "http"),
        ] {
            assert!(refuse_import(from, to).unwrap().contains("sideways"), "{from} -> {to}");
        }
        for (from, to) in [
            ("model", "ipam"),
            ("ipam", "store"),
            ("attach", "grpc"),
            ("grpc", "agent"),
            ("store", "config_file"),
        ] {
            assert!(refuse_import(from, to).unwrap().contains("upward"), "{from} -> {to}");
        }
    }

    #[test]
    fn exceptions_hold_for_one_direction_and_one_pair() {
        assert_eq!(refuse_import("crd", "model"), None);
        assert!(refuse_import("model", "crd").is_some());
        assert_eq!(refuse_import("http", "metrics"), None);
        assert!(refuse_import("grpc", "metrics").is_some());
        assert!(refuse_import("http", "agent").is_some());
    }

    #[test]
    fn a_module_without_a_layer_is_refused() {
        assert!(refuse_import("attach", "Thing").unwrap().contains("no layer"));
        assert!(refuse_import("attach", "*").unwrap().contains("no layer"));
    }

    #[test]
    fn outside_crates_have_owners() {
        for (module, used) in [
            ("dataplane", "aya::maps"),
            ("netlink", "netlink_packet_route::link"),
            ("store", "redb::Database"),
            ("grpc", "tonic::Status"),
            ("agent", "tonic::transport"),
            ("crd", "kube::CustomResource"),
            ("attach", "tokio::sync"),
            ("store", "std::fs::File"),
            ("ipam", "std::time::Duration"),
        ] {
            assert_eq!(refuse_outside(module, &path(used)), None, "{module}: {used}");
        }
        for (module, used) in [
            ("attach", "aya::maps"),
            ("agent", "aya_obj"),
            ("dataplane", "netlink_sys::Socket"),
            ("attach", "redb::Database"),
            ("attach", "kni_proto::v1"),
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
