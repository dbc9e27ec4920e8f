//! Writes the annotation `k8s.v1.cni.cncf.io/network-status` of the node's pods: every interface, in the format of the
//! Network Plumbing Working Group ("Kubernetes Network Custom Resource Definition De-facto Standard", 1.3, section
//! 3.4).

use std::collections::BTreeMap;

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kni_cluster::Key;
use kni_model::view::InterfaceView;
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
        let mut of_pods: BTreeMap<(&str, &str), Vec<&InterfaceView>> = BTreeMap::new();
        for view in views {
            let pod = &view.sandbox.pod;
            of_pods.entry((&pod.namespace, &pod.name)).or_default().push(view);
        }
        let mut writes = BTreeMap::new();
        {
            let tables = self.cache.tables();
            for ((namespace, name), views) in of_pods {
                let Some(pod) = tables.pods.get(namespace, name).filter(|pod| pod.node == self.node) else {
                    continue;
                };
                let text = text(views);
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

/// The interfaces of a pod, the primary one first, then by name.
fn text(mut views: Vec<&InterfaceView>) -> String {
    views.sort_by_key(|view| (!view.sandbox.is_primary(), view.attachment.ifname.clone()));
    let all: Vec<NetworkStatus<'_>> = views.into_iter().map(element).collect();
    serde_json::to_string(&all).unwrap_or_default()
}

fn element(view: &InterfaceView) -> NetworkStatus<'_> {
    let attachment = &view.attachment;
    NetworkStatus {
        name: attachment.network.as_str(),
        interface: attachment.ifname.as_str(),
        ips: attachment.addresses().map(|ip| ip.to_string()).collect(),
        mac: attachment.mac.to_string(),
        mtu: attachment.mtu,
        default: attachment.default_route,
        dns: Empty {},
        gateway: attachment.gateways().iter().map(ToString::to_string).collect(),
    }
}
