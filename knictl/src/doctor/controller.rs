//! Checks that a replica of kni-controller acts, and that others can take over. Pure.

use k8s_openapi::{
    api::{apps::v1::Deployment, coordination::v1::Lease},
    jiff::Timestamp,
};

use super::Finding;

/// Name of the Deployment and of its Lease.
pub(crate) const NAME: &str = "kni-controller";
/// A Lease that was not renewed for this long is abandoned, in seconds: its duration is 15, the rest is for clocks that
/// differ.
const ABANDONED: i64 = 60;

/// The replica that holds the Lease.
pub(super) fn holder(lease: Option<&Lease>) -> Option<&str> {
    let holder = lease?.spec.as_ref()?.holder_identity.as_deref()?;
    (!holder.is_empty()).then_some(holder)
}

/// What is wrong with the Lease and the Deployment, at `now`.
pub(super) fn acts(deployment: Option<&Deployment>, lease: Option<&Lease>, now: Timestamp) -> Vec<Finding> {
    let mut findings = Vec::new();
    let problem = abandoned(lease, now);
    if let Some(problem) = &problem {
        let remedy = "kubectl -n kni-system logs deployment/kni-controller --all-pods; meanwhile pods are attached, and \
                      status, taints and owners of egress addresses stay as they are";
        findings.push(Finding::failure(format!("lease {NAME}"), problem, remedy));
    }
    let object = format!("deployment {NAME}");
    let Some(deployment) = deployment else {
        let remedy = "kubectl apply -k deploy/, or helm upgrade";
        findings.push(if problem.is_some() {
            Finding::failure(object, "it does not exist", remedy)
        } else {
            Finding::warning(object, "it does not exist: what holds the Lease runs elsewhere", remedy)
        });
        return findings;
    };
    let desired = deployment.spec.replicas.unwrap_or(1);
    let available = deployment
        .status
        .as_ref()
        .and_then(|status| status.available_replicas)
        .unwrap_or(0);
    if desired == 0 {
        findings.push(Finding::warning(
            object,
            "it has no replicas",
            format!("kubectl -n kni-system scale deployment/{NAME} --replicas=2"),
        ));
    } else if available < desired {
        findings.push(Finding::warning(
            object,
            format!("{available} of {desired} replicas are available"),
            format!("kubectl -n kni-system describe pods -l app.kubernetes.io/name={NAME}"),
        ));
    }
    findings
}

/// Why no replica acts.
fn abandoned(lease: Option<&Lease>, now: Timestamp) -> Option<String> {
    let Some(lease) = lease else {
        return Some("it does not exist: no replica has ever acted".to_owned());
    };
    let Some(holder) = holder(Some(lease)) else {
        return Some("no replica holds it".to_owned());
    };
    let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.as_ref());
    let Some(renewed) = renewed else {
        return Some(format!("{holder} holds it, and has never renewed it"));
    };
    let age = now.as_second() - renewed.0.as_second();
    (age > ABANDONED).then(|| format!("its holder {holder} has not renewed it for {age} s"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::doctor::Severity;

    fn lease(spec: &Value) -> Lease {
        serde_json::from_value(json!({"metadata": {"name": NAME}, "spec": spec})).unwrap()
    }

    fn deployment(replicas: i32, available: i32) -> Deployment {
        let object = json!({
            "metadata": {"name": NAME},
            "spec": {"replicas": replicas, "selector": {}, "template": {}},
            "status": {"availableReplicas": available},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_lease_is_held_and_renewed() {
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        let at = |minute: u8, second: u8| json!({"holderIdentity": "a_1", "renewTime": format!("2026-01-01T00:{minute:02}:{second:02}.000000Z")});
        let problem = |lease: Option<Lease>| {
            let findings = acts(Some(&deployment(2, 2)), lease.as_ref(), now);
            findings.first().map(|finding| finding.problem.clone())
        };
        assert_eq!(problem(Some(lease(&at(9, 50)))), None);
        assert_eq!(problem(Some(lease(&at(11, 0)))), None, "the other clock is ahead");
        assert_eq!(
            problem(Some(lease(&at(8, 0)))).unwrap(),
            "its holder a_1 has not renewed it for 120 s"
        );
        assert_eq!(
            problem(Some(lease(&json!({"holderIdentity": ""})))).unwrap(),
            "no replica holds it"
        );
        assert!(problem(None).unwrap().contains("does not exist"));
        assert_eq!(holder(Some(&lease(&at(9, 50)))), Some("a_1"));
    }

    #[test]
    fn replicas_that_are_missing_are_counted() {
        let now = Timestamp::UNIX_EPOCH;
        let held = lease(&json!({"holderIdentity": "a_1", "renewTime": "1970-01-01T00:00:00.000000Z"}));
        let found = |deployment: Option<Deployment>| acts(deployment.as_ref(), Some(&held), now);
        assert_eq!(found(Some(deployment(2, 2))), []);
        assert_eq!(
            found(Some(deployment(2, 1)))[0].problem,
            "1 of 2 replicas are available"
        );
        assert_eq!(found(Some(deployment(0, 0)))[0].problem, "it has no replicas");
        assert_eq!(found(None)[0].severity, Severity::Warning);
        assert_eq!(acts(None, None, now)[1].severity, Severity::Failure);
    }
}
