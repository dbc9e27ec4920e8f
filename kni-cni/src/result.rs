//! Converts results to CNI: built from the agent's answer, printed in each version's format, parsed again by CHECK.

use std::{collections::BTreeMap, net::IpAddr};

use kni_proto::{cni, kni::IpConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{config::Dns, version::Version};

/// Address of a pod that has no primary interface: the IPv4 dummy address, which no host has (RFC 7600). The kubelet
/// and containerd start no pod without an address. The address must also be legal in an EndpointSlice, which addresses
/// of loopback, links and multicast groups are not: one pod must not invalidate the slice of the others.
const DUMMY: &str = "192.0.0.8/32";

/// Interfaces, addresses and routes of one attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct CniResult {
    pub(crate) interfaces: Vec<Interface>,
    pub(crate) ips: Vec<Address>,
    pub(crate) routes: Vec<Route>,
    #[serde(skip)]
    pub(crate) dns: Dns,
}

/// Whether an answer of the agent is about a pod that requested no primary interface.
pub(crate) fn has_no_primary_interface(extradata: &BTreeMap<String, String>) -> bool {
    extradata.get(cni::NONE).is_some_and(|value| value == "true")
}

/// One end of a link.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) mac: String,
    pub(crate) mtu: Option<u32>,
    /// Path of the namespace; empty for the node's.
    pub(crate) sandbox: String,
}

/// An address with its prefix.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Address {
    #[serde(rename = "address")]
    pub(crate) cidr: String,
    #[serde(default)]
    pub(crate) gateway: Option<String>,
    /// Index of its interface.
    #[serde(default)]
    pub(crate) interface: Option<usize>,
}

/// A route in the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Route {
    pub(crate) dst: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gw: Option<String>,
}

impl CniResult {
    /// A sandbox as the agent describes it; the requested interface comes first.
    pub(crate) fn of_answer(ipconfigs: &BTreeMap<String, IpConfig>, ifname: &str, netns: &str, dns: &Dns) -> Self {
        let mut result = Self {
            dns: dns.clone(),
            ..Self::default()
        };
        let asked = ipconfigs.get_key_value(ifname);
        let others = ipconfigs.iter().filter(|(name, _)| *name != ifname);
        for (name, config) in asked.into_iter().chain(others) {
            result.add(name, config, netns);
        }
        result
    }

    /// Adds the dummy address of a pod without a primary interface. It belongs to no interface of the result, so
    /// runtimes take it for the pod's address and not for one of an additional interface.
    pub(crate) fn add_dummy_address(&mut self) {
        self.ips.push(Address {
            cidr: DUMMY.to_owned(),
            gateway: None,
            interface: None,
        });
    }

    fn add(&mut self, name: &str, config: &IpConfig, netns: &str) {
        let about = |key: &str| config.extradata.get(key).filter(|value| !value.is_empty()).cloned();
        let mtu = about("mtu").and_then(|mtu| mtu.parse().ok());
        if let Some(host) = about("host_ifname") {
            self.interfaces.push(Interface {
                name: host,
                mac: about("host_mac").unwrap_or_default(),
                mtu,
                sandbox: String::new(),
            });
        }
        let position = self.interfaces.len();
        self.interfaces.push(Interface {
            name: name.to_owned(),
            mac: config.mac.clone(),
            mtu,
            sandbox: netns.to_owned(),
        });
        for ip in config.ip.iter().filter_map(|ip| ip.parse::<IpAddr>().ok()) {
            let (prefix, gateway, whole) = match ip {
                IpAddr::V4(_) => ("prefix4", "gateway4", "32"),
                IpAddr::V6(_) => ("prefix6", "gateway6", "128"),
            };
            self.ips.push(Address {
                cidr: format!("{ip}/{}", about(prefix).unwrap_or_else(|| whole.to_owned())),
                gateway: about(gateway),
                interface: Some(position),
            });
        }
        let routes = about("routes").and_then(|routes| serde_json::from_str::<Vec<Route>>(&routes).ok());
        self.routes.extend(routes.unwrap_or_default());
    }

    /// The addresses of an interface inside the pod.
    pub(crate) fn addresses_of(&self, ifname: &str) -> impl Iterator<Item = &Address> {
        let position = self
            .interfaces
            .iter()
            .position(|interface| interface.name == ifname && !interface.sandbox.is_empty());
        let has = move |address: &&Address| address.interface.is_some() && address.interface == position;
        self.ips.iter().filter(has)
    }

    /// The result in the format of a version.
    pub(crate) fn to_json(&self, version: Version) -> String {
        let interfaces = self.interfaces.iter().map(|interface| interface.to_value(version));
        let ips = self.ips.iter().map(|address| address.to_value(version));
        json!({
            "cniVersion": version.as_str(),
            "interfaces": interfaces.collect::<Vec<_>>(),
            "ips": ips.collect::<Vec<_>>(),
            "routes": self.routes,
            "dns": dns(&self.dns),
        })
        .to_string()
    }
}

impl Interface {
    fn to_value(&self, version: Version) -> Value {
        let mut value = Map::new();
        value.insert("name".into(), json!(self.name));
        for (key, text) in [("mac", &self.mac), ("sandbox", &self.sandbox)] {
            if !text.is_empty() {
                value.insert(key.into(), json!(text));
            }
        }
        if let Some(mtu) = self.mtu.filter(|_| version >= Version::V1_1_0) {
            value.insert("mtu".into(), json!(mtu));
        }
        value.into()
    }
}

impl Address {
    fn to_value(&self, version: Version) -> Value {
        let mut value = Map::new();
        if version < Version::V1_0_0 {
            let family = if self.cidr.contains(':') { "6" } else { "4" };
            value.insert("version".into(), json!(family));
        }
        value.insert("address".into(), json!(self.cidr));
        if let Some(gateway) = &self.gateway {
            value.insert("gateway".into(), json!(gateway));
        }
        if let Some(position) = self.interface {
            value.insert("interface".into(), json!(position));
        }
        value.into()
    }
}

fn dns(dns: &Dns) -> Value {
    let mut value = Map::new();
    for (key, list) in [
        ("nameservers", &dns.servers),
        ("search", &dns.searches),
        ("options", &dns.options),
    ] {
        if !list.is_empty() {
            value.insert(key.into(), json!(list));
        }
    }
    if !dns.domain.is_empty() {
        value.insert("domain".into(), json!(dns.domain));
    }
    value.into()
}

#[cfg(test)]
mod tests;
