//! Decides in which network the pods of a namespace have their primary interface. Pure; the only place of the rule.

use super::{
    NetworkName,
    policy::{Labels, Selector},
};

/// The label by which a namespace states its network. It grants nothing: pods of the namespace are not attached by
/// default unless this network selects the namespace.
pub const HOME_LABEL: &str = "kni.dev/network";

/// The namespaces whose pods have their primary interface in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selects {
    /// Those that the selector selects; without one none.
    Namespaces(Option<Selector>),
    /// The selector cannot be read, for this reason: any namespace may be among them.
    Unclear(String),
}

impl Selects {
    /// Whether it has, or may have, namespaces.
    pub const fn is_any(&self) -> bool {
        !matches!(self, Self::Namespaces(None))
    }
}

/// A network that may be the one of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The name of its object.
    pub name: String,
    /// Whether it is the cluster's default network.
    pub default: bool,
    /// Its namespaces.
    pub selects: Selects,
    /// The network, or why no pod can join it: it is not valid.
    pub network: Result<NetworkName, String>,
}

/// Where pods of a namespace have their primary interface unless they name another network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Home {
    /// In this network, which selects the namespace.
    Network(NetworkName),
    /// In the cluster's default network.
    Default,
    /// That cannot be decided, for this reason, which names the namespace and the network. The namespace may belong to
    /// a network that locks it, so no pod of it gets a primary interface.
    Unknown(String),
}

impl Home {
    /// The network that selects the namespace.
    pub const fn network(&self) -> Option<&NetworkName> {
        match self {
            Self::Network(name) => Some(name),
            Self::Default | Self::Unknown(_) => None,
        }
    }
}

/// The home of a namespace with these labels. `candidates` are in the order of their age: the first that selects the
/// namespace counts.
///
/// A network that is not valid has its namespaces all the same. One whose selector cannot be read has every namespace
/// that no other network selects and that does not state its network by [`HOME_LABEL`].
pub fn home(candidates: &[Candidate], namespace: &str, labels: &Labels) -> Home {
    let named = |name: &str| candidates.iter().find(|candidate| candidate.name == name);
    let selecting = candidates.iter().find(|candidate| candidate.selects(labels));
    let stated = labels.get(HOME_LABEL).map(String::as_str);
    let unknown = |network: &str, reason: &str| {
        let stated = match stated {
            Some(stated) => format!(" with label {HOME_LABEL}={stated}"),
            None => String::new(),
        };
        Home::Unknown(format!(
            "the network of namespace {namespace}{stated} is not known: network {network} {reason}"
        ))
    };
    let joined = |candidate: &Candidate| match &candidate.network {
        Ok(network) => Home::Network(network.clone()),
        Err(reason) => unknown(&candidate.name, &format!("selects it, but is not valid: {reason}")),
    };
    match (stated, selecting) {
        (Some(stated), Some(found)) if found.name != stated => unknown(&found.name, "selects it"),
        (_, Some(found)) => joined(found),
        (Some(stated), None) => match named(stated) {
            None => unknown(stated, "does not exist"),
            Some(Candidate {
                network: Err(reason), ..
            }) => unknown(stated, &format!("is not valid: {reason}")),
            Some(Candidate { default: true, .. }) => Home::Default,
            Some(Candidate {
                selects: Selects::Unclear(reason),
                ..
            }) => unknown(stated, &unclear(reason)),
            Some(_) => unknown(stated, "does not select it (spec.namespaceSelector)"),
        },
        (None, None) => {
            let mut reasons = candidates.iter().filter_map(|candidate| match &candidate.selects {
                Selects::Unclear(reason) => Some(unknown(&candidate.name, &unclear(reason))),
                Selects::Namespaces(_) => None,
            });
            reasons.next().unwrap_or(Home::Default)
        }
    }
}

fn unclear(reason: &str) -> String {
    format!("may select it, as its spec.namespaceSelector cannot be read: {reason}")
}

impl Candidate {
    fn selects(&self, namespace: &Labels) -> bool {
        match &self.selects {
            Selects::Namespaces(selector) => selector.as_ref().is_some_and(|selector| selector.matches(namespace)),
            Selects::Unclear(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Operator, Requirement};

    fn selecting(tenant: &str) -> Selects {
        Selects::Namespaces(Some(Selector {
            requirements: vec![Requirement {
                key: "tenant".to_owned(),
                operator: Operator::In([tenant.to_owned()].into()),
            }],
        }))
    }

    fn candidate(name: &str, selects: Selects) -> Candidate {
        Candidate {
            name: name.to_owned(),
            default: name == "default",
            selects,
            network: Ok(name.parse().unwrap()),
        }
    }

    fn labels(labels: &[(&str, &str)]) -> Labels {
        labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    /// The network of a namespace, or the reason why it is not known.
    fn of(candidates: &[Candidate], namespace: &[(&str, &str)]) -> Result<String, String> {
        match home(candidates, "shop", &labels(namespace)) {
            Home::Network(name) => Ok(name.to_string()),
            Home::Default => Ok("default".to_owned()),
            Home::Unknown(reason) => Err(reason),
        }
    }

    fn refusal(candidates: &[Candidate], namespace: &[(&str, &str)], expected: &[&str]) {
        let reason = of(candidates, namespace).unwrap_err();
        for part in ["namespace shop"].iter().chain(expected) {
            assert!(reason.contains(part), "{part:?} is missing in {reason:?}");
        }
    }

    fn default() -> Candidate {
        candidate("default", Selects::Namespaces(None))
    }

    #[test]
    fn the_oldest_network_that_selects_a_namespace_has_it() {
        let all = [
            default(),
            candidate("old", selecting("a")),
            candidate("young", selecting("a")),
        ];
        assert_eq!(of(&all, &[("tenant", "a")]).as_deref(), Ok("old"));
        assert_eq!(of(&all, &[("tenant", "b")]).as_deref(), Ok("default"));
        assert_eq!(of(&all, &[]).as_deref(), Ok("default"));
    }

    #[test]
    fn a_network_that_is_not_valid_closes_its_namespaces_and_no_others() {
        let mut invalid = candidate("blue", selecting("a"));
        invalid.network = Err("spec.subnets[0]: has host bits".to_owned());
        let all = [default(), invalid, candidate("young", selecting("a"))];
        refusal(
            &all,
            &[("tenant", "a")],
            &["network blue", "spec.subnets[0]: has host bits"],
        );
        assert_eq!(of(&all, &[("tenant", "b")]).as_deref(), Ok("default"));
    }

    #[test]
    fn a_selector_that_cannot_be_read_closes_what_nothing_else_decides() {
        let unclear = candidate("blue", Selects::Unclear("unknown field matchAll".to_owned()));
        let all = [unclear, default(), candidate("red", selecting("a"))];
        refusal(&all, &[], &["network blue", "unknown field matchAll"]);
        assert_eq!(of(&all, &[("tenant", "a")]).as_deref(), Ok("red"), "it is selected");
        assert_eq!(
            of(&all, &[(HOME_LABEL, "default")]).as_deref(),
            Ok("default"),
            "it states its network"
        );
    }

    #[test]
    fn a_namespace_that_states_its_network_waits_for_it() {
        let blue = candidate("blue", selecting("a"));
        let stated = [("tenant", "a"), (HOME_LABEL, "blue")];
        refusal(
            &[default()],
            &stated,
            &["network blue does not exist", "kni.dev/network=blue"],
        );
        assert_eq!(of(&[default(), blue.clone()], &stated).as_deref(), Ok("blue"));
        refusal(
            &[default(), blue.clone()],
            &[(HOME_LABEL, "blue")],
            &["network blue does not select it"],
        );
        let other = candidate("red", selecting("a"));
        refusal(
            &[other, blue.clone()],
            &stated,
            &["network red selects it", "kni.dev/network=blue"],
        );
        let mut invalid = candidate("blue", selecting("b"));
        invalid.network = Err("spec.mtu: too small".to_owned());
        refusal(&[default(), invalid], &stated, &["network blue", "spec.mtu: too small"]);
        refusal(
            &[default(), blue],
            &[("tenant", "a"), (HOME_LABEL, "default")],
            &["network blue selects it"],
        );
    }
}
