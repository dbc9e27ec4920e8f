//! Puts networks into force: numbers, address pools, dataplane routes, host rules.

use std::collections::BTreeMap;

use kni_dataplane::{NetworkRoutes, RouteEgress};
use kni_model::{
    Network, NetworkId, NetworkName, NetworkSpec, Provider,
    network::EgressMode,
    view::{RefusedManifest, WantedNetworks},
};
use kni_store::Change;

use super::{
    AttachError, Inner,
    error::{chain, kernel_of_node},
    state::{KnownNetwork, State},
};

impl Inner {
    pub(super) async fn apply_networks(&self, wanted: WantedNetworks) -> Result<(), AttachError> {
        let rules = {
            let mut state = self.state();
            let WantedNetworks { networks, mut refused } = wanted;
            let networks = keep_default(&state, networks, &mut refused);
            let networks = keep_providers(&state, networks, &mut refused);
            let known = self.number(&mut state, networks)?;
            self.replace(&mut state, known)?;
            state.refused = refused;
            state
                .default_network()
                .filter(|known| known.network.spec.provider.is_ebpf())
                .map(|known| known.network.spec.subnets.clone())
                .unwrap_or_default()
        };
        self.netlink
            .ensure_rules(&rules)
            .await
            .map_err(|error| kernel_of_node("writing the host's routing rules", &error))?;
        self.state().in_sync = true;
        self.warm_wanted.notify_one();
        Ok(())
    }

    /// Gives every network its number: the one it ever had, or a new one.
    fn number(
        &self,
        state: &mut State,
        wanted: Vec<(NetworkSpec, String)>,
    ) -> Result<BTreeMap<NetworkName, KnownNetwork>, AttachError> {
        let mut known = BTreeMap::new();
        for (spec, origin) in wanted {
            let name = spec.name.clone();
            let id = match state.network_ids.get(&name) {
                Some(id) => Ok(*id),
                None => unused_id(&state.network_ids).map_err(|reason| AttachError::Store(reason.to_owned())),
            }?;
            let network = Network { id, spec };
            // The next agent must know it even if its manifest is gone by then.
            if state.networks.get(&name).is_none_or(|known| known.network != network) {
                self.commit(Change::new().network(&network))?;
                state.network_ids.insert(name.clone(), id);
            }
            let orphaned = false;
            known.insert(
                name,
                KnownNetwork {
                    network,
                    origin,
                    orphaned,
                },
            );
        }
        Ok(known)
    }

    /// Makes `wanted` the known networks. One that is no longer wanted but has attachments stays, closed to new ones.
    fn replace(&self, state: &mut State, mut wanted: BTreeMap<NetworkName, KnownNetwork>) -> Result<(), AttachError> {
        let gone: Vec<NetworkName> = state
            .networks
            .keys()
            .filter(|name| !wanted.contains_key(*name))
            .cloned()
            .collect();
        for name in gone {
            if state.attachments_of(&name) > 0 {
                if let Some(known) = state.networks.get(&name) {
                    tracing::warn!(network = %name, "its manifest is gone, it stays until its last attachment goes");
                    wanted.insert(
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
        for known in wanted.values() {
            let Network { id, spec } = &known.network;
            if !known.orphaned {
                state.ipam.set_network(spec);
            }
            if !has_rows(spec) {
                continue;
            }
            self.dataplane
                .set_routes(*id, &routes_of(spec))
                .map_err(|error| kernel_of_node("writing the dataplane's routes", &error))?;
        }
        let ours = wanted.values().filter(|known| has_rows(&known.network.spec));
        let ids: Vec<NetworkId> = ours.map(|known| known.network.id).collect();
        self.dataplane
            .retain_routes(&ids)
            .map_err(|error| AttachError::Store(format!("removing routes of networks: {}", chain(&error))))?;
        state.networks = wanted;
        self.changed();
        Ok(())
    }
}

/// Whether the programs judge packets of the network.
fn has_rows(spec: &NetworkSpec) -> bool {
    matches!(spec.provider, Provider::Ebpf | Provider::Cni(_))
}

fn routes_of(spec: &NetworkSpec) -> NetworkRoutes {
    if matches!(spec.provider, Provider::Cni(_)) {
        // The plugins' datapath knows the ways.
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
            // The node's stack has no part in other networks, whose addresses may be anybody's.
            EgressMode::Route if spec.default => RouteEgress::Stack,
            EgressMode::None | EgressMode::Route => RouteEgress::None,
            EgressMode::Masquerade => RouteEgress::Masquerade {
                host_access: spec.default,
            },
        },
    }
}

/// Attachments have host access, or have not, for life: so the default network cannot change while it has any.
fn keep_default(
    state: &State,
    wanted: Vec<(NetworkSpec, String)>,
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
    for (spec, origin) in wanted {
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

/// Who makes the interfaces of a network does not change while it has some: its addresses and routes depend on it.
fn keep_providers(
    state: &State,
    wanted: Vec<(NetworkSpec, String)>,
    refused: &mut Vec<RefusedManifest>,
) -> Vec<(NetworkSpec, String)> {
    let keep = |(spec, origin): (NetworkSpec, String)| {
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
    wanted.into_iter().map(keep).collect()
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

fn unused_id(taken: &BTreeMap<NetworkName, NetworkId>) -> Result<NetworkId, &'static str> {
    let highest = taken.values().map(|id| id.get()).max().unwrap_or(0);
    NetworkId::try_from(highest + 1).map_err(|_out_of_range| "all network numbers are used up")
}
