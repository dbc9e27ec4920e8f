//! Tests the rule with every field, alone and together.

use super::*;
use crate::policy::{Operator, Requirement, Selector};

fn labels(tenant: &str) -> Labels {
    [("tenant".to_owned(), tenant.to_owned())].into()
}

fn tenant(value: &str) -> Selector {
    Selector {
        requirements: vec![Requirement {
            key: "tenant".to_owned(),
            operator: Operator::In([value.to_owned()].into()),
        }],
    }
}

fn network(name: &str, access: Access) -> NetworkSpec {
    let stored = serde_json::json!({
        "name": name, "default": false, "enabled": true, "subnets": ["10.0.0.0/16"], "exclude_subnets": [], "mtu": 1500,
    });
    let spec: NetworkSpec = serde_json::from_value(stored).unwrap();
    NetworkSpec { access, ..spec }
}

fn joiner(labels: &Labels, has_verb: bool) -> Joiner<'_> {
    Joiner {
        namespace: "shop",
        labels,
        account: "web",
        has_verb,
    }
}

fn refused_by(result: Result<(), AccessRefusal>) -> Option<AccessRule> {
    result.err().map(|refusal| refusal.rule)
}

#[test]
fn namespaces_are_admitted_and_refused() {
    let red = labels("red");
    for (namespaces, admitted) in [
        (Admitted::All, true),
        (Admitted::Selected(tenant("red")), true),
        (Admitted::Selected(tenant("blue")), false),
        (Admitted::Selected(Selector::default()), true),
        (Admitted::None, false),
    ] {
        let network = network(
            "net",
            Access {
                namespaces: namespaces.clone(),
                ..Access::default()
            },
        );
        let found = network.authorize(joiner(&red, false), Wish::default(), None);
        let expected = (!admitted).then_some(AccessRule::Namespaces);
        assert_eq!(refused_by(found), expected, "{namespaces:?}");
    }
}

#[test]
fn the_namespaces_whose_primary_network_it_is_are_admitted() {
    let access = Access {
        namespaces: Admitted::Selected(tenant("blue")),
        primary_of: Some(tenant("red")),
        ..Access::default()
    };
    let network = network("net", access);
    let found = ["red", "blue", "green"].map(|name| network.admits("shop", &labels(name)).is_ok());
    assert_eq!(found, [true, true, false]);
}

/// The refusals of a wish for nothing, an address, a MAC address, the default routes, and those of the primary
/// interface.
fn refusals(access: Access) -> [Option<AccessRule>; 5] {
    let (red, address) = (labels("red"), ["10.0.1.7".parse().unwrap()]);
    let wish = |ips, mac, default_route, primary| Wish {
        primary,
        ips,
        mac,
        default_route,
    };
    let wishes = [
        Wish::default(),
        wish(&address, false, false, false),
        wish(&[], true, false, false),
        wish(&[], false, true, false),
        wish(&[], false, true, true),
    ];
    let network = network("net", access);
    wishes.map(|wish| refused_by(network.authorize(joiner(&red, false), wish, None)))
}

#[test]
fn choices_need_their_rights() {
    let open = |addresses, all| Access {
        namespaces: Admitted::All,
        addresses,
        mac: all,
        default_route: all,
        ..Access::default()
    };
    let within = |range: &str| Choice::Within(vec![range.parse().unwrap()]);
    let (mac, route) = (Some(AccessRule::Mac), Some(AccessRule::DefaultRoute));
    let nothing = [None, Some(AccessRule::Addresses), mac, route, None];
    assert_eq!(refusals(open(Choice::Nothing, false)), nothing);
    assert_eq!(refusals(open(Choice::Any, true)), [None; 5]);
    assert_eq!(refusals(open(within("10.0.1.0/24"), true)), [None; 5]);
    let outside = [None, Some(AccessRule::AddressRanges), None, None, None];
    assert_eq!(refusals(open(within("10.0.2.0/24"), true)), outside);
}

#[test]
fn a_lock_is_about_the_primary_interface() {
    let red = labels("red");
    let home = network(
        "home",
        Access {
            namespaces: Admitted::All,
            lock_namespaces: true,
            primary_of: Some(tenant("red")),
            ..Access::default()
        },
    );
    let other = network(
        "other",
        Access {
            namespaces: Admitted::All,
            ..Access::default()
        },
    );
    let (primary, beside) = (
        Wish {
            primary: true,
            ..Wish::default()
        },
        Wish::default(),
    );
    let found = other.authorize(joiner(&red, false), primary, Some(&home)).unwrap_err();
    assert_eq!(
        (found.network.as_str(), found.rule),
        ("home", AccessRule::LockNamespaces)
    );
    assert!(found.to_string().contains("spec.access.lockNamespaces"), "{found}");
    assert_eq!(other.authorize(joiner(&red, false), beside, Some(&home)), Ok(()));
    assert_eq!(home.authorize(joiner(&red, false), primary, Some(&home)), Ok(()));
}

#[test]
fn the_verb_is_asked_for_only_where_it_is_required() {
    let red = labels("red");
    for (require_join, has_verb, refused) in [
        (false, false, None),
        (false, true, None),
        (true, true, None),
        (true, false, Some(AccessRule::RequireJoin)),
    ] {
        let access = Access {
            namespaces: Admitted::All,
            require_join,
            ..Access::default()
        };
        let found = network("net", access).authorize(joiner(&red, has_verb), Wish::default(), None);
        assert_eq!(refused_by(found), refused);
    }
}

#[test]
fn the_first_network_that_selects_a_namespace_is_its_primary_one() {
    let of = |name: &str, selector: Option<Selector>, default: bool| NetworkSpec {
        default,
        ..network(
            name,
            Access {
                primary_of: selector,
                ..Access::default()
            },
        )
    };
    let networks = [
        of("default", None, true),
        of("old", Some(tenant("red")), false),
        of("young", Some(tenant("red")), false),
    ];
    let name = |tenant: &str| primary_of(&networks, &labels(tenant)).map(|spec| spec.name.as_str());
    assert_eq!((name("red"), name("blue")), (Some("old"), Some("default")));
    assert_eq!(primary_of(&networks[1..], &labels("blue")), None);
}

#[test]
fn nobody_joins_what_an_earlier_agent_recorded() {
    let spec = network("net", Access::default());
    assert_eq!(
        refused_by(spec.admits("shop", &unknown_namespace("shop"))),
        Some(AccessRule::Namespaces)
    );
}
