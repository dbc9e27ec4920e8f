//! The operations on what lies in the maps: endpoints, routes, policy, services, flows, counters.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_common::{Direction, Verdict, counter::HitKey, event::Explanation};
use kni_model::{
    EndpointId, NetworkId, PolicyStep, PolicyTables, ServiceStep, ServiceTables,
    view::{Count, EndpointCounts, MapView},
};

use super::{
    CountingRuns, Dataplane, DataplaneError, DropCount, EndpointConfig, FlowCensus, FlowRecordView, NetworkRoutes,
    NodeConfig, NodeRoutes, Probe, ProgramStats, inspect, lock, stats,
};

impl Dataplane {
    /// Makes an endpoint ready: its row, its addresses, in the order that never lets a packet meet half of it (I1, I2).
    ///
    /// What its policies allow must have been put into force before ([`kni_model::PolicyStep::Enforce`]): without,
    /// this is [`DataplaneError::NotEnforced`].
    pub fn publish(&self, endpoint: &EndpointConfig) -> Result<(), DataplaneError> {
        lock(&self.maps).publish(endpoint)
    }

    /// Brings an endpoint that has been published by an earlier agent up to date without interrupting its traffic.
    pub fn republish(&self, endpoint: &EndpointConfig) -> Result<(), DataplaneError> {
        lock(&self.maps).republish(endpoint)
    }

    /// Stops an endpoint's traffic and forgets its addresses, its counters, its way out, its ports of the node and what was
    /// in force at it. Succeeds when there is nothing left to do.
    pub fn withdraw(&self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        lock(&self.maps).withdraw(endpoint)?;
        lock(&self.uplink).forget(endpoint)
    }

    /// Forgets addresses whose endpoint does not have them: an agent that is killed inside [`Self::withdraw`] leaves
    /// them without a row that tells of them. For the start, after [`Self::republish`] of what is kept.
    pub fn forget_stale_addresses(&self) -> Result<(), DataplaneError> {
        lock(&self.maps).forget_stale_addresses()
    }

    /// Endpoints whose rows or addresses are set, whoever set them.
    pub fn published_endpoints(&self) -> Result<Vec<EndpointId>, DataplaneError> {
        lock(&self.maps).published()
    }

    /// Says what becomes of a network's packets to addresses of no endpoint. Where the way out of the node is another one
    /// than before, what left by the old one is judged anew.
    pub fn set_routes(&self, network: NetworkId, routes: &NetworkRoutes) -> Result<(), DataplaneError> {
        if lock(&self.maps).set_routes(network, routes)? {
            let endpoints = lock(&self.maps).rows()?;
            self.flows.forget_beyond(network, &endpoints)?;
        }
        Ok(())
    }

    /// Forgets the routes of all networks but these.
    pub fn retain_routes(&self, networks: &[NetworkId]) -> Result<(), DataplaneError> {
        lock(&self.maps).routes.retain(networks)
    }

    /// Says which addresses are the node's own and which subnets it is connected to: networks that masquerade send
    /// nothing out of the node that is for one of them.
    pub fn set_node_routes(&self, node: NodeRoutes) -> Result<(), DataplaneError> {
        lock(&self.maps).routes.set_node(node)
    }

    /// Says which virtual addresses are services' that another proxy serves: the node's stack has what is for one of them,
    /// also within a network's ranges of virtual addresses. Only endpoints with host access get there.
    pub fn set_left_services(&self, left: &BTreeMap<NetworkId, BTreeSet<IpAddr>>) -> Result<(), DataplaneError> {
        lock(&self.maps).routes.set_left(left)
    }

    /// What passed an endpoint.
    pub fn counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, DataplaneError> {
        lock(&self.maps).counts(endpoint)
    }

    /// All drops that were counted, by endpoint, direction and reason.
    pub fn drops(&self) -> Result<Vec<DropCount>, DataplaneError> {
        lock(&self.maps).drops()
    }

    /// What passed an endpoint, by verdict; zero rows left out. With [`Self::drops`] it accounts for every packet.
    pub fn forwarded(&self, endpoint: EndpointId) -> Result<Vec<(Direction, Verdict, Count)>, DataplaneError> {
        lock(&self.maps).forwarded(endpoint)
    }

    /// Whether the endpoint's row says what it should.
    pub fn verify(&self, endpoint: &EndpointConfig) -> Vec<String> {
        lock(&self.maps).verify(endpoint)
    }

    /// The pinned maps. Counts rows, which takes milliseconds for a full flow table.
    pub fn maps(&self) -> Result<Vec<MapView>, DataplaneError> {
        inspect::maps(&self.pins, &self.specs, self.published_count()?)
    }

    /// How full each map of keys is: name, rows, rows that fit. Walks the maps, 0.3 us per row; flow tables are
    /// not walked again when they have been swept.
    pub fn map_pressure(&self) -> Result<Vec<(String, u32, u32)>, DataplaneError> {
        let census = lock(&self.census).clone();
        inspect::pressure(&self.pins, &self.specs, self.published_count()?, census.as_ref())
    }

    fn published_count(&self) -> Result<u32, DataplaneError> {
        let published = lock(&self.maps).enforcements()?.len();
        Ok(u32::try_from(published).unwrap_or(u32::MAX))
    }

    /// What policy has in the maps. Endpoints are those that are published.
    pub fn policy_tables(&self) -> Result<PolicyTables, DataplaneError> {
        lock(&self.policy).tables(&self.maps)
    }

    /// Carries out steps in order, and stops at the first one that fails: what is left then is safe, and another attempt
    /// may start from [`Self::policy_tables`].
    pub fn apply_policy(&self, steps: &[PolicyStep]) -> Result<(), DataplaneError> {
        lock(&self.policy).apply(&self.maps, steps)
    }

    /// How often a rule of a policy set allowed a flow, or the set denied one.
    pub fn hits(&self) -> Result<BTreeMap<HitKey, u64>, DataplaneError> {
        lock(&self.policy).hits()
    }

    /// Forgets the hits of policy sets that are gone.
    pub fn forget_hits(&self, sets: &[u32]) -> Result<(), DataplaneError> {
        lock(&self.policy).forget_hits(sets)
    }

    /// What services have in the maps.
    pub fn service_tables(&self) -> Result<ServiceTables, DataplaneError> {
        lock(&self.services).tables(&self.maps)
    }

    /// As [`Self::apply_policy`].
    pub fn apply_services(&self, steps: &[ServiceStep]) -> Result<(), DataplaneError> {
        lock(&self.services).apply(&self.maps, &self.flows, steps)
    }

    /// Tells the programs about the node. Until then they have the row that an earlier agent wrote, or zeros.
    pub fn configure(&self, config: &NodeConfig) -> Result<(), DataplaneError> {
        let maps = lock(&self.maps);
        let uplink = maps.config.get(&0)?.unwrap_or_default().uplink;
        maps.config.put(&0, &config.row(self.ticks, uplink))
    }

    /// Timer ticks (jiffies) per second of this kernel.
    pub fn hz(&self) -> u32 {
        self.ticks.hz()
    }

    /// Removes flow rows that are over, counts the others by endpoint and tells the programs the counts. To be called
    /// every second: when it has not been for two windows of 2^13 ticks, the programs bound rates instead of numbers.
    /// Blocking, 0.3 us per row and 0.6 us more for each that goes.
    pub fn sweep_flows(&self) -> Result<FlowCensus, DataplaneError> {
        let now = self.jiffies()?;
        let endpoints = lock(&self.maps).rows()?;
        let census = self.flows.sweep(now, &endpoints)?;
        *lock(&self.census) = Some(census.clone());
        Ok(census)
    }

    /// Ports that masquerading has taken, by family (whether it is IPv4) and protocol number, as the last sweep found
    /// them.
    pub fn masquerade_ports(&self) -> BTreeMap<(bool, u32), u32> {
        let census = lock(&self.census);
        census
            .as_ref()
            .map(|census| census.masquerade.clone())
            .unwrap_or_default()
    }

    /// Every row of the flow tables.
    pub fn flows(&self) -> Result<Vec<FlowRecordView>, DataplaneError> {
        let now = self.jiffies()?;
        let endpoints = lock(&self.maps).rows()?;
        self.flows.views(now, self.ticks, &endpoints)
    }

    /// Events that were not sent because an endpoint had too many, or because the ring was full.
    pub fn lost_events(&self) -> Result<u64, DataplaneError> {
        lock(&self.maps).lost_events()
    }

    /// What the programs would do with a packet now, and why. Nothing is sent, counted or remembered.
    pub fn explain(&self, question: &Probe) -> Result<Explanation, DataplaneError> {
        let ifindex = lock(&self.maps).host_ifindex(question.endpoint)?;
        lock(&self.dry_run).explain(&self.pins, question, ifindex)
    }

    fn jiffies(&self) -> Result<u64, DataplaneError> {
        lock(&self.dry_run).jiffies(&self.pins)
    }

    /// How often each program ran and for how long, while somebody held [`Self::count_program_runs`].
    pub fn program_stats(&self) -> Result<Vec<ProgramStats>, DataplaneError> {
        stats::of_programs(&lock(&self.programs))
    }

    /// Makes the kernel count runs of programs for as long as the answer is held (`BPF_ENABLE_STATS`).
    pub fn count_program_runs(&self) -> Result<CountingRuns, DataplaneError> {
        stats::count_runs()
    }
}
