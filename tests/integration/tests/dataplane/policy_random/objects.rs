//! Converts a world of the oracle to the agent's types, with policies parsed by the agent from the API objects.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Context as _, Result};
use kni_crd::{FromObject as _, v1beta2};
use kni_integration::oracle::{self, Pod, Protocol, World};
use kni_model::{
    EndpointId, NetworkId, PodRef,
    policy::{ContainerPort, Policy, PolicyInterface, PolicyPod},
};
use serde_json::json;

use super::generate::NETWORKS;

/// The number of a network.
pub(crate) fn number_of(network: &str) -> u32 {
    let index = NETWORKS.iter().position(|name| *name == network);
    u32::try_from(index.expect("a network of the generator")).expect("one of two") + 1
}

/// IANA number.
pub(crate) fn iana(protocol: Protocol, v4: bool) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
        Protocol::Icmp if v4 => 1,
        Protocol::Icmp => 58,
    }
}

/// The endpoint numbers by pod and interface, from 1. Pods of other nodes have none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Numbers {
    by_address: BTreeMap<(String, IpAddr), EndpointId>,
}

impl Numbers {
    /// Assigns a number to every interface of the pods that are not `remote`.
    pub(crate) fn of(world: &World, remote: &[bool]) -> Self {
        let mut numbers = Self::default();
        let mut next = 1;
        for (pod, remote) in world.pods.iter().zip(remote) {
            for interface in pod.interfaces.iter().filter(|_| !remote) {
                for address in &interface.addresses {
                    numbers
                        .by_address
                        .insert((interface.network.clone(), *address), EndpointId(next));
                }
                next += 1;
            }
        }
        numbers
    }

    /// The endpoint with an address.
    pub(crate) fn endpoint(&self, network: &str, address: IpAddr) -> Option<EndpointId> {
        self.by_address.get(&(network.to_owned(), address)).copied()
    }

    /// The pods as the engine's inputs.
    pub(crate) fn pods(&self, world: &World) -> Result<Vec<PolicyPod>> {
        world.pods.iter().map(|pod| self.pod(pod)).collect()
    }

    fn pod(&self, pod: &Pod) -> Result<PolicyPod> {
        let mut interfaces = Vec::new();
        for (index, interface) in pod.interfaces.iter().enumerate() {
            let first = interface.addresses.first().context("an address")?;
            interfaces.push(PolicyInterface {
                endpoint: self.endpoint(&interface.network, *first),
                ifname: format!("eth{index}").parse()?,
                network: interface.network.parse()?,
                definition: None,
                network_id: NetworkId::try_from(number_of(&interface.network))?,
                primary: interface.primary,
                ipv4: interface.addresses.iter().find_map(|ip| match ip {
                    IpAddr::V4(v4) => Some(*v4),
                    IpAddr::V6(_) => None,
                }),
                ipv6: interface.addresses.iter().find_map(|ip| match ip {
                    IpAddr::V4(_) => None,
                    IpAddr::V6(v6) => Some(*v6),
                }),
            });
        }
        let port = |port: &oracle::NamedPort| ContainerPort {
            name: port.name.clone(),
            protocol: iana(port.protocol, true),
            port: port.port,
        };
        Ok(PolicyPod {
            sandbox: format!("sandbox-of-{}", pod.name).parse()?,
            pod: PodRef {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: String::new(),
            },
            labels: pod.labels.clone(),
            ports: pod.ports.iter().map(port).collect(),
            interfaces,
        })
    }
}

/// A policy as parsed by the agent from the API object of its kind.
pub(crate) fn policy(policy: &oracle::Policy) -> Result<Policy> {
    let Some(networks) = &policy.networks else {
        return Ok(Policy::from_object(&policy.object)?);
    };
    let mut metadata = serde_json::to_value(&policy.object.metadata)?;
    let listed: Vec<&str> = networks.iter().map(String::as_str).collect();
    metadata["annotations"] = json!({"k8s.v1.cni.cncf.io/policy-for": listed.join(", ")});
    let object: v1beta2::MultiNetworkPolicy = serde_json::from_value(json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta2",
        "kind": "MultiNetworkPolicy",
        "metadata": metadata,
        "spec": policy.object.spec,
    }))?;
    Ok(Policy::from_object(&object)?)
}
