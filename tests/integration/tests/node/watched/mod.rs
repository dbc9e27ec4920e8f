//! Provides a node with an agent and a kubelet that detects leaks by comparing their states at rest.

use std::{
    collections::BTreeMap,
    ops::{Deref, DerefMut},
};

use anyhow::{Result, ensure};
use kni_integration::{
    AgentOptions, Kubelet, Manifest, Node, NodeSnapshot, Stage, agent::SOCKET, eventually, patience,
};
use kni_proto::{kni::DeleteNetworkRequest, runtime::ListMapsRequest};

/// Maps whose rows depend on pods and networks.
const MAPS: [&str; 4] = ["ENDPOINTS", "ADDRESSES", "ROUTES", "DROPS"];

/// The agent's options with another number of prewarmed sandboxes. With none, its effects on the node are fully
/// predictable.
pub(crate) fn warm(sandboxes: u32) -> AgentOptions {
    AgentOptions::new(Manifest::overlapping(), &["--warm-sandboxes", &sandboxes.to_string()])
}

/// The node, the agent on it and the kubelet's connection.
pub(crate) struct Watched {
    stage: Stage,
    pub(crate) options: AgentOptions,
    /// The node before the agent first ran.
    pub(crate) pristine: NodeSnapshot,
}

impl Deref for Watched {
    type Target = Stage;

    fn deref(&self) -> &Stage {
        &self.stage
    }
}

impl DerefMut for Watched {
    fn deref_mut(&mut self) -> &mut Stage {
        &mut self.stage
    }
}

impl Watched {
    /// Starts an agent without prewarming.
    pub(crate) async fn new(name: &str) -> Result<Self> {
        Self::with(name, warm(0)).await
    }

    /// Starts an agent and waits until its pool is full.
    pub(crate) async fn with(name: &str, options: AgentOptions) -> Result<Self> {
        let stage = Self::unsettled(name, options).await?;
        stage.settled().await?;
        Ok(stage)
    }

    /// Starts an agent.
    pub(crate) async fn unsettled(name: &str, options: AgentOptions) -> Result<Self> {
        let node = Node::new(name)?;
        // Until then, the uplink's own address would seem to be added by the agent.
        node.wait_for_local("uplink0", "fe80")?;
        let pristine = NodeSnapshot::take(&node)?;
        let stage = Stage::with(node, options.clone()).await?;
        // The first namespace creates the folder of namespaces, which remains.
        let netns_path = stage.kubelet.create_network("stage", "first").await?;
        let first = DeleteNetworkRequest {
            netns_path,
            ..Default::default()
        };
        stage.kubelet.kni().delete_network(first).await?;
        Ok(Self {
            stage,
            options,
            pristine,
        })
    }

    /// Starts the agent again and reconnects.
    pub(crate) async fn restart(&mut self) -> Result<()> {
        self.agent.restart()?;
        self.kubelet = Kubelet::connect(&self.node, SOCKET).await?;
        self.settled().await
    }

    /// Waits until removals have completed, the pool is full and every interface has its links.
    pub(crate) async fn settled(&self) -> Result<()> {
        eventually(patience(), async || {
            let status = self.status().await?;
            let pending = status.pending_removals + status.pending_links;
            let settled = pending == 0 && status.warm_sandboxes == self.warm_wanted();
            ensure!(settled, "the agent does not come to rest: {status:#?}");
            Ok(())
        })
        .await
    }

    /// The state in which leaks would appear.
    pub(crate) async fn picture(&self) -> Result<Picture> {
        self.settled().await?;
        let listed = self.kubelet.runtime().list_maps(ListMapsRequest {}).await?.into_inner();
        let rows = listed.maps.into_iter().filter(|map| MAPS.contains(&map.name.as_str()));
        let status = self.status().await?;
        Ok(Picture {
            node: NodeSnapshot::take(&self.node)?,
            rows: rows.map(|map| (map.name, map.entries)).collect(),
            sandboxes: status.sandboxes,
            attachments: status.attachments,
        })
    }

    /// Panics unless the state equals `before` after the background work has completed.
    pub(crate) async fn assert_as(&self, before: &Picture) -> Result<()> {
        eventually(patience(), async || {
            let differences = self.differences(before).await?.join("\n");
            ensure!(
                differences.is_empty(),
                "something was left behind or taken away:\n{differences}"
            );
            Ok(())
        })
        .await
    }

    /// The differences of the state from `before`.
    pub(crate) async fn differences(&self, before: &Picture) -> Result<Vec<String>> {
        Ok(before.differences(&self.picture().await?, self.warm_wanted() == 0))
    }

    fn warm_wanted(&self) -> u32 {
        let mut args = self.options.args.iter();
        let given = args.find(|arg| *arg == "--warm-sandboxes").and_then(|_| args.next());
        given.and_then(|n| n.parse().ok()).unwrap_or(8)
    }
}

/// The state of a node and its agent at rest.
#[derive(Debug)]
pub(crate) struct Picture {
    node: NodeSnapshot,
    rows: BTreeMap<String, u32>,
    sandboxes: u32,
    attachments: u32,
}

/// Kinds of lines in a snapshot that contain random names of prewarmed objects.
const NAMED_AT_RANDOM: [&str; 12] = [
    "link",
    "address",
    "route",
    "rule",
    "neighbour",
    "qdisc",
    "program",
    "nft",
    "file",
    "bpffs",
    "mount",
    "sysctl",
];

impl Picture {
    /// The differences; only of numbers if the names of prewarmed objects differ in any case.
    fn differences(&self, now: &Self, exact: bool) -> Vec<String> {
        let lines = NodeSnapshot::diff(&self.node, &now.node);
        let same_numbers = NAMED_AT_RANDOM
            .iter()
            .all(|kind| self.node.section(kind).len() == now.node.section(kind).len());
        let mut differences = if exact || !same_numbers { lines } else { Vec::new() };
        let numbers = |picture: &Self| (picture.rows.clone(), picture.sandboxes, picture.attachments);
        if numbers(self) != numbers(now) {
            differences.push(format!(
                "map rows, sandboxes, attachments: {:?}, were {:?}",
                numbers(now),
                numbers(self)
            ));
        }
        differences
    }
}

/// A map as in requests, for calls that differ from those of the kubelet.
pub(crate) fn entries(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    let owned = entries.iter().map(|(key, value)| ((*key).into(), (*value).into()));
    owned.collect()
}
