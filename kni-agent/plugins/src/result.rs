//! Parses the results of plugins, in each supported version of the specification.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::{MacAddr, provider::CniRoute};
use serde::Deserialize;
use serde_json::Value;

use super::{CniError, Configuration, RunError};

/// The result of a chain of plugins for one interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Its addresses.
    pub addresses: Vec<PluginAddress>,
    /// Routes in the pod.
    pub routes: Vec<CniRoute>,
    /// Its MAC address, if the result has one.
    pub mac: Option<MacAddr>,
    /// Names of the interfaces on the node in the result, bridges included.
    pub host_interfaces: Vec<String>,
}

/// An address that plugins assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PluginAddress {
    /// With the prefix of its link.
    pub address: IpNet,
    /// Its gateway.
    pub gateway: Option<IpAddr>,
}

#[derive(Deserialize)]
struct RawResult {
    #[serde(default)]
    interfaces: Option<Vec<Interface>>,
    #[serde(default)]
    ips: Option<Vec<Ip>>,
    #[serde(default)]
    routes: Option<Vec<Route>>,
}

#[derive(Deserialize)]
struct Interface {
    #[serde(default)]
    name: String,
    #[serde(default)]
    mac: String,
    #[serde(default)]
    sandbox: String,
}

#[derive(Deserialize)]
struct Ip {
    address: IpNet,
    #[serde(default)]
    gateway: Option<String>,
    #[serde(default)]
    interface: Option<i64>,
}

#[derive(Deserialize)]
struct Route {
    dst: IpNet,
    #[serde(default)]
    gw: Option<String>,
}

impl Outcome {
    /// Selects the parts about `ifname`. An address without an interface belongs to the pod.
    pub(super) fn read(configuration: &Configuration, result: &Value, ifname: &str) -> Result<Self, CniError> {
        let plugin = configuration.plugins().last().map_or("", |plugin| plugin.kind());
        let failed = |source: RunError| CniError::Failed {
            configuration: configuration.name().to_owned(),
            plugin: plugin.to_owned(),
            verb: "ADD",
            source,
        };
        if !result.is_object() {
            return Err(failed(RunError::NoResult));
        }
        let raw = RawResult::deserialize(result).map_err(|error| failed(RunError::Result(error)))?;
        let interfaces = raw.interfaces.unwrap_or_default();
        let ours = interfaces
            .iter()
            .position(|interface| interface.name == ifname && !interface.sandbox.is_empty());
        let is_ours = |ip: &Ip| match ip.interface {
            None => true,
            Some(index) => usize::try_from(index).ok() == ours && ours.is_some(),
        };
        let ips = raw.ips.unwrap_or_default();
        Ok(Self {
            addresses: ips
                .iter()
                .filter(|ip| is_ours(ip))
                .map(|ip| PluginAddress {
                    address: ip.address,
                    gateway: address(ip.gateway.as_deref()),
                })
                .collect(),
            routes: raw
                .routes
                .unwrap_or_default()
                .iter()
                .map(|route| CniRoute {
                    destination: route.dst,
                    gateway: address(route.gw.as_deref()),
                })
                .collect(),
            mac: ours
                .and_then(|index| interfaces.get(index))
                .and_then(|interface| interface.mac.parse().ok()),
            host_interfaces: interfaces
                .into_iter()
                .filter(|interface| interface.sandbox.is_empty() && !interface.name.is_empty())
                .map(|interface| interface.name)
                .collect(),
        })
    }
}

/// Some plugins write an empty string instead of omitting the address.
fn address(text: Option<&str>) -> Option<IpAddr> {
    text.and_then(|text| text.parse().ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(result: &Value) -> Result<Outcome, CniError> {
        let configuration = json!({ "cniVersion": "1.0.0", "name": "a", "type": "bridge" });
        Outcome::read(&Configuration::read(&configuration).unwrap(), result, "eth0")
    }

    #[test]
    fn the_interface_of_the_pod_is_distinguished_from_those_of_the_node() {
        let result = json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                { "name": "cni0", "mac": "02:00:00:00:00:01" },
                { "name": "veth7", "mac": "02:00:00:00:00:02", "mtu": 1400 },
                { "name": "eth0", "mac": "02:00:00:00:00:03", "sandbox": "/run/netns/x" },
                { "name": "net9", "sandbox": "/run/netns/x" },
            ],
            "ips": [
                { "interface": 2, "address": "10.1.0.5/24", "gateway": "10.1.0.1" },
                { "interface": 2, "address": "fd00::5/64" },
                { "interface": 3, "address": "10.9.0.5/24" },
            ],
            "routes": [{ "dst": "0.0.0.0/0", "gw": "10.1.0.1" }, { "dst": "10.2.0.0/16", "gw": "" }],
            "dns": {},
        });
        let outcome = read(&result).unwrap();
        let addresses: Vec<String> = outcome.addresses.iter().map(|ip| ip.address.to_string()).collect();
        assert_eq!(addresses, ["10.1.0.5/24", "fd00::5/64"]);
        assert_eq!(outcome.addresses[0].gateway, Some("10.1.0.1".parse().unwrap()));
        assert_eq!(outcome.mac, Some("02:00:00:00:00:03".parse().unwrap()));
        assert_eq!(outcome.host_interfaces, ["cni0", "veth7"]);
        let gateways: Vec<_> = outcome.routes.iter().map(|route| route.gateway.is_some()).collect();
        assert_eq!(gateways, [true, false]);
    }

    #[test]
    fn older_results_have_versions_and_may_name_no_interface() {
        for version in ["0.3.0", "0.3.1", "0.4.0"] {
            let result = json!({
                "cniVersion": version,
                "ips": [{ "version": "4", "address": "10.1.0.5/24", "gateway": "10.1.0.1" }],
            });
            assert_eq!(read(&result).unwrap().addresses.len(), 1, "{version}");
        }
        assert_eq!(read(&json!({})).unwrap(), Outcome::default());
        assert_eq!(
            read(&json!({ "ips": null, "routes": null, "interfaces": null })).unwrap(),
            Outcome::default()
        );
    }

    #[test]
    fn invalid_results_are_errors() {
        for bad in [json!([]), Value::Null, json!({ "ips": [{ "address": "10.1.0.5" }] })] {
            let error = read(&bad).unwrap_err().to_string();
            assert!(error.contains("plugin bridge"), "{error}");
        }
    }
}
