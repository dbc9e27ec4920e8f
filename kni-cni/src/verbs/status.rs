//! STATUS: reports whether the node serves the network that pods join.

use kni_proto::kni::{Network, QueryNodeNetworksRequest, kni_client::KniClient};

use crate::{
    client::{Client, Patience},
    config::Config,
    error::{CniError, ErrorCode},
};

pub(super) async fn run(client: Client<'_>, config: &Config) -> Result<(), CniError> {
    let unavailable = |reason: String| CniError::new(ErrorCode::NotAvailable, reason);
    // The runtime asks again soon, so the timeouts are short.
    let patience = Patience {
        connect: config.timeouts.status() / 2,
        total: config.timeouts.status(),
    };
    let networks = |channel| {
        let request = client.request(QueryNodeNetworksRequest {});
        async move { KniClient::new(channel).query_node_networks(request).await }
    };
    let networks = client
        .call(patience, networks)
        .await
        .map_err(|failure| unavailable(failure.reason()))?;
    check(&networks.networks, config.network.as_deref()).map_err(unavailable)
}

/// Checks that the node serves the network that pods join. A network without addresses is served: the runtime would
/// make the node not ready, and Kubernetes would evict its pods, which are healthy. ADD reports the shortage.
fn check(networks: &[Network], wanted: Option<&str>) -> Result<(), String> {
    let is = |network: &&Network, key: &str| network.extradata.get(key).is_some_and(|value| value == "true");
    let found = match wanted {
        Some(name) => networks.iter().find(|network| network.name == name),
        None => networks.iter().find(|network| is(network, "default")),
    };
    let Some(network) = found else {
        return Err(wanted.map_or_else(
            || "no network is the default one (a PodNetwork with spec.default: true)".to_owned(),
            |name| format!("network {name} does not exist"),
        ));
    };
    let about = |key: &str| network.extradata.get(key).map(String::as_str).unwrap_or_default();
    if !network.ready {
        return Err(format!("network {} is not ready: {}", network.name, about("reason")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(name: &str, ready: bool, about: &[(&str, &str)]) -> Network {
        Network {
            name: name.to_owned(),
            ready,
            extradata: about.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        }
    }

    #[test]
    fn the_network_that_pods_join_decides() {
        let main = network("main", true, &[("default", "true")]);
        let blue = network("blue", false, &[("default", "false"), ("reason", "disabled")]);
        let full = network(
            "full",
            true,
            &[
                ("addresses_exhausted", "IPv4"),
                ("addresses_used", "5"),
                ("addresses_total", "5"),
            ],
        );
        let all = [main, blue, full];
        assert_eq!(check(&all, None), Ok(()));
        assert_eq!(check(&all, Some("main")), Ok(()));
        assert_eq!(
            check(&all, Some("blue")),
            Err("network blue is not ready: disabled".to_owned())
        );
        assert_eq!(check(&all, Some("full")), Ok(()), "its pods are healthy");
        assert_eq!(check(&all, Some("red")), Err("network red does not exist".to_owned()));
        assert!(
            check(&all[1..], None)
                .unwrap_err()
                .contains("no network is the default one")
        );
    }
}
