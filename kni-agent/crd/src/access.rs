//! Validates `PodNetwork.spec.access` and fills in its defaults.

use ipnet::IpNet;
use kni_api::{NamespaceAccess, NamespacesFrom};
use kni_model::access::{Access, Admitted, Choice};

use super::{
    PodNetworkSpec,
    cidr::read_cidrs,
    invalid::{FieldError, at},
    labels::read_selector,
};

/// Maximum number of ranges of chosen addresses.
const MAX_RANGES: usize = 64;

/// Who may join a network with these subnets.
pub(super) fn read_access(spec: &PodNetworkSpec, subnets: &[IpNet]) -> Result<Access, FieldError> {
    let selector = spec.namespace_selector.as_ref();
    let primary_of = selector
        .map(|selector| read_selector("spec.namespaceSelector", selector))
        .transpose()?;
    let Some(access) = &spec.access else {
        return Ok(Access {
            namespaces: implied(spec.default),
            primary_of,
            ..Access::default()
        });
    };
    if access.lock_namespaces && !spec.default && primary_of.is_none() {
        let reason = "only a network that is the primary one of namespaces can lock them: add namespaceSelector";
        return Err(at("spec.access.lockNamespaces", reason));
    }
    let namespaces = match &access.namespaces {
        Some(namespaces) => read_namespaces(namespaces)?,
        None => implied(spec.default),
    };
    Ok(Access {
        namespaces,
        addresses: read_addresses(access, subnets)?,
        mac: access.allow_mac,
        default_route: access.allow_default_route,
        lock_namespaces: access.lock_namespaces,
        require_join: access.require_join,
        revoke: access.revoke,
        primary_of,
    })
}

/// The namespaces where the network names none.
const fn implied(default: bool) -> Admitted {
    if default { Admitted::All } else { Admitted::None }
}

fn read_namespaces(namespaces: &NamespaceAccess) -> Result<Admitted, FieldError> {
    let field = "spec.access.namespaces.selector";
    match (namespaces.from, &namespaces.selector) {
        (NamespacesFrom::All, None) => Ok(Admitted::All),
        (NamespacesFrom::None, None) => Ok(Admitted::None),
        (NamespacesFrom::Selected, Some(selector)) => read_selector(field, selector).map(Admitted::Selected),
        (NamespacesFrom::Selected, None) => Err(at(field, "is missing: from Selected needs a selector")),
        (NamespacesFrom::All | NamespacesFrom::None, Some(_)) => Err(at(field, "has a meaning with Selected only")),
    }
}

fn read_addresses(access: &kni_api::Access, subnets: &[IpNet]) -> Result<Choice, FieldError> {
    let field = "spec.access.addressRanges";
    let ranges = read_cidrs(field, &access.address_ranges, 0, MAX_RANGES)?;
    for (index, range) in ranges.iter().enumerate() {
        if !subnets.iter().any(|subnet| subnet.contains(range)) {
            let reason = format!("{range} is not inside any of the network's subnets");
            return Err(at(format!("{field}[{index}]"), reason));
        }
    }
    match (access.allow_addresses, ranges.is_empty()) {
        (true, true) => Ok(Choice::Any),
        (true, false) => Ok(Choice::Within(ranges)),
        (false, true) => Ok(Choice::Nothing),
        (false, false) => Err(at(
            field,
            "limits addresses that pods may choose: set allowAddresses to true",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(spec: &serde_json::Value) -> Result<Access, FieldError> {
        let spec: PodNetworkSpec = serde_json::from_value(spec.clone()).unwrap();
        let subnets = read_cidrs("spec.subnets", &spec.subnets, 0, 16)?;
        read_access(&spec, &subnets)
    }

    fn labels(tenant: &str) -> kni_model::policy::Labels {
        [("tenant".to_owned(), tenant.to_owned())].into()
    }

    #[test]
    fn the_default_network_takes_all_and_others_their_own_namespaces() {
        let red = serde_json::json!({ "matchLabels": { "tenant": "red" } });
        let other = serde_json::json!({ "from": "Selected", "selector": { "matchLabels": { "tenant": "blue" } } });
        for (spec, admitted) in [
            (serde_json::json!({ "default": true }), [true, true]),
            (serde_json::json!({}), [false, false]),
            (serde_json::json!({ "access": {} }), [false, false]),
            (serde_json::json!({ "namespaceSelector": red }), [true, false]),
            (
                serde_json::json!({ "namespaceSelector": red, "access": { "allowMac": true } }),
                [true, false],
            ),
            (
                serde_json::json!({ "namespaceSelector": red, "access": { "namespaces": other } }),
                [true, true],
            ),
            (
                serde_json::json!({ "default": true, "access": { "namespaces": { "from": "None" } } }),
                [false, false],
            ),
            (
                serde_json::json!({ "access": { "namespaces": { "from": "All" } } }),
                [true, true],
            ),
        ] {
            let access = read(&spec).unwrap();
            let admits = |labels: &kni_model::policy::Labels| {
                let primary = access.primary_of.as_ref();
                access.namespaces.admits(labels) || primary.is_some_and(|selector| selector.matches(labels))
            };
            let found = ["red", "blue"].map(|tenant| admits(&labels(tenant)));
            assert_eq!(found, admitted, "{spec}");
        }
    }

    #[test]
    fn choices_are_read() {
        let access = read(&serde_json::json!({
            "subnets": ["10.0.0.0/16"], "namespaceSelector": {},
            "access": {
                "allowAddresses": true, "addressRanges": ["10.0.9.0/24"], "allowMac": true, "allowDefaultRoute": true,
                "lockNamespaces": true, "requireJoin": true, "revoke": true,
            },
        }))
        .unwrap();
        assert_eq!(access.addresses, Choice::Within(vec!["10.0.9.0/24".parse().unwrap()]));
        assert!(access.mac && access.default_route && access.lock_namespaces && access.require_join && access.revoke);
        let any = read(&serde_json::json!({ "access": { "allowAddresses": true } })).unwrap();
        assert_eq!(any.addresses, Choice::Any);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (access, field) in [
            (
                serde_json::json!({ "namespaces": { "from": "Selected" } }),
                "spec.access.namespaces.selector",
            ),
            (
                serde_json::json!({ "namespaces": { "from": "All", "selector": {} } }),
                "spec.access.namespaces.selector",
            ),
            (
                serde_json::json!({ "addressRanges": ["10.0.0.0/24"] }),
                "spec.access.addressRanges",
            ),
            (
                serde_json::json!({ "allowAddresses": true, "addressRanges": ["10.1.0.0/24"] }),
                "spec.access.addressRanges[0]",
            ),
            (
                serde_json::json!({ "lockNamespaces": true }),
                "spec.access.lockNamespaces",
            ),
        ] {
            let spec = serde_json::json!({ "subnets": ["10.0.0.0/16"], "access": access });
            assert_eq!(read(&spec).unwrap_err().0, field, "{spec}");
        }
    }
}
