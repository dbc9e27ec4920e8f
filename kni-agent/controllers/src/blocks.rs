//! Manages the address blocks of the node: allocates a block before it is needed and releases unused ones.
//!
//! The table of blocks is the status of the network. A block is allocated by replacing the status with the resource
//! version that was read: if two nodes choose the same block, the API server refuses the second one, which chooses
//! again. So no leader is needed, and no address is ever in two blocks.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{Hash as _, Hasher as _},
    time::Duration,
};

use fnv::FnvHasher;
use ipnet::IpNet;
use kni_crd::{FromObject, PodNetwork};
use kni_ipam::blocks::next_block;
use kni_model::{
    NetworkName, NetworkSpec,
    view::{AddressUse, NetworkView},
};
use kube::{Api, api::PostParams};
use tokio::time::{Instant, MissedTickBehavior, interval};

use kni_cluster::{blocks_of, joining::networks_of};

use super::Cluster;

/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(1);
/// Changes that arrive within this time are processed together.
const GATHER: Duration = Duration::from_millis(20);
/// A block that was unused for this long is released.
const GRACE: Duration = Duration::from_secs(15);
/// The next block is allocated when less than one quarter of the addresses is free.
const SPARE: u128 = 4;
/// Maximum number of attempts to allocate a block before other networks get their turn.
const TRIES: u32 = 16;

/// A change to the blocks of one network.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Allocate an additional block of these families.
    Take { ipv4: bool, ipv6: bool },
    /// Release these blocks.
    GiveBack(Vec<IpNet>),
}

impl Cluster {
    /// Allocates and releases blocks for as long as the agent runs.
    pub(super) async fn reconcile_blocks(self) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = self.cache.changes();
        let mut attached = self.attacher.changes();
        let mut idle: BTreeMap<NetworkName, Instant> = BTreeMap::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.cache.blocks().demanded() => {}
                _ = known.changed() => tokio::time::sleep(GATHER).await,
                _ = attached.changed() => {}
            }
            for (name, step) in self.steps(&mut idle) {
                let done = match &step {
                    Step::Take { .. } => self.carry_out(&name, &step).await,
                    Step::GiveBack(blocks) => self.give_back(&name, blocks, &step).await,
                };
                if let Err(error) = done {
                    tracing::warn!(network = %name, %error, "cannot change the node's address blocks; trying again");
                }
            }
        }
    }

    fn steps(&self, idle: &mut BTreeMap<NetworkName, Instant>) -> Vec<(NetworkName, Step)> {
        let demanded = self.cache.blocks().take_demanded();
        let views = self.attacher.networks();
        let needed = self.needed(&views, &demanded);
        let tables = self.cache.tables();
        let networks = self.networks(&tables);
        let mut steps = Vec::new();
        for view in views {
            let name = view.network.spec.name.clone();
            let (Some(spec), Some(object)) = (networks.spec(&name), tables.networks.get("", name.as_str())) else {
                continue;
            };
            if spec.blocks.is_none() || spec.subnets.is_empty() {
                continue;
            }
            // Skip the network while its pools do not have the latest blocks yet.
            if spec.blocks != view.network.spec.blocks {
                continue;
            }
            let step = if needed.contains(&name) {
                idle.remove(&name);
                let step = take(&view, demanded.contains(&name));
                if step.is_none() {
                    self.cache.blocks().set_exhausted(&name, false);
                }
                step
            } else {
                let since = *idle.entry(name.clone()).or_insert_with(Instant::now);
                let blocks = blocks_of(object, &self.node);
                let unused = view.attachments == 0 && view.used_addresses == 0 && !blocks.is_empty();
                (unused && since.elapsed() >= GRACE).then_some(Step::GiveBack(blocks))
            };
            steps.extend(step.map(|step| (name, step)));
        }
        steps
    }

    /// Networks that have pods on this node, or that pods are about to join.
    fn needed(&self, views: &[NetworkView], demanded: &BTreeSet<NetworkName>) -> BTreeSet<NetworkName> {
        let mut needed = demanded.clone();
        for view in views {
            if view.attachments > 0 || view.network.spec.default {
                needed.insert(view.network.spec.name.clone());
            }
        }
        let tables = self.cache.tables();
        let networks = self.networks(&tables);
        for (key, pod) in tables.pods.rows() {
            if pod.node == self.node && !pod.host_network && !pod.finished {
                needed.extend(networks_of(&tables, &networks, &key.namespace, pod));
            }
        }
        needed
    }

    /// Stops leasing from the blocks first, then checks that no address was leased: a pod may have been attached in
    /// between.
    async fn give_back(&self, name: &NetworkName, blocks: &[IpNet], step: &Step) -> Result<(), kube::Error> {
        self.cache.blocks().withhold(name, blocks);
        self.apply_networks().await;
        let views = self.attacher.networks();
        let unused = views
            .iter()
            .any(|view| view.network.spec.name == *name && view.used_addresses == 0 && view.total_addresses == 0);
        let done = if unused {
            self.carry_out(name, step).await
        } else {
            Ok(())
        };
        self.cache.blocks().withhold(name, &[]);
        self.apply_networks().await;
        done
    }

    async fn carry_out(&self, name: &NetworkName, step: &Step) -> Result<(), kube::Error> {
        let api: Api<PodNetwork> = Api::all(self.client.clone());
        let cached = self.cache.tables().networks.get("", name.as_str()).cloned();
        let mut object = match cached {
            Some(object) => PodNetwork::clone(&object),
            None => return Ok(()),
        };
        for attempt in 0..TRIES {
            let Some(desired) = self.changed_object(&object, step, attempt) else {
                return Ok(());
            };
            match api
                .replace_status(name.as_str(), &PostParams::default(), &desired)
                .await
            {
                Ok(written) => {
                    tracing::info!(network = %name, ?step, blocks = ?blocks_of(&written, &self.node), "address blocks");
                    self.cache_network(written);
                    return Ok(());
                }
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    let pause = Duration::from_millis(fastrand::u64(0..=10 * u64::from(attempt + 1)));
                    tokio::time::sleep(pause).await;
                    object = api.get(name.as_str()).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The object to write; `None` if nothing changes.
    fn changed_object(&self, object: &PodNetwork, step: &Step, attempt: u32) -> Option<PodNetwork> {
        let mut desired = object.clone();
        let status = desired.status.get_or_insert_default();
        let before = status.blocks.clone();
        match step {
            Step::Take { ipv4, ipv6 } => {
                let spec = NetworkSpec::from_object(object).ok()?;
                let mut exhausted = false;
                for family in [true, false] {
                    if !(if family { *ipv4 } else { *ipv6 }) {
                        continue;
                    }
                    match self.choose(object, &spec, &status.blocks, family, attempt) {
                        Some(cidr) => status.blocks.push(kni_api::pod_network::NodeBlock {
                            cidr: cidr.to_string(),
                            node: self.node.clone(),
                        }),
                        None => exhausted = true,
                    }
                }
                self.cache.blocks().set_exhausted(&spec.name, exhausted);
            }
            Step::GiveBack(blocks) => {
                let gone: Vec<String> = blocks.iter().map(ToString::to_string).collect();
                status
                    .blocks
                    .retain(|block| block.node != self.node || !gone.contains(&block.cidr));
            }
        }
        status.blocks.sort();
        (status.blocks != before).then_some(desired)
    }

    fn choose(
        &self,
        object: &PodNetwork,
        spec: &NetworkSpec,
        taken: &[kni_api::pod_network::NodeBlock],
        ipv4: bool,
        attempt: u32,
    ) -> Option<IpNet> {
        let prefixes = object.spec.per_node_prefix.unwrap_or_default();
        let prefix = if ipv4 { prefixes.ipv4 } else { prefixes.ipv6 };
        let mut taken: Vec<IpNet> = taken.iter().filter_map(|block| block.cidr.parse().ok()).collect();
        // A block is still useful if only a part of it is excluded.
        taken.extend(spec.exclude_subnets.iter().filter(|exclude| {
            let subnet = spec.subnets.iter().find(|subnet| subnet.contains(*exclude));
            subnet.is_some_and(|subnet| exclude.prefix_len() <= kni_ipam::blocks::block_prefix(subnet, prefix))
        }));
        // The same seed in every network, so that the blocks of a node are similar where possible.
        let mut hasher = FnvHasher::default();
        (self.node.as_str(), attempt).hash(&mut hasher);
        next_block(&spec.subnets, &taken, ipv4, prefix, hasher.finish())
    }
}

/// Whether a network that is in use needs an additional block.
fn take(view: &NetworkView, demanded: bool) -> Option<Step> {
    let short = |usage: &AddressUse, has: bool| {
        has && (usage.free == 0 || (!demanded && usage.free < usage.total / SPARE) || usage.total == 0)
    };
    let has = |ipv4: bool| view.network.spec.subnets.iter().any(|net| net.addr().is_ipv4() == ipv4);
    let ipv4 = short(&view.ipv4, has(true));
    let ipv6 = short(&view.ipv6, has(false));
    (ipv4 || ipv6).then_some(Step::Take { ipv4, ipv6 })
}
