//! Reads which addresses the cluster lists for pods of this node, before the node reports anything itself.

use std::net::IpAddr;

use kni_cluster::Tables;
use kni_model::{NetworkName, PodRef};

use super::Cluster;

impl Cluster {
    /// Lets addresses rest that a report of this node, or of an earlier node of its name, still lists: other nodes take
    /// them for the pods of before a reboot until the report is written again. For the start, before the first attach.
    pub fn rest_reported(&self) {
        let reported = reported(&self.objects.cache.tables(), &self.objects.node);
        match self.attacher.rest_reported(reported) {
            Ok(0) => {}
            Ok(count) => tracing::info!(
                count,
                "addresses of pods of before a reboot rest until other nodes know"
            ),
            Err(error) => tracing::warn!(%error, "cannot record the addresses of pods of before a reboot"),
        }
    }
}

fn reported(tables: &Tables, node: &str) -> Vec<(NetworkName, IpAddr, PodRef)> {
    let reports = tables.own_members.rows().values().map(|report| &report.spec);
    let mut reported = Vec::new();
    for report in reports.filter(|report| report.node_name == node) {
        let Ok(network) = report.network.parse::<NetworkName>() else {
            continue;
        };
        for member in &report.members {
            let pod = PodRef {
                namespace: member.namespace.clone(),
                name: member.pod_name.clone(),
                uid: member.pod_uid.clone(),
            };
            let addresses = member.addresses.iter().filter_map(|text| text.parse().ok());
            reported.extend(addresses.map(|address| (network.clone(), address, pod.clone())));
        }
    }
    reported
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::Key;
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_of_earlier_nodes_of_the_name_count_and_those_of_others_do_not() {
        let mut tables = Tables::default();
        for (node, uid, address) in [
            ("n1", "b", "10.0.0.2"),
            ("n1", "a", "10.0.0.3"),
            ("n2", "c", "10.0.0.66"),
        ] {
            let name = format!("red.{uid}.0");
            let report = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": name },
                "spec": {
                    "network": "red", "networkUID": "r", "nodeName": node, "nodeUID": uid,
                    "members": [{
                        "namespace": "shop", "podName": "web", "podUID": uid, "interface": "eth0",
                        "addresses": [address, "fd00::2"],
                    }],
                },
            });
            let report = Arc::new(serde_json::from_value(report).unwrap());
            tables.own_members.put(Key::new("", &name), Some(report));
        }
        let reported = reported(&tables, "n1");
        let addresses: Vec<String> = reported.iter().map(|(_, address, _)| address.to_string()).collect();
        assert_eq!(addresses, ["10.0.0.3", "fd00::2", "10.0.0.2", "fd00::2"]);
    }
}
