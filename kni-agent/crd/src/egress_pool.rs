//! Validates an `EgressAddressPool` and converts it into a pool of the model.

use ipnet::IpNet;
use kni_api::access::NamespacesFrom;
use kni_model::egress::{EgressPool, PoolNamespaces};
use kube::ResourceExt as _;

use super::{
    EgressAddressPool,
    cidr::{overlap, read_cidrs, reserved_range},
    from_object::FromObject,
    invalid::{FieldError, InvalidObject, at},
    labels::read_selector,
    names::{NameRule, of_object, read_name},
};

/// Maximum number of ranges of one pool.
const MAX_RANGES: usize = 64;
/// The shortest prefixes: a pool lists addresses that are routed to the nodes, not networks.
const SHORTEST: (u8, u8) = (16, 64);

impl FromObject<EgressAddressPool> for EgressPool {
    type Error = InvalidObject;

    fn from_object(object: &EgressAddressPool) -> Result<Self, InvalidObject> {
        convert(object).map_err(of_object("EgressAddressPool", &object.metadata))
    }
}

fn convert(object: &EgressAddressPool) -> Result<EgressPool, FieldError> {
    let field = "spec.ranges";
    let ranges = read_cidrs(field, &object.spec.ranges, 1, MAX_RANGES)?;
    for (index, range) in ranges.iter().enumerate() {
        let earlier = ranges.get(..index).unwrap_or_default();
        check(range, earlier).map_err(|reason| at(format!("{field}[{index}]"), reason))?;
    }
    let namespaces = &object.spec.access.namespaces;
    let field = "spec.access.namespaces.selector";
    let namespaces = match (namespaces.from, &namespaces.selector) {
        (NamespacesFrom::Selected, Some(selector)) => PoolNamespaces::Selected(read_selector(field, selector)?),
        (NamespacesFrom::Selected, None) => return Err(at(field, "is missing, and from is Selected")),
        (NamespacesFrom::All | NamespacesFrom::None, Some(_)) => {
            return Err(at(field, "has a meaning with from Selected only"));
        }
        (NamespacesFrom::All, None) => PoolNamespaces::All,
        (NamespacesFrom::None, None) => PoolNamespaces::None,
    };
    Ok(EgressPool {
        name: read_name(&object.metadata, NameRule::Subdomain)?,
        created: object.creation_timestamp().map_or(0, |time| time.0.as_second()),
        ranges,
        namespaces,
    })
}

fn check(range: &IpNet, earlier: &[IpNet]) -> Result<(), String> {
    let shortest = if range.addr().is_ipv4() { SHORTEST.0 } else { SHORTEST.1 };
    if range.prefix_len() < shortest {
        return Err(format!("{range} is larger than /{shortest}"));
    }
    if let Some((reserved, what)) = reserved_range(range) {
        return Err(format!("{range} overlaps {reserved}, which is {what}"));
    }
    match earlier.iter().find(|other| overlap(other, range)) {
        Some(other) => Err(format!("{range} overlaps {other} of the same pool")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(spec: &serde_json::Value) -> Result<EgressPool, String> {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressPool", "metadata": { "name": "p" }, "spec": spec,
        });
        let object: EgressAddressPool = serde_json::from_value(object).unwrap();
        EgressPool::from_object(&object).map_err(|invalid| invalid.to_string())
    }

    #[test]
    fn ranges_are_addresses_that_hosts_may_have() {
        let all = json!({ "namespaces": { "from": "All" } });
        let pool = read(&json!({ "ranges": ["192.0.2.0/28", "2001:db8::25/128"], "access": all })).unwrap();
        assert_eq!(
            (pool.name.as_str(), pool.ranges.len(), pool.namespaces),
            ("p", 2, PoolNamespaces::All)
        );
        for (ranges, expected) in [
            (json!([]), "spec.ranges: has 0 entries"),
            (
                json!(["192.0.2.1"]),
                "spec.ranges[0]: \"192.0.2.1\" is not in CIDR notation",
            ),
            (json!(["192.0.2.1/28"]), "host bits"),
            (json!(["10.0.0.0/8"]), "larger than /16"),
            (json!(["2001:db8::/48"]), "larger than /64"),
            (json!(["127.0.0.0/24"]), "loopback"),
            (json!(["224.0.0.0/24"]), "multicast"),
            (
                json!(["192.0.2.0/28", "192.0.2.8/29"]),
                "spec.ranges[1]: 192.0.2.8/29 overlaps 192.0.2.0/28 of the same pool",
            ),
        ] {
            let refused = read(&json!({ "ranges": ranges, "access": all })).unwrap_err();
            assert!(refused.contains(expected), "{ranges}: {refused}");
        }
    }

    #[test]
    fn a_selector_belongs_to_selected() {
        let access = |namespaces: &serde_json::Value| {
            let spec = json!({ "ranges": ["192.0.2.0/28"], "access": { "namespaces": namespaces } });
            read(&spec).map(|pool| pool.namespaces)
        };
        assert_eq!(access(&json!({ "from": "None" })), Ok(PoolNamespaces::None));
        let selected = json!({ "from": "Selected", "selector": { "matchLabels": { "a": "b" } } });
        assert!(matches!(access(&selected), Ok(PoolNamespaces::Selected(_))));
        for bad in [
            json!({ "from": "Selected" }),
            json!({ "from": "All", "selector": {} }),
            json!({ "from": "Selected", "selector": { "matchLabels": { "a b": "c" } } }),
        ] {
            assert!(
                access(&bad).unwrap_err().contains("spec.access.namespaces.selector"),
                "{bad}"
            );
        }
    }
}
