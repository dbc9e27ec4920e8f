//! Resolves numbers to names with the data of the attach service and the policies.

use std::{net::IpAddr, sync::Arc};

use kni_common::event::PolicyTrail;
use kni_enforcement::Enforcer;
use kni_fabric::Fabric;
use kni_flows::{Naming, RemotePod, RemotePods};
use kni_model::{
    Attachment, EndpointId, Network, NetworkId, NetworkName, Sandbox, flow_view::TrailView, policy::PolicyDirection,
    view::Owner,
};
use kni_pods::Pods;

pub(super) struct Names {
    pub(super) attacher: Pods,
    pub(super) sync: Arc<Enforcer>,
    pub(super) fabric: Arc<Fabric>,
    pub(super) remote_pods: Arc<RemotePods>,
    /// Name of the node, empty where it has none.
    pub(super) node: String,
}

impl Naming for Names {
    fn owner(&self, endpoint: EndpointId) -> Option<Owner> {
        self.attacher.owner(endpoint)
    }

    fn endpoint_at(&self, network: NetworkId, address: IpAddr) -> Option<EndpointId> {
        self.attacher.endpoint_at(network, address)
    }

    fn network_name(&self, network: NetworkId) -> Option<NetworkName> {
        self.attacher.network_name(network)
    }

    fn service_name(&self, service: u32) -> Option<String> {
        self.sync.service_name(service)
    }

    fn trail(&self, trail: &PolicyTrail, direction: PolicyDirection, allowed: bool) -> Option<TrailView> {
        self.sync.trail(trail, direction, allowed)
    }

    fn refusal_of(&self, namespace: &str, name: &str) -> Option<String> {
        self.attacher.refusal_of(namespace, name)
    }

    fn sandbox_of(&self, namespace: &str, name: &str) -> Option<Arc<Sandbox>> {
        self.attacher.sandbox_of(namespace, name)
    }

    fn attachment(&self, endpoint: EndpointId) -> Option<(Arc<Sandbox>, Attachment)> {
        self.attacher.attachment(endpoint)
    }

    fn networks(&self) -> Vec<Network> {
        self.attacher.networks().into_iter().map(|view| view.network).collect()
    }

    fn remote_at(&self, network: NetworkId, address: IpAddr) -> Option<Arc<RemotePod>> {
        self.remote_pods.at(network, address)
    }

    fn remote_pod(&self, namespace: &str, name: &str) -> Vec<Arc<RemotePod>> {
        self.remote_pods.of_pod(namespace, name)
    }

    fn node_at(&self, network: Option<NetworkId>, address: IpAddr) -> Option<String> {
        // A network may use the addresses of nodes for its pods.
        let is_inside = |network| self.attacher.is_inside(network, address);
        let name = self.fabric.node_at(address)?;
        (!network.is_some_and(is_inside)).then_some(name)
    }

    fn own_node(&self) -> String {
        self.node.clone()
    }
}
