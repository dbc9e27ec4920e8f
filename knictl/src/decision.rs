//! Renders the decisions of policies as text.

use kni_proto::runtime::{Policy, PolicyDecision, Rule};

/// The deciding policy and rule, and the decision; empty when no policy was consulted. Not escaped.
pub(crate) fn text(decision: Option<&PolicyDecision>) -> String {
    let Some(PolicyDecision {
        allowed,
        rule: decided,
        isolating,
    }) = decision
    else {
        return String::new();
    };
    let word = if *allowed { "allowed" } else { "denied" };
    match decided {
        Some(decided) => format!("{word} by {}", rule(decided)),
        None if isolating.is_empty() => format!("{word}: no policy isolates the pod"),
        None if *allowed => format!("allowed: no rule of {} denies it", policies(isolating)),
        None => format!("denied: {} isolates the pod and no rule allows it", policies(isolating)),
    }
}

/// `NetworkPolicy shop/web ingress[0]`.
pub(crate) fn rule(rule: &Rule) -> String {
    let policies: String = rule.policy.iter().map(policy).collect();
    format!("{policies} {}[{}]", rule.direction, rule.index)
}

/// `NetworkPolicy shop/web, NetworkPolicy shop/all`.
pub(crate) fn policies(policies: &[Policy]) -> String {
    policies.iter().map(policy).collect::<Vec<_>>().join(", ")
}

fn policy(policy: &Policy) -> String {
    format!("{} {}/{}", policy.kind, policy.namespace, policy.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(name: &str) -> Policy {
        Policy {
            kind: "NetworkPolicy".to_owned(),
            namespace: "shop".to_owned(),
            name: name.to_owned(),
        }
    }

    #[test]
    fn decisions_name_what_decided() {
        let rule = Rule {
            policy: Some(policy("web")),
            direction: "ingress".to_owned(),
            index: 3,
        };
        let said = |allowed, rule, isolating: &[&str]| {
            let isolating = isolating.iter().map(|name| policy(name)).collect();
            text(Some(&PolicyDecision {
                allowed,
                isolating,
                rule,
            }))
        };
        assert_eq!(text(None), "");
        assert_eq!(
            said(true, Some(rule.clone()), &["web"]),
            "allowed by NetworkPolicy shop/web ingress[3]"
        );
        assert_eq!(
            said(false, Some(rule), &[]),
            "denied by NetworkPolicy shop/web ingress[3]"
        );
        assert_eq!(said(true, None, &[]), "allowed: no policy isolates the pod");
        assert_eq!(
            said(true, None, &["a"]),
            "allowed: no rule of NetworkPolicy shop/a denies it"
        );
        assert_eq!(
            said(false, None, &["a", "b"]),
            "denied: NetworkPolicy shop/a, NetworkPolicy shop/b isolates the pod and no rule allows it"
        );
    }
}
