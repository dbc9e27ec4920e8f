//! Manages egress: follows the uplink and applies source addresses and host ports of pods.
//! Layer: service.
//!
//! ```text
//! inputs (networks, pods, policies' egress addresses, the node's links, addresses and routes) -> rows and programs
//! ```
//!
//! Level-triggered: [`Uplink::keep`] retries failures. Nothing is changed before all inputs are known: an agent that
//! has just started removes nothing that is still in use (I3). The uplink is changed only while a pod or network needs
//! it.

mod carry_out;
mod cleanup;
mod desired;
mod error;
mod node;
mod node_sockets;
mod report;
mod rights;
mod shown;
mod underlay;
mod verify;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub use cleanup::cleanup;
pub use error::{LEAST_MTU, UnusableUplink, UplinkError};
use ipnet::IpNet;
use kni_dataplane::{Dataplane, XdpChoice};
use kni_enforcement::Enforcer;
use kni_model::{
    EndpointId, NetworkName, NetworkSpec, PortMapping, Sandbox, SandboxId,
    egress::{EgressRefusal, RefusedAddress},
    policy::PolicyPod,
};
use kni_netlink::{Changes, Netlink};
use kni_store::{Store, UplinkRecord};
pub use rights::EgressRights;
use tokio::sync::{Notify, watch};
pub use underlay::UnderlayAddress;

use self::report::shared_ports;
use self::{
    desired::UplinkPod,
    node::NodeNetwork,
    shown::{Held, Shown},
    verify::{LOOK_AGAIN, Verified},
};

/// Changes of the node's network come in bursts.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Pause after the first failure; each additional one doubles it, up to [`LONGEST_PAUSE`].
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The options of the operator.
#[derive(Debug, Clone)]
pub struct UplinkOptions {
    /// The interface; by default the interface of the default route.
    pub interface: Option<String>,
    /// Ports of the node's own addresses that masquerading may use.
    pub ports: RangeInclusive<u16>,
    /// Sources that are dropped at the uplink.
    pub deny: Vec<IpNet>,
    /// Whether packets from outside with a source in a network without routed egress are dropped.
    pub drop_bogons: bool,
    /// The mode of the XDP program, if it is enabled.
    pub xdp: XdpChoice,
}

/// Manages the uplink. Functions that are not async may block for some tens of milliseconds, unless stated otherwise.
///
/// # Guarantees
/// - When [`Self::admit`] returns, the egress of the pod is applied.
/// - A row never uses an address that neither the operator nor a policy requested: an interface that may not use one of
///   its addresses, or whose address cannot be added, has no egress.
/// - An address is on the uplink only while a user has the right to it ([`Uplink::set_rights`]), and only if no other
///   host answered for it before it was added. One that other nodes share is added only once the dataplane forwards for
///   them.
pub struct Uplink {
    options: UplinkOptions,
    dataplane: Arc<Dataplane>,
    netlink: Netlink,
    store: Store,
    policies: Arc<Enforcer>,
    runtime: tokio::runtime::Handle,
    /// Ports for masquerading that sockets of the node get, too.
    shared_ports: u32,
    /// Held by one sync at a time, before `state`: the node is read without the latter, because the kernel may take
    /// long.
    syncing: Mutex<()>,
    state: Mutex<State>,
    /// Detached pods that `state` still has: detaching a pod does not wait for a change that is being carried out.
    departed: Mutex<Vec<SandboxId>>,
    /// What operators see of `state`, as of the moment at which it was last released.
    shown: Mutex<Shown>,
    wake: Notify,
    /// Pods were detached.
    gone: Notify,
    /// Notifies of changes of the node's network.
    network_changes: watch::Sender<()>,
    /// The version of the rights that were applied last.
    applied: watch::Sender<u64>,
    /// The addresses with which the dataplane forwards for other nodes once they are on the uplink.
    answered: watch::Receiver<BTreeSet<IpAddr>>,
}

#[derive(Default)]
struct State {
    node: NodeNetwork,
    /// `None` until they are known.
    networks: Option<BTreeMap<NetworkName, NetworkSpec>>,
    /// Whether all pods of earlier agents were admitted.
    has_pods: bool,
    pods: BTreeMap<SandboxId, UplinkPod>,
    record: UplinkRecord,
    problem: Option<String>,
    /// `None` until they are known.
    rights: Option<EgressRights>,
    /// Addresses that this node takes for pods of other nodes.
    answering: BTreeSet<IpAddr>,
    /// Those of them that cannot be used on this link, with the reasons.
    not_answered: BTreeMap<IpAddr, EgressRefusal>,
    /// Increases whenever the rights are replaced; the second number is that of the rights that were applied last.
    rights_version: (u64, u64),
    /// What is known of addresses that are not on the uplink.
    verified: BTreeMap<IpAddr, Verified>,
    /// Addresses added since the last announcement.
    added: BTreeSet<IpAddr>,
    /// The interfaces that nothing leaves, with the addresses that they would have to leave with.
    refused: BTreeMap<EndpointId, Vec<RefusedAddress>>,
    /// Connected subnets that were already logged as an exception from the bogon filter.
    logged: Vec<IpNet>,
    host_ports: usize,
    /// Why the node's own processes do not reach them.
    node_unserved: Option<String>,
    /// The pods that UDP ports led to when the node's sockets were compared with them last.
    node_targets: Option<BTreeSet<SocketAddr>>,
    /// Whether a detached pod left something behind that the next sync removes.
    is_stale: bool,
}

impl State {
    fn is_complete(&self) -> bool {
        self.networks.is_some() && self.has_pods && self.rights.is_some()
    }
}

impl Uplink {
    /// Reads the node's network and passes it to the dataplane, which needs it for networks that masquerade. Call it
    /// inside a tokio runtime, in the node's network namespace.
    pub async fn start(
        options: UplinkOptions,
        dataplane: Arc<Dataplane>,
        store: Store,
        policies: Arc<Enforcer>,
    ) -> Result<(Arc<Self>, Changes), UplinkError> {
        // Subscribed before the first read, so that no change is missed.
        let changes = Netlink::watch()?;
        let netlink = Netlink::new()?;
        let record = store.uplink();
        let node = node::read(&netlink, options.interface.as_deref(), &record.addresses).await?;
        dataplane.set_node_routes(node.routes())?;
        log_uplink(&node);
        let shared_ports = shared_ports(&options.ports);
        let answered = dataplane.answered_addresses();
        let state = State {
            node,
            record,
            ..State::default()
        };
        let uplink = Self {
            options,
            dataplane,
            netlink,
            store,
            policies,
            runtime: tokio::runtime::Handle::current(),
            shared_ports,
            syncing: Mutex::new(()),
            shown: Mutex::new(Shown::of(&state)),
            state: Mutex::new(state),
            departed: Mutex::default(),
            wake: Notify::new(),
            gone: Notify::new(),
            network_changes: watch::Sender::new(()),
            applied: watch::Sender::new(0),
            answered,
        };
        Ok((Arc::new(uplink), changes))
    }

    fn state(&self) -> Held<'_> {
        let mut state = Held::new(lock(&self.state), &self.shown);
        for sandbox in std::mem::take(&mut *lock(&self.departed)) {
            let gone = state.pods.remove(&sandbox);
            // Most pods have no host ports and no dedicated addresses.
            let had_ports = gone.is_some_and(|known| has_host_port(&known.mappings));
            state.is_stale |= had_ports || !state.record.addresses.is_empty();
        }
        state
    }

    /// Applies the egress of a pod, before its traffic begins. Until all inputs are known the pod is only recorded.
    pub fn admit(&self, pod: &PolicyPod) -> Result<(), UplinkError> {
        let mut state = self.state();
        let mappings = state.pods.remove(&pod.sandbox).map(|known| known.mappings);
        let known = UplinkPod {
            pod: pod.clone(),
            mappings: mappings.unwrap_or_default(),
        };
        state.pods.insert(pod.sandbox.clone(), known);
        if state.is_complete() {
            self.carry_out_pod(&mut state, pod)
        } else {
            Ok(())
        }
    }

    /// Marks all pods of earlier agents as admitted. Does not block.
    pub fn adopted(&self) {
        self.state().has_pods = true;
        self.wake.notify_one();
    }

    /// Applies the host ports of a pod whose interfaces have been published.
    pub fn published(&self, sandbox: &Sandbox) -> Result<(), UplinkError> {
        let mut state = self.state();
        let known = UplinkPod {
            pod: sandbox.policy_pod(),
            mappings: sandbox.port_mappings.clone(),
        };
        state.pods.insert(sandbox.id.clone(), known);
        if state.is_complete() && has_host_port(&sandbox.port_mappings) {
            self.carry_out_host_ports(&mut state)?;
        }
        Ok(())
    }

    /// Removes a pod: its rows were removed with its endpoints, the rest is removed in the background. Does not block.
    pub fn leave(&self, sandbox: &SandboxId) {
        lock(&self.departed).push(sandbox.clone());
        self.gone.notify_one();
    }

    /// Replaces the networks. [`Self::sync`] applies them. Waits for a change that is being carried out.
    pub fn set_networks(&self, networks: BTreeMap<NetworkName, NetworkSpec>) {
        self.state().networks = Some(networks);
    }

    /// Reads the node's network again and applies the whole desired state.
    pub fn sync(&self) -> Result<(), UplinkError> {
        let _one_at_a_time = lock(&self.syncing);
        let (mut state, node) = loop {
            let ours = self.state().record.addresses.clone();
            let node = self.read_node(&ours);
            let state = self.state();
            // A pod admitted meanwhile may have added an address, which must not be taken for an address of the node.
            if state.record.addresses == ours {
                break (state, node);
            }
        };
        state.is_stale = false;
        let done = node.and_then(|node| self.carry_out(&mut state, node));
        let problem = done.as_ref().err().map(ToString::to_string);
        if state.problem != problem {
            if let Some(reason) = &problem {
                tracing::error!(reason, "egress of the node is not applied");
            } else {
                tracing::info!("egress of the node is applied again");
            }
            state.problem = problem;
        }
        done
    }

    /// Follows the node's network and retries failures. Never returns.
    pub async fn keep(self: Arc<Self>, mut changes: Changes) {
        let mut pause = SHORTEST_PAUSE;
        let mut answered = self.answered.clone();
        loop {
            let asked = Arc::clone(&self);
            let again = tokio::task::spawn_blocking(move || {
                let state = asked.state();
                let conflict = state.has_conflict().then_some(LOOK_AGAIN);
                state.problem.as_ref().map(|_| pause).or(conflict)
            });
            let again = again.await.unwrap_or(Some(pause));
            let failed = again.is_some();
            let retry = async {
                match again {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending::<()>().await,
                }
            };
            let due = kni_tasks::waiting(async {
                tokio::select! {
                    () = changes.changed() => {
                        self.network_changes.send_replace(());
                        true
                    }
                    () = self.wake.notified() => true,
                    Ok(()) = answered.changed() => true,
                    () = self.gone.notified() => {
                        let asked = Arc::clone(&self);
                        let stale = tokio::task::spawn_blocking(move || asked.state().is_stale);
                        // While a retry is due, its pause must not begin anew with each pod.
                        stale.await.unwrap_or(true) || failed
                    }
                    () = retry => true,
                }
            })
            .await;
            if !due {
                continue;
            }
            tokio::time::sleep(DEBOUNCE).await;
            let uplink = Arc::clone(&self);
            let synced = tokio::task::spawn_blocking(move || {
                uplink.verify();
                let synced = uplink.sync();
                uplink.announce();
                synced
            })
            .await;
            pause = if matches!(synced, Ok(Ok(()))) {
                SHORTEST_PAUSE
            } else {
                pause.saturating_mul(2).min(LONGEST_PAUSE)
            };
        }
    }

    /// Attaches the programs again, in the background, if another process has detached them.
    pub fn check_programs(&self) {
        let Ok(state) = self.state.try_lock() else {
            return;
        };
        let used = Self::needs_programs(&state) && state.is_complete() && state.problem.is_none();
        let Some(uplink) = state.node.uplink.clone().filter(|_| used) else {
            return;
        };
        drop(state);
        if !self.dataplane.uplink_is_attached(&uplink.ifname, uplink.ifindex) {
            tracing::warn!(ifname = %uplink.ifname, "the programs of the uplink are detached; attaching them again");
            self.wake.notify_one();
        }
    }

    /// Ports for masquerading that the kernel gives to sockets of the node, too, as of the start.
    pub fn shared_ports(&self) -> u32 {
        self.shared_ports
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it was held is a bug; the next sync starts from the state of the kernel.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn has_host_port(mappings: &[PortMapping]) -> bool {
    mappings.iter().any(|mapping| mapping.host_port != 0)
}

fn log_uplink(node: &NodeNetwork) {
    if let Some(uplink) = &node.uplink {
        tracing::info!(ifname = %uplink.ifname, ipv4 = ?uplink.ipv4, ipv6 = ?uplink.ipv6, "the uplink of the node");
    } else if let Some(unusable) = &node.unusable {
        tracing::warn!(%unusable, "the node has no uplink");
    } else {
        tracing::info!("the node has no uplink");
    }
}
