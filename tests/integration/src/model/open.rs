//! Models packets without a known flow: selects the service, the destination and the applicable policies.

use std::net::IpAddr;

use super::{
    Flow, Model, Verdict,
    flows::{End, Opener, Plan},
    policy::Hits,
    service::{Backend, Candidate, Choice, Choose, Front, Last, Service},
    world::{Owner, Route, Row},
};

/// A packet that would open a flow.
pub(super) struct Opening<'a> {
    pub(super) row: &'a Row,
    pub(super) flow: Flow,
    /// Whether the packet itself requests it (TCP SYN).
    pub(super) opens: bool,
}

/// The result for a packet, and its policy hits.
struct Fate {
    hits: Hits,
    plan: Result<Plan, Verdict>,
}

impl Model {
    /// Opens the flow.
    pub(super) fn open(&mut self, opening: &Opening<'_>, choose: &mut Choose<'_>) -> Result<(), Verdict> {
        let flow = opening.flow;
        let of_service = self.world.services.has_address(flow.network, flow.destination.0) || self.is_external(flow);
        let fate = if of_service {
            let backend = match self.kept_backend(opening) {
                Some(backend) => backend,
                None => self.choose_backend(opening, choose)?,
            };
            self.fate(opening, behind(flow, backend))
        } else if let Some(pod) = self.behind_port(opening)? {
            self.fate(opening, behind(flow, pod))
        } else {
            self.fate(opening, flow)
        };
        self.hit(fate.hits);
        let plan = fate.plan?;
        self.count_opened(opening.row.id, flow.protocol, false);
        self.learn(flow, &plan);
        Ok(())
    }

    /// Whether the destination is a Service's port at an address outside of the cluster.
    fn is_external(&self, flow: Flow) -> bool {
        let (address, port) = flow.destination;
        let world = &self.world;
        world.owner(flow.network, address).is_none()
            && matches!(world.route(flow.network, address), Some(Route::Stack) | None)
            && world
                .services
                .fronts
                .contains_key(&(flow.network, address, flow.protocol, port))
    }

    /// A repeated SYN is sent to the backend of the first one until that has answered.
    fn kept_backend(&self, opening: &Opening<'_>) -> Option<Backend> {
        let known = self.known(opening.flow).filter(|_| opening.opens)?;
        let entry = &known.entry;
        let waits = entry.service && !known.is_reply() && !entry.replied && !entry.closed;
        let mine = matches!(known.sender(), End::Local(_, version) if version.same_life(opening.row.version));
        (waits && mine && entry.is_live()).then_some(entry.becomes.destination)
    }

    /// The pod of the sender's network that the destination, a port of the node, leads to. Only where the stack would
    /// get the packet.
    fn behind_port(&self, opening: &Opening<'_>) -> Result<Option<Backend>, Verdict> {
        let (flow, world) = (opening.flow, &self.world);
        let (address, port) = flow.destination;
        let to_stack = opening.row.endpoint.host_access
            && world.owner(flow.network, address).is_none()
            && world.route(flow.network, address) == Some(Route::Stack);
        let Some((id, version, inner)) = world.port((address, flow.protocol, port)).filter(|_| to_stack) else {
            return Ok(None);
        };
        if world.endpoint(id).is_none_or(|there| there.network != flow.network) {
            return Ok(None);
        }
        let there = world.ready(id).filter(|there| there.version.same_life(version));
        let there = there.ok_or(Verdict::DestinationNotReady)?.endpoint;
        let own = if address.is_ipv4() {
            there.ipv4.map(IpAddr::V4)
        } else {
            there.ipv6.map(IpAddr::V6)
        };
        let own = own.ok_or(Verdict::DestinationAddress)?;
        Ok(Some((own, inner)))
    }

    fn choose_backend(&mut self, opening: &Opening<'_>, choose: &mut Choose<'_>) -> Result<Backend, Verdict> {
        let flow = opening.flow;
        let front: Front = (flow.network, flow.destination.0, flow.protocol, flow.destination.1);
        let service = self.world.services.fronts.get(&front).cloned();
        let service = service.ok_or(Verdict::NoServicePort)?;
        let client = (service.id, flow.network, flow.source.0);
        if service.affinity != 0
            && !service.backends.is_empty()
            && let Some(last) = self.world.services.last.get_mut(&client)
            && last.idle <= u64::from(service.affinity)
        {
            last.idle = 0;
            return Ok(last.backend);
        }
        let backend = self.any_backend(opening, &service, choose)?;
        if service.affinity != 0 {
            self.world.services.last.insert(client, Last { backend, idle: 0 });
        }
        Ok(backend)
    }

    fn any_backend(
        &self,
        opening: &Opening<'_>,
        service: &Service,
        choose: &mut Choose<'_>,
    ) -> Result<Backend, Verdict> {
        let backends = &service.backends;
        let first = backends.first().ok_or(service.no_backend())?;
        if backends.len() == 1 {
            return Ok(*first);
        }
        let candidates: Vec<Candidate> = backends
            .iter()
            .map(|backend| {
                let Fate { hits, plan } = self.fate(opening, behind(opening.flow, *backend));
                Candidate {
                    backend: *backend,
                    fate: plan.map(|_| ()),
                    hits,
                }
            })
            .collect();
        let chosen = choose(&Choice {
            endpoint: opening.row.id,
            service,
            flow: opening.flow,
            counts: &self.counts,
            hits: &self.hits,
            candidates: &candidates,
        });
        Ok(backends[chosen])
    }

    /// The result for the packet if it were translated to `becomes`; changes nothing.
    fn fate(&self, opening: &Opening<'_>, becomes: Flow) -> Fate {
        let mut hits = Hits::new();
        let plan = self.plan(opening, becomes, &mut hits).and_then(|plan| {
            self.may_open(opening.row.id, opening.flow, opening.opens, becomes)?;
            Ok(plan)
        });
        Fate { hits, plan }
    }

    fn plan(&self, opening: &Opening<'_>, becomes: Flow, hits: &mut Hits) -> Result<Plan, Verdict> {
        let row = opening.row;
        let own = End::Local(row.id, row.version);
        let plan = |opener, receiver| Plan {
            opener,
            sender: own,
            receiver,
            becomes,
        };
        if becomes.source.0 != opening.flow.source.0 {
            return Ok(plan(Opener::Itself, own));
        }
        let Some(owner) = self.world.owner(becomes.network, becomes.destination.0) else {
            self.plan_external(row, becomes, hits)?;
            return Ok(plan(Opener::Anybody, End::Stack(row.epoch)));
        };
        if matches!(owner, Owner::Endpoint(id, _) if id == row.id) {
            return Err(Verdict::SelfAddressed);
        }
        let there = self.world.still(becomes.network, owner);
        let there = there.ok_or(Verdict::DestinationNotReady)?;
        self.between(row, &there, becomes, hits)?;
        Ok(plan(Opener::Anybody, End::Local(there.id, there.version)))
    }

    fn plan_external(&self, row: &Row, becomes: Flow, hits: &mut Hits) -> Result<(), Verdict> {
        match self.world.route(becomes.network, becomes.destination.0) {
            Some(Route::Unreachable) => Err(Verdict::NoDestination),
            Some(Route::ServiceRange) => Err(Verdict::NoService),
            Some(Route::Stack) if row.endpoint.host_access => self.leaving(row, becomes, hits),
            Some(Route::Stack) | None => Err(Verdict::NoRoute),
        }
    }
}

/// The flow with the virtual address replaced by a backend. A pod that is its own backend gets its packets from the
/// virtual address, because it would not accept its own address as the source of the service's answer.
fn behind(flow: Flow, backend: Backend) -> Flow {
    let source = if backend.0 == flow.source.0 {
        (flow.destination.0, flow.source.1)
    } else {
        flow.source
    };
    Flow {
        source,
        destination: backend,
        ..flow
    }
}
