//! Holds the state of one simulated node in memory: its networks, its leases and its sandboxes, without a kernel.

mod sandbox;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{FutureExt as _, future::BoxFuture};
use kni_cluster::ClusterCache;
use kni_controllers::state::{Act, Enforcement, Interfaces, NodeState, Peer, PeerChanges, Read};
use kni_ipam::{FamilyUsage, Ipam, IpamError};
use kni_model::{
    InvalidId, Network, NetworkId, NetworkName, PodRef, PolicyTables, Sandbox,
    policy::Labels,
    view::{AddressUse, DesiredNetworks, NetworkView, StatusView, UplinkView},
};
use kni_policy::PolicyEngine;
use kni_uplink::UnderlayAddress;
use tokio::sync::watch;

use crate::observed::Observed;
use sandbox::{interfaces, sandbox};

/// The MTU of the simulated underlay.
const MTU: u32 = 1500;

/// A node. Clones share it.
#[derive(Clone)]
pub(crate) struct SimulatedNode {
    name: String,
    addresses: Vec<IpAddr>,
    state: Arc<Mutex<State>>,
    /// The agent's policy engine. Its rows go nowhere.
    policies: Arc<Mutex<PolicyEngine>>,
    changes: watch::Sender<u64>,
    link_changes: watch::Sender<()>,
    /// Times of rests count from here.
    began: Instant,
    observed: Observed,
}

#[derive(Default)]
struct State {
    networks: BTreeMap<NetworkName, (Network, String)>,
    ids: BTreeMap<NetworkName, NetworkId>,
    ipam: Ipam,
    /// By the UID of the pod.
    sandboxes: BTreeMap<String, Arc<Sandbox>>,
    endpoints: u32,
}

/// Why a pod is not attached yet.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    #[error(transparent)]
    Ipam(#[from] IpamError),
    #[error(transparent)]
    Id(#[from] InvalidId),
}

/// A pod to attach.
pub(crate) struct NewPod<'a> {
    pub(crate) pod: PodRef,
    pub(crate) labels: &'a Labels,
    pub(crate) network: &'a NetworkName,
}

impl SimulatedNode {
    pub(crate) fn new(name: &str, addresses: &[IpAddr], rest: Option<Duration>, observed: &Observed) -> Self {
        let mut state = State::default();
        if let Some(rest) = rest {
            state.ipam.set_rest_time(rest);
        }
        Self {
            name: name.to_owned(),
            addresses: addresses.to_vec(),
            state: Arc::new(Mutex::new(state)),
            policies: Arc::new(Mutex::new(PolicyEngine::new(PolicyTables::default()))),
            changes: watch::Sender::new(0),
            link_changes: watch::Sender::new(()),
            began: Instant::now(),
            observed: observed.clone(),
        }
    }

    /// The node for another process of its agent: its sandboxes and leases stay, its policies are compiled anew.
    pub(crate) fn restarted(&self) -> Self {
        let mut engine = PolicyEngine::new(PolicyTables::default());
        for sandbox in self.state().sandboxes.values() {
            engine.put_pod(sandbox.policy_pod());
        }
        Self {
            policies: Arc::new(Mutex::new(engine)),
            ..self.clone()
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn policies(&self) -> MutexGuard<'_, PolicyEngine> {
        self.policies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// Notifies of changes of networks and sandboxes.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The pods that are attached, by UID.
    pub(crate) fn attached(&self) -> Vec<String> {
        self.state().sandboxes.keys().cloned().collect()
    }

    /// Attaches a pod: leases its addresses, without an interface.
    pub(crate) fn attach(&self, new: &NewPod<'_>) -> Result<Arc<Sandbox>, AttachError> {
        let sandbox = {
            let mut state = self.state();
            let unknown = || IpamError::UnknownNetwork {
                network: new.network.clone(),
            };
            let network_id = *state.ids.get(new.network).ok_or_else(unknown)?;
            let lease = {
                let now = self.began.elapsed();
                state.ipam.end_rests(now);
                state.ipam.lease(new.network, &new.pod.uid, &[], now)?
            };
            state.endpoints += 1;
            let sandbox = Arc::new(sandbox(new, network_id, state.endpoints, (lease.ipv4, lease.ipv6))?);
            state.sandboxes.insert(new.pod.uid.clone(), Arc::clone(&sandbox));
            sandbox
        };
        self.policies().put_pod(sandbox.policy_pod());
        self.compile();
        self.observed.attached(&sandbox.pod.uid, &sandbox.labels);
        self.announce();
        Ok(sandbox)
    }

    /// Detaches a pod, and releases its addresses.
    pub(crate) fn detach(&self, uid: &str) {
        let gone = {
            let mut state = self.state();
            let gone = state.sandboxes.remove(uid);
            for attachment in gone.iter().flat_map(|sandbox| &sandbox.attachments) {
                state.ipam.rest(&attachment.network, attachment.ipv4, attachment.ipv6);
            }
            gone
        };
        if let Some(gone) = gone {
            self.policies().remove_pod(&gone.id);
            self.compile();
            self.announce();
        }
    }

    fn note_withdrawals(&self, withdrawn: &BTreeSet<(NetworkName, IpAddr)>) {
        let now = self.began.elapsed();
        let mut state = self.state();
        for (network, addresses) in state.ipam.resting() {
            for address in addresses {
                let key = (network.clone(), address);
                state
                    .ipam
                    .set_withdrawn(&network, address, withdrawn.contains(&key).then_some(now));
            }
        }
    }

    /// Ends the rests of addresses that are over.
    pub(crate) fn end_rests(&self) {
        let ended = self.state().ipam.end_rests(self.began.elapsed());
        if !ended.is_empty() {
            self.announce();
        }
    }

    /// Compiles the policies, and counts every row as written.
    pub(crate) fn compile(&self) {
        let mut engine = self.policies();
        drop(engine.plan());
        engine.confirm();
    }

    fn relabel(&self, cache: &ClusterCache) {
        let mut changed = Vec::new();
        {
            let tables = cache.tables();
            for sandbox in self.state().sandboxes.values_mut() {
                let pod = tables.pods.get(&sandbox.pod.namespace, &sandbox.pod.name);
                let pod = pod.filter(|pod| pod.uid == sandbox.pod.uid && pod.labels != sandbox.labels);
                if let Some(pod) = pod {
                    Arc::make_mut(sandbox).labels.clone_from(&pod.labels);
                    changed.push(sandbox.policy_pod());
                }
            }
        }
        if changed.is_empty() {
            return;
        }
        for pod in changed {
            self.policies().put_pod(pod);
        }
        self.compile();
        self.announce();
    }

    fn apply_networks(&self, desired: DesiredNetworks) {
        let mut state = self.state();
        let mut networks = BTreeMap::new();
        for (spec, origin) in desired.networks {
            let next = u32::try_from(state.ids.len() + 1)
                .ok()
                .and_then(|id| NetworkId::try_from(id).ok());
            let Some(id) = state.ids.get(&spec.name).copied().or(next) else {
                continue;
            };
            state.ids.insert(spec.name.clone(), id);
            let known = state.networks.get(&spec.name);
            let had = known.is_some_and(|(known, _)| known.spec.blocks.iter().flatten().next().is_some());
            if !had && spec.blocks.iter().flatten().next().is_some() {
                self.observed.block(&self.name, spec.name.as_str());
            }
            state.ipam.set_network(&spec);
            networks.insert(spec.name.clone(), (Network { id, spec }, origin));
        }
        let gone: Vec<NetworkName> = state
            .networks
            .keys()
            .filter(|name| !networks.contains_key(*name))
            .cloned()
            .collect();
        for name in gone {
            state.ipam.remove_network(&name);
        }
        state.networks = networks;
        drop(state);
        self.announce();
    }

    fn apply_peers(&self, changes: PeerChanges) {
        {
            let mut engine = self.policies();
            for peer in &changes.put {
                engine.put_pod(peer.pod.clone());
            }
            for gone in &changes.gone {
                engine.remove_pod(gone);
            }
        }
        self.compile();
        for Peer { pod, .. } in changes.put {
            self.observed.peer(&self.name, &pod.pod.uid, &pod.labels);
        }
    }

    fn views(&self) -> Vec<NetworkView> {
        let state = self.state();
        let mut views: Vec<NetworkView> = state
            .networks
            .values()
            .map(|(network, origin)| view(&state, network, origin))
            .collect();
        views.sort_by_key(|view| !view.network.spec.default);
        views
    }

    fn status(&self) -> StatusView {
        let attached = u32::try_from(self.state().sandboxes.len()).unwrap_or(u32::MAX);
        StatusView {
            ready: true,
            reasons: Vec::new(),
            state_lost: None,
            hook: "tcx".to_owned(),
            pin_path: PathBuf::from("/sys/fs/bpf/kni"),
            sandboxes: attached,
            attachments: attached,
            endpoints_capacity: 1024,
            warm_sandboxes: 0,
            pending_removals: 0,
            pending_links: 0,
            uplink: UplinkView::default(),
        }
    }

    /// What the controllers read of the node.
    pub(crate) fn node_state(&self, cache: &ClusterCache) -> NodeState {
        let cache = cache.clone();
        NodeState {
            changes: self.changes(),
            sandboxes: self.read(|node| node.state().sandboxes.values().cloned().collect()),
            networks: self.read(Self::views),
            leases: self.read(|node| node.state().ipam.leases()),
            resting: self.read(|node| node.state().ipam.resting()),
            note_withdrawals: {
                let node = self.clone();
                Arc::new(move |withdrawn| {
                    node.note_withdrawals(&withdrawn);
                    Ok(())
                })
            },
            memberships: self.read(|node| {
                let state = node.state();
                let all = state.sandboxes.values().flat_map(|sandbox| {
                    let networks = sandbox.attachments.iter();
                    networks.map(|attachment| (sandbox.pod.clone(), attachment.network.clone()))
                });
                all.collect()
            }),
            enforcement: self.read(|_| Enforcement::default()),
            interfaces: self.read(|node| Interfaces {
                views: node.state().sandboxes.values().flat_map(interfaces).collect(),
                ..Interfaces::default()
            }),
            status: self.read(|node| (node.status(), node.views())),
            link_changes: self.link_changes.subscribe(),
            addresses: self.act(|node, ()| {
                let found = node.addresses.iter().map(|address| UnderlayAddress {
                    address: *address,
                    ifname: "uplink0".to_owned(),
                    mtu: MTU,
                });
                Ok(found.collect())
            }),
            apply_networks: self.act(|node, desired| {
                node.apply_networks(desired);
                Ok(())
            }),
            networks_applied: self.act(|_, ()| {}),
            relabel: self.act(move |node, ()| {
                node.relabel(&cache);
                true
            }),
            apply_peers: self.act(|node, changes| {
                node.apply_peers(changes);
                true
            }),
            apply_fabric: self.act(|node, _desired| {
                node.observed.fabric();
                true
            }),
        }
    }

    fn read<T>(&self, read: impl Fn(&Self) -> T + Send + Sync + 'static) -> Read<T> {
        let node = self.clone();
        Arc::new(move || read(&node))
    }

    fn act<T, R: Send + 'static>(&self, act: impl Fn(&Self, T) -> R + Send + Sync + 'static) -> Act<T, R> {
        let node = self.clone();
        Arc::new(move |argument| -> BoxFuture<'static, R> { futures::future::ready(act(&node, argument)).boxed() })
    }
}

fn view(state: &State, network: &Network, origin: &str) -> NetworkView {
    let spec = &network.spec;
    let usage = state.ipam.usage(&spec.name).unwrap_or_default();
    let family = |usage: &FamilyUsage| AddressUse {
        total: usage.total,
        used: usage.used,
        free: usage.free,
        resting: usage.resting,
    };
    let all = state.sandboxes.values().flat_map(|sandbox| &sandbox.attachments);
    let attachments = all.filter(|attachment| attachment.network == spec.name).count();
    NetworkView {
        network: network.clone(),
        ready: true,
        reason: String::new(),
        attachments: u32::try_from(attachments).unwrap_or(u32::MAX),
        total_addresses: usage.total,
        used_addresses: usage.used,
        ipv4: family(&usage.ipv4),
        ipv6: family(&usage.ipv6),
        exhausted: String::new(),
        origin: origin.to_owned(),
        features: spec.provider.features(),
        number: spec.number,
        number_problem: None,
        number_retained: false,
    }
}
