//! Parses the plugin's configuration, which the runtime passes on stdin.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::{
    error::{CniError, ErrorCode},
    version::Version,
};

/// The fields that the plugin reads; others belong to other programs.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Config {
    #[serde(default)]
    cni_version: String,
    #[serde(default)]
    pub(crate) name: String,
    /// The agent's socket.
    #[serde(default = "socket")]
    pub(crate) socket: PathBuf,
    /// `PodNetwork` to join; without it the default one.
    #[serde(default)]
    pub(crate) network: Option<String>,
    /// Whether the pod's default routes use the interface; without it they do if it is `eth0`.
    #[serde(default)]
    pub(crate) default_route: Option<bool>,
    /// Folder of the deletes that the agent still has to perform.
    #[serde(default = "state_dir")]
    pub(crate) state_dir: PathBuf,
    #[serde(default)]
    pub(crate) timeouts: Timeouts,
    #[serde(default, rename = "runtimeConfig")]
    pub(crate) runtime: RuntimeConfig,
    #[serde(default)]
    pub(crate) dns: Dns,
    #[serde(default)]
    pub(crate) prev_result: Option<Value>,
    #[serde(default, rename = "cni.dev/valid-attachments", deserialize_with = "said")]
    valid_attachments: Option<Vec<Valid>>,
    #[serde(default, rename = "cni.dev/attachments", deserialize_with = "said")]
    attachments: Option<Vec<Valid>>,
}

/// How long the plugin waits, in milliseconds.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(default)]
pub(crate) struct Timeouts {
    /// Until an agent is reachable.
    #[serde(rename = "connectMs")]
    connect: u64,
    /// For an ADD, restarts of the agent included. The agent gives up after 45 s.
    #[serde(rename = "addMs")]
    add: u64,
    /// Until an agent is reachable for a DEL.
    #[serde(rename = "delConnectMs")]
    del_connect: u64,
    /// For a DEL that the agent has received.
    #[serde(rename = "delMs")]
    del: u64,
    #[serde(rename = "checkMs")]
    check: u64,
    #[serde(rename = "statusMs")]
    status: u64,
    #[serde(rename = "gcMs")]
    gc: u64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: 5_000,
            add: 60_000,
            del_connect: 2_000,
            del: 10_000,
            check: 5_000,
            // Runtimes call every few seconds, and wait for the answer.
            status: 900,
            gc: 25_000,
        }
    }
}

impl Timeouts {
    pub(crate) fn connect(self) -> Duration {
        Duration::from_millis(self.connect)
    }
    pub(crate) fn add(self) -> Duration {
        Duration::from_millis(self.add)
    }
    pub(crate) fn del_connect(self) -> Duration {
        Duration::from_millis(self.del_connect)
    }
    pub(crate) fn del(self) -> Duration {
        Duration::from_millis(self.del)
    }
    pub(crate) fn check(self) -> Duration {
        Duration::from_millis(self.check)
    }
    pub(crate) fn status(self) -> Duration {
        Duration::from_millis(self.status)
    }
    pub(crate) fn gc(self) -> Duration {
        Duration::from_millis(self.gc)
    }
}

/// Arguments that the runtime passes because the configuration declares the capability.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct RuntimeConfig {
    #[serde(deserialize_with = "or_default")]
    pub(crate) port_mappings: Vec<PortMapping>,
    pub(crate) bandwidth: Option<Value>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) dns: Dns,
    #[serde(deserialize_with = "or_default")]
    pub(crate) ips: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) mac: String,
    #[serde(deserialize_with = "or_default")]
    pub(crate) cgroup_path: String,
    #[serde(rename = "io.kubernetes.cri.pod-annotations", deserialize_with = "or_default")]
    pub(crate) annotations: BTreeMap<String, String>,
}

/// A port of the container on the node. containerd writes these keys, and those of the resolver and of the bandwidth,
/// with a capital letter; CNI plugins written in Go ignore the case.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct PortMapping {
    #[serde(default, rename = "hostPort", alias = "HostPort")]
    pub(crate) host_port: i32,
    #[serde(rename = "containerPort", alias = "ContainerPort")]
    pub(crate) container_port: i32,
    #[serde(default, alias = "Protocol")]
    pub(crate) protocol: String,
    #[serde(default, rename = "hostIP", alias = "HostIP")]
    pub(crate) host_ip: String,
}

/// Settings of a resolver, under the names of both the capability and the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Dns {
    #[serde(alias = "nameservers", alias = "Servers", deserialize_with = "or_default")]
    pub(crate) servers: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) domain: String,
    #[serde(alias = "search", alias = "Searches", deserialize_with = "or_default")]
    pub(crate) searches: Vec<String>,
    #[serde(alias = "Options", deserialize_with = "or_default")]
    pub(crate) options: Vec<String>,
}

/// An attachment that the runtime has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(crate) struct Valid {
    #[serde(rename = "containerID")]
    pub(crate) container: String,
    pub(crate) ifname: String,
}

impl Config {
    pub(crate) fn parse(stdin: &[u8]) -> Result<Self, CniError> {
        let mut text = serde_json::Deserializer::from_slice(stdin);
        let config: Self = serde_path_to_error::deserialize(&mut text).map_err(|error| {
            let msg = format!("network configuration: {}: {}", error.path(), error.inner());
            CniError::new(ErrorCode::Decode, msg)
        })?;
        config.version()?;
        if !is_network_name(&config.name) {
            let rule = "A-Z, a-z, 0-9, '_', '.' and '-', the first a letter or digit";
            return Err(invalid(&format!("name: {:?} is not {rule}", config.name)));
        }
        if config.network.as_deref() == Some("") {
            return Err(invalid("network: is empty; without the key it is the default one"));
        }
        for (key, path) in [("socket", &config.socket), ("stateDir", &config.state_dir)] {
            if !path.is_absolute() {
                return Err(invalid(&format!("{key}: {} is not an absolute path", path.display())));
            }
        }
        Ok(config)
    }

    pub(crate) fn version(&self) -> Result<Version, CniError> {
        Version::parse(&self.cni_version)
    }

    /// The runtime's attachments; `None` if it sends no list. The lists of both names of the key are merged. Go writes
    /// an empty list as null.
    pub(crate) fn valid_attachments(&self) -> Option<Vec<Valid>> {
        let lists = [&self.valid_attachments, &self.attachments];
        if lists.iter().all(|list| list.is_none()) {
            return None;
        }
        let mut all: Vec<Valid> = lists.into_iter().flatten().flatten().cloned().collect();
        all.sort();
        all.dedup();
        Some(all)
    }
}

fn socket() -> PathBuf {
    "/run/kni/kni.sock".into()
}

fn state_dir() -> PathBuf {
    "/var/lib/kni".into()
}

/// The value of a key; a null, which is an empty list of Go, differs from a missing key.
fn said<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Valid>>, D::Error> {
    or_default(deserializer).map(Some)
}

/// Go writes empty values as null.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

fn is_network_name(name: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    name.bytes().all(legal) && name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
}

fn invalid(msg: &str) -> CniError {
    CniError::new(ErrorCode::InvalidConfig, msg)
}

#[cfg(test)]
mod tests;
