//! Keeps the addresses of pods that are gone from other pods for as long as other nodes may take them for the old ones.
//!
//! Other nodes learn a pod's addresses from what this node has written at the API server. After a pod is gone, its
//! addresses rest: until that is withdrawn, which the controllers report, and [`kni_ipam::REST`] longer. The store
//! records each rest in the transaction that ends the lease, so a restart neither shortens nor omits it. The record
//! stays while the last owner has the address again, in case it is returned unused. A reboot removes the records: then
//! all addresses rest that the cluster still lists for pods of the node. Without a cluster no other node knows the
//! addresses, and none rests.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use kni_model::{NetworkName, Phase, PodRef, Sandbox, SandboxId};
use kni_store::{AddressRest, Change};

use crate::{
    clock::since_boot,
    error::AttachError,
    registry::{Locked, Registry, State},
};

/// Records are looked at this often while there are any.
const ROUND: Duration = Duration::from_secs(1);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// The owner of the leases of a sandbox, as errors name it.
pub(crate) fn lease_owner(pod: &PodRef, sandbox: &SandboxId) -> String {
    format!("pod {pod} (sandbox {sandbox})")
}

impl State {
    /// The rests that follow the leases of a sandbox. One that was never ready was reported to no other node.
    pub(crate) fn rests_after(&self, sandbox: &Sandbox) -> Vec<AddressRest> {
        if !self.in_cluster || sandbox.phase == Phase::Pending {
            return Vec::new();
        }
        let leased = sandbox.attachments.iter().filter(|made| made.kind.is_leased());
        let rest = |network: &NetworkName, address| AddressRest {
            network: network.clone(),
            address,
            owner: lease_owner(&sandbox.pod, &sandbox.id),
            withdrawn: None,
        };
        leased
            .flat_map(|made| made.addresses().map(|address| rest(&made.network, address)))
            .collect()
    }

    /// Begins rests that are recorded. Their addresses are leased until now.
    pub(crate) fn begin_rests(&mut self, rests: Vec<AddressRest>) {
        for rest in rests {
            let (v4, v6) = families(rest.address);
            self.ipam.rest(&rest.network, v4, v6);
            self.rests.insert((rest.network.clone(), rest.address), rest);
        }
    }

    /// Adopts the rests that an earlier agent has recorded, after its leases.
    pub(crate) fn adopt_rests(&mut self, rests: Vec<AddressRest>) {
        if !self.in_cluster {
            return;
        }
        for rest in rests {
            let AddressRest {
                network,
                address,
                owner,
                withdrawn,
            } = &rest;
            self.ipam.adopt_rest(network, *address, owner, *withdrawn);
            self.rests.insert((network.clone(), *address), rest);
        }
    }

    /// The rests of addresses that the cluster still lists for pods of this node, and that are neither attached here
    /// nor resting: a reboot has removed their records.
    pub(crate) fn rests_of_reported(&self, reported: Vec<(NetworkName, IpAddr, PodRef)>) -> Vec<AddressRest> {
        if !self.in_cluster {
            return Vec::new();
        }
        let attached: BTreeSet<(&NetworkName, IpAddr)> = self
            .attachments()
            .flat_map(|(_, made)| made.addresses().map(move |address| (&made.network, address)))
            .collect();
        let is_unknown = |network: &NetworkName, address: IpAddr| {
            !attached.contains(&(network, address)) && !self.rests.contains_key(&(network.clone(), address))
        };
        let unknown = reported
            .into_iter()
            .filter(|(network, address, _)| is_unknown(network, *address));
        unknown
            .map(|(network, address, pod)| AddressRest {
                network,
                address,
                owner: format!("pod {pod} (before a reboot)"),
                withdrawn: None,
            })
            .collect()
    }

    /// Ends leases that were never used. An address that its last owner had taken up again rests as before.
    pub(crate) fn return_unused(&mut self, network: &NetworkName, addresses: impl IntoIterator<Item = IpAddr>) {
        for address in addresses {
            let (v4, v6) = families(address);
            self.ipam.release(network, v4, v6);
            if let Some(rest) = self.rests.get(&(network.clone(), address)) {
                self.ipam.adopt_rest(network, address, &rest.owner, rest.withdrawn);
            }
        }
    }
}

fn families(address: IpAddr) -> (Option<Ipv4Addr>, Option<Ipv6Addr>) {
    match address {
        IpAddr::V4(v4) => (Some(v4), None),
        IpAddr::V6(v6) => (None, Some(v6)),
    }
}

/// Begins rests of addresses that the cluster still lists for pods of this node, and that it has no record of. They
/// begin also where they cannot be recorded.
pub(crate) fn rest_reported(
    registry: &Registry,
    reported: Vec<(NetworkName, IpAddr, PodRef)>,
) -> Result<usize, AttachError> {
    let mut state = registry.lock();
    let rests = state.rests_of_reported(reported);
    let count = rests.len();
    if rests.is_empty() {
        return Ok(count);
    }
    let change = rests.iter().fold(Change::new(), Change::rest);
    state.adopt_rests(rests);
    let recorded = state.commit_deferred(change);
    drop(state);
    registry.rests.notify_one();
    recorded.map(|()| count)
}

/// Notes which resting addresses other nodes may still take for their last owners.
pub(crate) fn note_withdrawals(
    registry: &Registry,
    is_withdrawn: impl Fn(&NetworkName, IpAddr) -> bool,
) -> Result<(), AttachError> {
    let mut state = registry.lock();
    let now = since_boot();
    let differs = |rest: &&AddressRest| rest.withdrawn.is_some() != is_withdrawn(&rest.network, rest.address);
    let changed: Vec<AddressRest> = state
        .rests
        .values()
        .filter(differs)
        .map(|rest| AddressRest {
            withdrawn: rest.withdrawn.is_none().then_some(now),
            ..rest.clone()
        })
        .collect();
    if changed.is_empty() {
        return Ok(());
    }
    state.commit_deferred(changed.iter().fold(Change::new(), Change::rest))?;
    for rest in changed {
        state.ipam.set_withdrawn(&rest.network, rest.address, rest.withdrawn);
        state.rests.insert((rest.network.clone(), rest.address), rest);
    }
    drop(state);
    registry.rests.notify_one();
    Ok(())
}

/// Ends rests when their time is over. Never ends.
pub(crate) async fn run(registry: Arc<Registry>) {
    loop {
        let pause = {
            let state = registry.lock();
            let next = state.ipam.next_end_of_rest();
            let pause = next.map_or(ROUND, |end| end.saturating_sub(since_boot()).min(ROUND));
            (!state.rests.is_empty()).then_some(pause)
        };
        kni_tasks::waiting(async {
            match pause {
                Some(pause) => {
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = registry.rests.notified() => {}
                    }
                }
                None => registry.rests.notified().await,
            }
        })
        .await;
        let ended = end(&mut registry.lock());
        if let Err(error) = ended {
            tracing::warn!(%error, "cannot record that addresses are free again");
            tokio::time::sleep(RETRY).await;
        }
    }
}

fn end(state: &mut Locked<'_>) -> Result<(), AttachError> {
    let now = since_boot();
    let ended = state.ipam.end_rests(now);
    if !ended.is_empty() {
        state.announce();
    }
    let is_over = |rest: &&AddressRest| rest.withdrawn.is_some_and(|at| state.ipam.end_of_rest(at) <= now);
    let over: Vec<AddressRest> = state.rests.values().filter(is_over).cloned().collect();
    if over.is_empty() {
        return Ok(());
    }
    let mut removed = Change::new();
    for rest in &over {
        state.rests.remove(&(rest.network.clone(), rest.address));
        removed = removed.remove_rest(&rest.network, rest.address);
    }
    state.commit_deferred(removed)
}

#[cfg(test)]
mod tests {
    use kni_ipam::{IpamError, REST};
    use kni_model::NetworkSpec;
    use serde_json::json;

    use super::*;

    fn blue() -> NetworkName {
        "blue".parse().unwrap()
    }

    /// A cluster's state with a network of one address.
    fn state() -> State {
        let spec: NetworkSpec = serde_json::from_value(json!({
            "name": "blue", "default": false, "enabled": true, "subnets": ["10.0.0.0/30"], "exclude_subnets": [],
            "mtu": 1500, "egress": "Route",
        }))
        .unwrap();
        let mut state = State::new(8, true);
        state.ipam.set_network(&spec);
        state
    }

    /// Leases the address to a sandbox.
    fn leased(state: &mut State, id: &str, phase: &str) -> Result<Sandbox, IpamError> {
        let sandbox: Sandbox = serde_json::from_value(json!({
            "id": id, "pod": { "namespace": "shop", "name": "web", "uid": "u" }, "phase": phase,
            "netns": "/run/netns/x", "netns_identity": { "dev": 4, "inode": 5 }, "labels": {}, "port_mappings": [],
            "attachments": [{
                "endpoint": 7, "network": "blue", "network_id": 9, "ifname": "eth0", "ifindex": 2, "host_ifname": "kni7",
                "host_ifindex": 1007, "mac": "02:00:00:00:00:07", "host_mac": "02:00:00:00:00:08", "ipv4": "10.0.0.2",
                "ipv6": null, "mtu": 1500, "default_route": true, "host_access": true,
            }],
        }))
        .unwrap();
        let owner = lease_owner(&sandbox.pod, &sandbox.id);
        state
            .ipam
            .lease(&blue(), &owner, &[], Duration::ZERO)
            .map(|_lease| sandbox)
    }

    /// As a detach does.
    fn detach(state: &mut State, sandbox: &Sandbox) -> Vec<AddressRest> {
        let rests = state.rests_after(sandbox);
        state.begin_rests(rests.clone());
        for made in &sandbox.attachments {
            state.return_unused(&made.network, made.addresses());
        }
        rests
    }

    #[test]
    fn only_an_address_that_others_may_know_rests() {
        let mut state = state();
        let pending = leased(&mut state, "s1", "Pending").unwrap();
        assert_eq!(detach(&mut state, &pending), []);
        let ready = leased(&mut state, "s2", "Ready").unwrap();
        assert_eq!(detach(&mut state, &ready).len(), 1);
        assert!(matches!(
            leased(&mut state, "s3", "Pending"),
            Err(IpamError::AllRest { .. })
        ));
        state.in_cluster = false;
        assert_eq!(state.rests_after(&ready), []);
    }

    #[test]
    fn an_address_that_its_last_owner_returns_unused_rests_on() {
        let mut state = state();
        let ready = leased(&mut state, "s1", "Ready").unwrap();
        detach(&mut state, &ready);
        let again = leased(&mut state, "s1", "Pending").unwrap();
        assert_eq!(detach(&mut state, &again), []);
        assert!(matches!(
            leased(&mut state, "s2", "Pending"),
            Err(IpamError::AllRest { .. })
        ));
    }

    #[test]
    fn what_the_cluster_still_lists_rests_after_a_reboot() {
        let mut state = state();
        let address: IpAddr = "10.0.0.2".parse().unwrap();
        let reported = || vec![(blue(), address, PodRef::named("shop", "web"))];
        let rests = state.rests_of_reported(reported());
        assert_eq!(rests.len(), 1);
        state.adopt_rests(rests);
        assert!(matches!(
            leased(&mut state, "s1", "Pending"),
            Err(IpamError::AllRest { .. })
        ));
        assert_eq!(state.ipam.next_end_of_rest(), None, "it is not withdrawn yet");
        assert_eq!(state.rests_of_reported(reported()), [], "it rests already");
        state.in_cluster = false;
        state.rests.clear();
        assert_eq!(state.rests_of_reported(reported()), []);
    }

    #[test]
    fn an_attached_address_does_not_rest_after_a_restart() {
        let mut state = state();
        let ready = leased(&mut state, "s1", "Ready").unwrap();
        let pod = ready.pod.clone();
        state.sandboxes.insert(ready.id.clone(), Arc::new(ready));
        let reported = vec![(blue(), "10.0.0.2".parse().unwrap(), pod)];
        assert_eq!(state.rests_of_reported(reported), []);
    }

    #[test]
    fn the_records_of_an_earlier_agent_count() {
        let mut state = state();
        let withdrawn = Some(Duration::from_secs(100));
        let rest = AddressRest {
            network: blue(),
            address: "10.0.0.2".parse().unwrap(),
            owner: "pod shop/web (sandbox s0)".to_owned(),
            withdrawn,
        };
        state.adopt_rests(vec![rest]);
        assert!(leased(&mut state, "s1", "Ready").is_err());
        assert_eq!(state.ipam.next_end_of_rest(), withdrawn.map(|at| at + REST));
        assert_eq!(state.ipam.end_rests(Duration::from_secs(110)).len(), 1);
        leased(&mut state, "s1", "Ready").unwrap();
    }
}
