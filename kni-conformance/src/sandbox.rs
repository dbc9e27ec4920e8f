//! Defines a sandbox and the attach request that the kubelet makes of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_proto::kni::{AttachInterfaceRequest, DnsConfig, IpConfig, PortMapping, Protocol};

use crate::{
    error::{Result, require},
    namespace::Netns,
};

/// The name of the interface that every pod has.
pub(crate) const PRIMARY: &str = "eth0";
/// The Kubernetes namespace of the pods of the suite.
pub(crate) const NAMESPACE: &str = "kni-conformance";
/// The key in `extradata` of the path of the network namespace.
pub(crate) const NETNS_KEY: &str = "netns";
const NETNS_ANNOTATION: &str = "kni.dev/netns";

/// A pod sandbox with a network namespace, attached or not. Keeps the namespace alive, as its process does.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    /// As container runtimes make it: 64 hexadecimal digits.
    pub(crate) id: String,
    /// The pod's name.
    pub(crate) name: String,
    /// The pod's UID.
    pub(crate) uid: String,
    /// The path that the server returned.
    pub(crate) path: String,
    /// The namespace there.
    pub(crate) netns: Netns,
}

impl Sandbox {
    pub(crate) fn new(name: &str, path: String, netns: Netns) -> Self {
        Self {
            id: new_id(),
            name: name.to_owned(),
            uid: format!(
                "{:08x}-0000-4000-8000-{:012x}",
                fastrand::u32(..),
                fastrand::u64(..1 << 48)
            ),
            path,
            netns,
        }
    }

    /// The request as the kubelet makes it: the UID is in a label, `isolation` is unset, and the ports of containers
    /// have the host port 0.
    pub(crate) fn attach_request(&self) -> AttachInterfaceRequest {
        let label = |key: &str, value: &str| (format!("io.kubernetes.pod.{key}"), value.to_owned());
        AttachInterfaceRequest {
            name: self.name.clone(),
            id: self.id.clone(),
            namespace: NAMESPACE.to_owned(),
            isolation: None,
            dns_config: Some(DnsConfig {
                servers: vec!["10.96.0.10".to_owned()],
                searches: vec!["svc.cluster.local".to_owned(), "cluster.local".to_owned()],
                options: vec!["ndots:5".to_owned()],
            }),
            port_mappings: vec![PortMapping {
                protocol: Protocol::Tcp.into(),
                container_port: 8080,
                host_port: 0,
                host_ip: String::new(),
            }],
            labels: [
                label("name", &self.name),
                label("namespace", NAMESPACE),
                label("uid", &self.uid),
            ]
            .into(),
            annotations: [(NETNS_ANNOTATION.to_owned(), self.path.clone())].into(),
            extradata: [(NETNS_KEY.to_owned(), self.path.clone())].into(),
        }
    }
}

/// A new sandbox id.
pub(crate) fn new_id() -> String {
    format!("{:032x}{:032x}", fastrand::u128(..), fastrand::u128(..))
}

/// An attached sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    /// The sandbox.
    pub(crate) sandbox: Sandbox,
    /// The answer to the attach.
    pub(crate) interfaces: BTreeMap<String, IpConfig>,
    /// The addresses of `eth0` in the order of the answer.
    pub(crate) addresses: Vec<IpAddr>,
}

impl Pod {
    /// The first address of a family.
    pub(crate) fn address(&self, v4: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|ip| ip.is_ipv4() == v4)
    }
}

/// The addresses of `eth0` in an answer. The kubelet ignores all of them if one is no bare address.
pub(crate) fn addresses(interfaces: &BTreeMap<String, IpConfig>) -> Result<Vec<IpAddr>> {
    let names: Vec<&String> = interfaces.keys().collect();
    let Some(config) = interfaces.get(PRIMARY) else {
        return Err(crate::error::Failure::Wrong(format!(
            "the answer has no {PRIMARY}, only {names:?}"
        )));
    };
    require!(!config.ip.is_empty(), "the answer has no address for {PRIMARY}");
    let mut addresses = Vec::new();
    for text in &config.ip {
        let parsed: Option<IpAddr> = text.parse().ok();
        let Some(ip) = parsed else {
            return Err(crate::error::Failure::Wrong(format!(
                "{text:?} in the answer is not a bare address"
            )));
        };
        addresses.push(ip);
    }
    let unique: BTreeSet<&IpAddr> = addresses.iter().collect();
    require!(
        unique.len() == addresses.len(),
        "the answer repeats an address: {addresses:?}"
    );
    Ok(addresses)
}
