//! Owns the networks: numbers, address pools, dataplane routes, the node's routing rules, and their views.

mod views;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use ipnet::IpNet;
use kni_dataplane::{NetworkRoutes, RouteEgress};
use kni_model::{
    Feature, Network, NetworkId, NetworkName, NetworkSpec, NumberProblem, Provider,
    network::EgressMode,
    number_in_use,
    view::{DesiredNetworks, NetworkView, RefusedManifest},
};
use kni_plugins::{NotReady, Plugins};
use kni_store::Change;

use self::views::{close_shared, closed, view};
use crate::{
    error::{AttachError, ErrorKind, Subject},
    interfaces::NO_BACKEND,
    kernel::Kernel,
    registry::{KnownNetwork, Locked, Registry, State},
};

/// Why the plugins of a network cannot be run.
#[derive(Debug, thiserror::Error)]
enum PluginProblem {
    #[error("{NO_BACKEND}")]
    NoBackend,
    #[error(transparent)]
    NotReady(#[from] NotReady),
}

/// The networks of the node.
pub(crate) struct NetworkRegistry {
    registry: Arc<Registry>,
    kernel: Arc<Kernel>,
    plugins: Option<Plugins>,
    /// The routes in the dataplane's tables, as this process wrote them. Held by one [`Self::apply`] at a time, before
    /// the state's lock: routes of hundreds of networks are written without the latter.
    routes: Mutex<BTreeMap<NetworkId, NetworkRoutes>>,
}

impl NetworkRegistry {
    pub(crate) fn new(registry: &Arc<Registry>, kernel: &Arc<Kernel>, plugins: Option<Plugins>) -> Self {
        Self {
            registry: Arc::clone(registry),
            kernel: Arc::clone(kernel),
            plugins,
            routes: Mutex::default(),
        }
    }

    /// Replaces the networks. Attaching begins to work with the first call.
    pub(crate) async fn apply(self: &Arc<Self>, desired: DesiredNetworks) -> Result<(), AttachError> {
        let networks = Arc::clone(self);
        let replaced = tokio::task::spawn_blocking(move || networks.replace(desired)).await;
        let rules = replaced.map_err(|error| Subject::node().ended(&error))??;
        let written = self.kernel.netlink.ensure_rules(&rules).await;
        written.map_err(Subject::node().failed("writing the host's routing rules"))?;
        self.registry.lock().in_sync = true;
        self.registry.background.notify_one();
        Ok(())
    }

    /// Makes the desired networks the known ones; returns the subnets of the default one that the node's stack routes.
    fn replace(&self, desired: DesiredNetworks) -> Result<Vec<IpNet>, AttachError> {
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, refused) = {
            let mut state = self.registry.lock();
            let DesiredNetworks {
                mut networks,
                mut refused,
                retained,
                number_problems,
            } = desired;
            let known = retained.iter().filter_map(|name| state.networks.get(name));
            // Before the first call, every network of an earlier agent is without an object.
            let known = known.filter(|known| !known.orphaned || !state.in_sync);
            networks.extend(known.map(|known| (known.network.spec.clone(), known.origin.clone())));
            let networks = retain_default(&state, networks, &mut refused);
            let mut networks = retain_providers(&state, networks, &mut refused);
            let problems = retain_numbers(&state, &mut networks, &number_problems);
            (number(&mut state, networks, problems)?, refused)
        };
        self.write_routes(&mut routes, &known)?;
        let mut state = self.registry.lock();
        self.know(&mut state, &mut routes, known)?;
        state.refused = refused;
        let default = state.default_network().map(|known| &known.network.spec);
        let default = default.filter(|spec| spec.provider.is_ebpf());
        Ok(default.map(|spec| spec.subnets.clone()).unwrap_or_default())
    }

    /// Writes the routes that differ from the written ones.
    fn write_routes(
        &self,
        written: &mut BTreeMap<NetworkId, NetworkRoutes>,
        desired: &BTreeMap<NetworkName, KnownNetwork>,
    ) -> Result<(), AttachError> {
        for known in desired.values().filter(|known| has_rows(&known.network.spec)) {
            let Network { id, spec } = &known.network;
            let routes = routes_of(spec);
            if written.get(id) == Some(&routes) {
                continue;
            }
            written.remove(id);
            let done = self.kernel.dataplane.set_routes(*id, &routes);
            done.map_err(Subject::node().failed("writing the dataplane's routes"))?;
            written.insert(*id, routes);
        }
        Ok(())
    }

    /// Makes `desired` the known networks. One that is no longer desired but has attachments stays, closed to new ones.
    fn know(
        &self,
        state: &mut Locked<'_>,
        routes: &mut BTreeMap<NetworkId, NetworkRoutes>,
        mut desired: BTreeMap<NetworkName, KnownNetwork>,
    ) -> Result<(), AttachError> {
        let gone: Vec<NetworkName> = state
            .networks
            .keys()
            .filter(|name| !desired.contains_key(*name))
            .cloned()
            .collect();
        for name in gone {
            if state.attachments_of(&name) > 0 {
                if let Some(known) = state.networks.get(&name) {
                    tracing::warn!(network = %name, "its manifest is gone, it stays until its last attachment goes");
                    desired.insert(
                        name,
                        KnownNetwork {
                            orphaned: true,
                            ..known.clone()
                        },
                    );
                }
            } else {
                state.ipam.remove_network(&name);
            }
        }
        for known in desired.values().filter(|known| !known.orphaned) {
            state.ipam.set_network(&known.network.spec);
        }
        // Those of an orphan that an earlier agent left.
        self.write_routes(routes, &desired)?;
        let ours = desired.values().filter(|known| has_rows(&known.network.spec));
        let ids: Vec<NetworkId> = ours.map(|known| known.network.id).collect();
        routes.retain(|id, _| ids.contains(id));
        let retained = self.kernel.dataplane.retain_routes(&ids);
        retained.map_err(Subject::node().failed("removing routes of networks"))?;
        state.networks = desired;
        state.announce();
        Ok(())
    }

    /// The networks, the default one first, then by name, without what their plugins report. Does not block.
    pub(crate) fn views(&self) -> Vec<NetworkView> {
        let state = self.registry.lock();
        let mut views: Vec<NetworkView> = state.networks.values().map(|known| view(&state, known)).collect();
        drop(state);
        close_shared(&mut views);
        views.sort_by_key(|view| !view.network.spec.default);
        views
    }

    /// [`Self::views`] with the readiness and the features of their plugins. Reads the files of plugins.
    pub(crate) fn views_with_plugins(&self) -> Vec<NetworkView> {
        let mut views = self.views();
        for view in &mut views {
            self.add_readiness(view);
        }
        views
    }

    fn add_readiness(&self, view: &mut NetworkView) {
        match self.plugin_readiness(&view.network.spec.provider) {
            Some(Ok(capabilities)) => view.features.retain(|feature| match feature {
                Feature::HostPorts => capabilities.contains("portMappings"),
                Feature::Bandwidth => capabilities.contains("bandwidth"),
                Feature::Addresses
                | Feature::Ipv4
                | Feature::Ipv6
                | Feature::Mtu
                | Feature::Mac
                | Feature::Status
                | Feature::DefaultNetwork
                | Feature::Policy
                | Feature::Services
                | Feature::Egress
                | Feature::Isolation
                | Feature::Xdp => true,
            }),
            Some(Err(reason)) if view.ready => {
                view.ready = false;
                view.reason = reason.to_string();
            }
            // No plugins, or the network has a reason of its own.
            None | Some(Err(_)) => {}
        }
    }

    /// The default network, and why no pod can be attached to it. May read the files of plugins.
    pub(crate) fn default_problem(&self) -> Option<(NetworkName, String)> {
        let (default, closed) = {
            let state = self.registry.lock();
            let known = state.default_network()?;
            (known.network.spec.clone(), closed(known))
        };
        if let Some(reason) = closed {
            return Some((default.name, reason.to_owned()));
        }
        let reason = self.plugin_readiness(&default.provider)?.err()?;
        Some((default.name, reason.to_string()))
    }

    /// Whether the plugins of a network can be run, and the capabilities that they declare.
    fn plugin_readiness(&self, provider: &Provider) -> Option<Result<BTreeSet<String>, PluginProblem>> {
        let Provider::Cni(source) = provider else { return None };
        let plugins = self.plugins.as_ref().ok_or(PluginProblem::NoBackend);
        Some(plugins.and_then(|plugins| Ok(plugins.readiness(source)?)))
    }
}

/// Gives every network its number on this node: its earlier one, or a new one. All of them are recorded in one
/// transaction.
fn number(
    state: &mut Locked<'_>,
    desired: Vec<(NetworkSpec, String)>,
    mut problems: BTreeMap<NetworkName, NumberProblem>,
) -> Result<BTreeMap<NetworkName, KnownNetwork>, AttachError> {
    let mut known = BTreeMap::new();
    let mut ids = state.network_ids.clone();
    let mut change = None;
    for (rank, (spec, origin)) in desired.into_iter().enumerate() {
        let name = spec.name.clone();
        let id = match ids.get(&name) {
            Some(id) => *id,
            None => unused_id(&ids)?,
        };
        let network = Network { id, spec };
        // The next agent must know the number even if the network's manifest is gone by then.
        if state.networks.get(&name).is_none_or(|known| known.network != network) {
            change = Some(change.unwrap_or_else(Change::new).network(&network));
            ids.insert(name.clone(), id);
        }
        let orphaned = false;
        let number_problem = problems.remove(&name);
        known.insert(
            name,
            KnownNetwork {
                network,
                origin,
                orphaned,
                rank,
                number_problem,
            },
        );
    }
    if let Some(change) = change {
        state.commit_deferred(change)?;
        state.network_ids = ids;
    }
    Ok(known)
}

/// Whether the programs process packets of the network.
fn has_rows(spec: &NetworkSpec) -> bool {
    matches!(spec.provider, Provider::Ebpf | Provider::Cni(_))
}

fn routes_of(spec: &NetworkSpec) -> NetworkRoutes {
    if matches!(spec.provider, Provider::Cni(_)) {
        // The plugins' datapath has the routes.
        return NetworkRoutes {
            subnets: Vec::new(),
            service_subnets: Vec::new(),
            egress: RouteEgress::Stack,
        };
    }
    NetworkRoutes {
        subnets: spec.subnets.clone(),
        service_subnets: spec.service_subnets.clone(),
        egress: match spec.egress {
            // The node's stack does not route other networks, whose addresses may overlap with the node's.
            EgressMode::Route if spec.default => RouteEgress::Stack,
            EgressMode::None | EgressMode::Route => RouteEgress::None,
            EgressMode::Masquerade => RouteEgress::Masquerade {
                host_access: spec.default,
            },
        },
    }
}

/// Host access of an attachment is fixed for its lifetime, so the default network cannot change while it has
/// attachments.
fn retain_default(
    state: &State,
    desired: Vec<(NetworkSpec, String)>,
    refused: &mut Vec<RefusedManifest>,
) -> Vec<(NetworkSpec, String)> {
    let changes_default = |spec: &NetworkSpec| {
        state
            .networks
            .get(&spec.name)
            .is_some_and(|known| known.network.spec.default != spec.default && state.attachments_of(&spec.name) > 0)
    };
    let occupied = state
        .default_network()
        .map(|known| known.network.spec.name.clone())
        .filter(|name| state.attachments_of(name) > 0);
    let mut kept = Vec::new();
    for (spec, origin) in desired {
        let second = spec.default && occupied.as_ref().is_some_and(|name| *name != spec.name);
        if changes_default(&spec) || second {
            let blocker = occupied.as_ref().unwrap_or(&spec.name);
            refused.push(refusal(
                &origin,
                format!("the default network cannot change while pods are attached to {blocker}"),
            ));
            if let Some(known) = state.networks.get(&spec.name) {
                kept.push((known.network.spec.clone(), known.origin.clone()));
            }
        } else {
            kept.push((spec, origin));
        }
    }
    kept
}

/// The provider of a network does not change while it has interfaces: its addresses and routes depend on it.
fn retain_providers(
    state: &State,
    desired: Vec<(NetworkSpec, String)>,
    refused: &mut Vec<RefusedManifest>,
) -> Vec<(NetworkSpec, String)> {
    let retain = |(spec, origin): (NetworkSpec, String)| {
        let known = state.networks.get(&spec.name).filter(|known| {
            let present = known.network.spec.provider.as_str();
            present != spec.provider.as_str() && state.attachments_of(&spec.name) > 0
        });
        let Some(known) = known else { return (spec, origin) };
        refused.push(RefusedManifest {
            field: "spec.provider".to_owned(),
            ..refusal(&origin, "the type cannot change while pods are attached".to_owned())
        });
        (known.network.spec.clone(), known.origin.clone())
    };
    desired.into_iter().map(retain).collect()
}

/// Other nodes know the pods of a network by its number in the cluster: the one that the first of them began with stays
/// until the last one has left. It is recorded with the network. Returns why networks have none or another one.
fn retain_numbers(
    state: &State,
    desired: &mut [(NetworkSpec, String)],
    problems: &BTreeMap<NetworkName, NumberProblem>,
) -> BTreeMap<NetworkName, NumberProblem> {
    let mut found = BTreeMap::new();
    for (spec, _) in desired {
        let known = state.networks.get(&spec.name);
        let known = known.filter(|known| state.attachments_of(&known.network.spec.name) > 0);
        let retained = known.and_then(|known| known.network.spec.number);
        let (number, problem) = number_in_use(retained, spec.number, problems.get(&spec.name));
        if let Some(problem) = &problem
            && problem.is_conflict()
            && known.is_some_and(|known| known.number_problem.as_ref() != Some(problem))
        {
            tracing::warn!(network = %spec.name, %problem, "the number of a network changes only without pods");
        }
        spec.number = number;
        found.extend(problem.map(|problem| (spec.name.clone(), problem)));
    }
    found
}

fn refusal(origin: &str, reason: String) -> RefusedManifest {
    let (file, line) = origin.rsplit_once(':').unwrap_or((origin, "0"));
    RefusedManifest {
        file: file.to_owned(),
        line: line.parse().unwrap_or(0),
        field: "spec.default".to_owned(),
        reason,
    }
}

fn unused_id(taken: &BTreeMap<NetworkName, NetworkId>) -> Result<NetworkId, AttachError> {
    let highest = taken.values().map(|id| id.get()).max().unwrap_or(0);
    NetworkId::try_from(highest + 1)
        .map_err(|_out_of_range| Subject::node().error(ErrorKind::Store("all network numbers are used up".to_owned())))
}
