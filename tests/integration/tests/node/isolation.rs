//! Tests isolation between networks: equal addresses in two networks, extra interfaces, and forged frames.

mod borders;
mod content;
mod crafted;
mod forge;
mod node;

use anyhow::Result;
use kni_integration::{Manifest, Pod, Stage, traffic::Servers};

/// The port of all servers.
pub(crate) const PORT: u16 = 8080;

/// blue and red with equal pods, one address that only red has, and a pod of the default network. Each pod and the node
/// run a server with their name.
pub(crate) struct Scene {
    pub(crate) servers: Vec<Servers>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) stage: Stage,
}

impl Scene {
    pub(crate) async fn set(name: &str) -> Result<Self> {
        let stage = Stage::start(name, Manifest::overlapping()).await?;
        let mut pods = Vec::new();
        for network in ["blue", "red"] {
            for (number, ips) in [(1, "10.10.0.11,fd10::11"), (2, "10.10.0.12,fd10::12")] {
                pods.push(stage.pod_in(network, &format!("{network}-{number}"), ips).await?);
            }
        }
        pods.push(stage.pod_in("red", "red-3", "10.10.0.77,fd10::77").await?);
        pods.push(stage.pod("plain").await?);
        let mut servers = vec![
            Servers::start(&stage.node, "node", PORT)?,
            Servers::start(stage.node.fabric(), "fabric", PORT)?,
        ];
        for pod in &pods {
            servers.push(Servers::start(&pod.inside, &pod.name, PORT)?);
        }
        Ok(Self { servers, pods, stage })
    }

    pub(crate) fn pod(&self, name: &str) -> &Pod {
        let found = self.pods.iter().find(|pod| pod.name == name);
        found.unwrap_or_else(|| panic!("no pod {name}"))
    }

    /// Adds a pod with a server.
    pub(crate) async fn add(&mut self, name: &str, annotations: &[(&str, &str)]) -> Result<()> {
        let pod = self.stage.pod_with(name, annotations).await?;
        self.servers.push(Servers::start(&pod.inside, name, PORT)?);
        self.pods.push(pod);
        Ok(())
    }
}
