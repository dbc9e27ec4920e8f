//! CHECK: compares the agent's record, the result of ADD and the kernel.

use kni_proto::{
    cni,
    kni::{QueryPodNetworkRequest, kni_client::KniClient},
    runtime::{ListInterfacesRequest, runtime_client::RuntimeClient},
};

use crate::{
    client::{Client, Failure, Patience},
    config::Config,
    environment::Environment,
    error::{CniError, ErrorCode},
    result::{CniResult, has_no_primary_interface},
};

pub(super) async fn run(client: Client<'_>, environment: &Environment, config: &Config) -> Result<(), CniError> {
    let Some(previous) = &config.prev_result else {
        let msg = "prevResult is missing, which CHECK needs";
        return Err(CniError::new(ErrorCode::InvalidConfig, msg));
    };
    let previous: CniResult = serde::Deserialize::deserialize(previous)
        .map_err(|error| CniError::new(ErrorCode::Decode, format!("prevResult: {error}")))?;
    let patience = Patience {
        connect: config.timeouts.check(),
        total: config.timeouts.check(),
    };
    let id = cni::sandbox_id(&environment.container, &environment.ifname);
    let query = |channel| {
        let request = client.request(QueryPodNetworkRequest {
            id: id.clone(),
            ..QueryPodNetworkRequest::default()
        });
        async move { KniClient::new(channel).query_pod_network(request).await }
    };
    let known = client
        .call(patience, query)
        .await
        .map_err(|failure| asked("QueryPodNetwork", failure))?;
    let now = CniResult::of_answer(&known.ipconfigs, &environment.ifname, &environment.netns, &config.dns);
    let requested = (!has_no_primary_interface(&known.extradata)).then_some(environment.ifname.as_str());
    let mut problems = compare(&previous, &now, requested);
    let list = |channel| {
        let request = client.request(ListInterfacesRequest {
            sandbox_id: id.clone(),
            ..ListInterfacesRequest::default()
        });
        async move { RuntimeClient::new(channel).list_interfaces(request).await }
    };
    let listed = client
        .call(patience, list)
        .await
        .map_err(|failure| asked("ListInterfaces", failure))?;
    for interface in listed.interfaces.into_iter().filter(|interface| !interface.healthy) {
        let of = |problem: String| format!("{}: {problem}", interface.ifname);
        problems.extend(interface.problems.iter().cloned().map(of));
    }
    match problems.split_first() {
        None => Ok(()),
        Some((first, rest)) => {
            let msg = format!("container {}: {first}", environment.container);
            Err(CniError::new(ErrorCode::CheckFailed, msg).details(rest.join("; ")))
        }
    }
}

fn asked(method: &str, failure: Failure) -> CniError {
    match failure {
        Failure::Refused(status) => CniError::refused(method, &status),
        Failure::Absent(reason) | Failure::Unanswered(reason) => CniError::new(ErrorCode::TryAgainLater, reason),
    }
}

/// Differences between the attached interfaces and the result of ADD. Later plugins of the list check their own
/// additions. A pod may have requested no primary interface.
fn compare(previous: &CniResult, now: &CniResult, requested: Option<&str>) -> Vec<String> {
    let inside = |result: &CniResult, name: &str| {
        let mut all = result.interfaces.iter();
        all.find(|interface| interface.name == name && !interface.sandbox.is_empty())
            .cloned()
    };
    if let Some(name) = requested.filter(|name| inside(now, name).is_none()) {
        return vec![format!("kni-agent has attached no interface {name}")];
    }
    let mut problems = Vec::new();
    for interface in now.interfaces.iter().filter(|interface| !interface.sandbox.is_empty()) {
        let name = &interface.name;
        let Some(then) = inside(previous, name) else {
            problems.push(format!("interface {name} is not in prevResult"));
            continue;
        };
        if !then.mac.is_empty() && then.mac != interface.mac {
            problems.push(format!(
                "interface {name} has MAC address {}, had {}",
                interface.mac, then.mac
            ));
        }
        let addresses = |result: &CniResult| {
            let mut list: Vec<String> = result.addresses_of(name).map(|ip| ip.cidr.clone()).collect();
            list.sort();
            list
        };
        if addresses(previous) != addresses(now) {
            let (then, now) = (addresses(previous).join(", "), addresses(now).join(", "));
            problems.push(format!("interface {name} has addresses [{now}], had [{then}]"));
        }
    }
    for route in now.routes.iter().filter(|route| !previous.routes.contains(route)) {
        problems.push(format!("the route to {} is not in prevResult", route.dst));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(edit: impl FnOnce(&mut serde_json::Value)) -> CniResult {
        let mut value = serde_json::json!({
            "interfaces": [{"name": "kni1"}, {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/n"}],
            "ips": [{"address": "10.0.0.2/32", "interface": 1}],
            "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}],
        });
        edit(&mut value);
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn equal_results_have_no_problem() {
        let now = result(|_| {});
        assert_eq!(compare(&now, &now, Some("eth0")), Vec::<String>::new());
        // An addition of another plugin.
        let more = result(|then| {
            then["interfaces"]
                .as_array_mut()
                .unwrap()
                .push(serde_json::json!({"name": "net9", "sandbox": "/n"}));
            then["routes"]
                .as_array_mut()
                .unwrap()
                .push(serde_json::json!({"dst": "10.9.0.0/16"}));
        });
        assert_eq!(compare(&more, &now, Some("eth0")), Vec::<String>::new());
    }

    #[test]
    fn each_difference_is_named() {
        let now = result(|_| {});
        for (then, part) in [
            (
                result(|r| r["interfaces"][1]["name"] = "eth1".into()),
                "eth0 is not in prevResult",
            ),
            (
                result(|r| r["interfaces"][1]["mac"] = "02:00:00:00:00:02".into()),
                "had 02:00:00:00:00:02",
            ),
            (
                result(|r| r["ips"][0]["address"] = "10.0.0.3/32".into()),
                "had [10.0.0.3/32]",
            ),
            (result(|r| r["ips"] = serde_json::json!([])), "had []"),
            (result(|r| r["routes"] = serde_json::json!([])), "route to 0.0.0.0/0"),
        ] {
            let problems = compare(&then, &now, Some("eth0"));
            assert!(
                problems.iter().any(|problem| problem.contains(part)),
                "{part}: {problems:?}"
            );
        }
        assert_eq!(compare(&now, &CniResult::default(), None), Vec::<String>::new());
        assert_eq!(
            compare(&now, &CniResult::default(), Some("eth0")),
            ["kni-agent has attached no interface eth0"]
        );
    }
}
