//! Writes the annotation `k8s.v1.cni.cncf.io/network-status` of the node's pods: every interface, in the format of the
//! Network Plumbing Working Group ("Kubernetes Network Custom Resource Definition De-facto Standard", 1.3, section
//! 3.4).

use std::collections::BTreeMap;

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kni_cluster::Key;
use kni_crd::PodFacts;
use kni_model::{NetworkName, selection::PRIMARY_IFNAME, view::InterfaceView};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde::Serialize;

use super::{ObjectControllers, retry::Retries};

/// The annotation.
pub(super) const ANNOTATION: &str = "k8s.v1.cni.cncf.io/network-status";
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;

/// One element of the annotation.
#[derive(Debug, Serialize)]
struct NetworkStatus<'a> {
    name: &'a str,
    interface: &'a str,
    ips: Vec<String>,
    mac: String,
    mtu: u32,
    default: bool,
    dns: Empty,
    gateway: Vec<String>,
}

/// DNS settings; empty, because the agent does not manage name servers.
#[derive(Debug, Serialize)]
struct Empty {}

impl ObjectControllers {
    /// Writes the annotation where it is out of date.
    pub(super) async fn write_network_status(&self, views: &[InterfaceView], retries: &mut Retries<Key>) {
        let mut writes = BTreeMap::new();
        {
            let tables = self.cache.tables();
            let networks = self.networks(&tables);
            let mut of_pods: BTreeMap<(&str, &str), (&PodFacts, Vec<&InterfaceView>)> = BTreeMap::new();
            for view in views {
                let meant = &view.sandbox.pod;
                if let Some(pod) = tables.pod_of(&self.node, meant) {
                    let of_pod = of_pods.entry((&meant.namespace, &meant.name));
                    of_pod.or_insert_with(|| (pod, Vec::new())).1.push(view);
                }
            }
            for ((namespace, name), (pod, views)) in of_pods {
                let text = text(views, networks.default_network());
                if pod.annotations.get(ANNOTATION) != Some(&text) {
                    writes.insert(Key::new(namespace, name), (pod.uid.clone(), text));
                }
            }
        }
        retries.retain(|key| writes.contains_key(key));
        let due = writes.into_iter().filter(|(key, _)| retries.is_due(key));
        let due: Vec<_> = due.map(|(key, write)| self.annotate(key, write)).collect();
        let mut done = stream::iter(due).buffer_unordered(AT_ONCE);
        while let Some((key, succeeded)) = done.next().await {
            retries.ended(key, succeeded);
        }
    }

    /// Returns the pod and whether it was written.
    async fn annotate(&self, key: Key, (uid, text): (String, String)) -> (Key, bool) {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        // With the uid, the write fails for another pod of the same name.
        let patch = serde_json::json!({"metadata": {"uid": uid, "annotations": {ANNOTATION: text}}});
        let params = PatchParams {
            field_manager: Some(super::interfaces::FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        // The account may change annotations by way of the status only: neither labels nor the specification.
        let written = api.patch_status(&key.name, &params, &Patch::Merge(&patch)).await;
        if let Err(error) = &written {
            tracing::debug!(pod = %key, %error, "cannot write the pod's network status; trying again if it still exists");
        }
        (key, written.is_ok())
    }
}

/// The interfaces of a pod, the primary one first, then by name. The first one in the cluster's default network, and no
/// other, is `default`.
fn text(mut views: Vec<&InterfaceView>, default: Option<&NetworkName>) -> String {
    let is_primary =
        |view: &InterfaceView| view.sandbox.is_primary() && view.attachment.ifname.as_str() == PRIMARY_IFNAME;
    views.sort_by_key(|view| (!is_primary(view), view.attachment.ifname.clone()));
    let default = views.iter().position(|view| Some(&view.attachment.network) == default);
    let all = views.into_iter().enumerate();
    let all: Vec<NetworkStatus<'_>> = all.map(|(index, view)| element(view, Some(index) == default)).collect();
    serde_json::to_string(&all).unwrap_or_default()
}

fn element(view: &InterfaceView, default: bool) -> NetworkStatus<'_> {
    let attachment = &view.attachment;
    NetworkStatus {
        // Other tools find the interface by the definition that the pod has named.
        name: attachment.definition.as_deref().unwrap_or(attachment.network.as_str()),
        interface: attachment.ifname.as_str(),
        ips: attachment.addresses().map(|ip| ip.to_string()).collect(),
        mac: attachment.mac.to_string(),
        mtu: attachment.mtu,
        default,
        dns: Empty {},
        gateway: attachment.gateways().iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_model::{
        Attachment, Bandwidth, EndpointId, InterfaceKind, MacAddr, NetnsIdentity, NetworkId, Phase, PodRef, Sandbox,
        view::EndpointCounts,
    };
    use serde_json::Value;

    use super::*;

    fn attachment(ifname: &str, network: &str, definition: Option<&str>, default_route: bool) -> Attachment {
        Attachment {
            endpoint: EndpointId(1),
            network: network.parse().unwrap(),
            definition: definition.map(str::to_owned),
            network_id: NetworkId::try_from(1).unwrap(),
            ifname: ifname.parse().unwrap(),
            ifindex: 2,
            host_ifname: "kni1".parse().unwrap(),
            host_ifindex: 3,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            ipv4: None,
            ipv6: None,
            mtu: 1500,
            default_route,
            host_access: false,
            routes: Vec::new(),
            xdp: false,
            kind: InterfaceKind::Veth,
            bandwidth: Bandwidth::default(),
        }
    }

    /// Interface, name and `default` of each entry.
    fn entries(attachments: Vec<Attachment>) -> Vec<(String, String, bool)> {
        let sandbox = Arc::new(Sandbox {
            id: "s".parse().unwrap(),
            pod: PodRef::default(),
            phase: Phase::Ready,
            netns: "/run/netns/x".into(),
            netns_identity: NetnsIdentity { dev: 4, inode: 1 },
            labels: BTreeMap::new(),
            port_mappings: Vec::new(),
            container_ports: Vec::new(),
            attachments: attachments.clone(),
            cni: None,
            parent: None,
        });
        let view = |attachment| InterfaceView {
            sandbox: Arc::clone(&sandbox),
            attachment,
            programs: Vec::new(),
            provisional: false,
            counts: EndpointCounts::default(),
            problems: Vec::new(),
        };
        let views: Vec<InterfaceView> = attachments.into_iter().map(view).collect();
        let written = text(views.iter().collect(), "default".parse().ok().as_ref());
        let list: Vec<Value> = serde_json::from_str(&written).unwrap();
        let of = |entry: &Value, field: &str| entry[field].as_str().unwrap().to_owned();
        let listed = list.iter();
        listed
            .map(|entry| {
                (
                    of(entry, "interface"),
                    of(entry, "name"),
                    entry["default"].as_bool().unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn the_primary_interface_is_first_and_default_means_the_default_network() {
        let found = entries(vec![
            attachment("data0", "blue", None, true),
            attachment("eth0", "default", None, false),
            attachment("net2", "default", None, false),
        ]);
        let expected = [
            ("eth0", "default", true),
            ("data0", "blue", false),
            ("net2", "default", false),
        ];
        assert_eq!(
            found,
            expected.map(|(ifname, name, default)| (ifname.to_owned(), name.to_owned(), default))
        );
    }

    #[test]
    fn an_interface_has_the_name_of_the_definition_that_the_pod_named() {
        let found = entries(vec![
            attachment("eth0", "red", Some("shop/primary"), true),
            attachment("net1", "blue", Some("storage/fast"), false),
            attachment("net2", "blue", None, false),
        ]);
        let names: Vec<&str> = found.iter().map(|(_, name, _)| name.as_str()).collect();
        assert_eq!(names, ["shop/primary", "storage/fast", "blue"]);
    }
}
