//! Runs frames while another thread changes the tables: what a change means for the model, the results that a frame may
//! have that meets one, and the model's tables after such a frame.

use std::{collections::HashMap, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_common::{
    IFINDEX_BASE, Verdict,
    flow::{
        END_LOCAL, END_STACK, FLOW_AGED, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FIN_FIRST, FLOW_FIN_SECOND,
        FLOW_FROM_SECOND, FLOW_HAIRPIN, FLOW_NODE, FLOW_OPENED_BY_SECOND, FLOW_REPLIED, FLOW_RESET, FLOW_SERVICE,
        FLOW_TRANSLATED, FlowEnd, FlowValue,
    },
};

use super::{INTERFACES, Lockstep, Programs, Ran, action_of, counters::counted, hex};
use crate::model::{
    End, Endpoint, Enforced, Entry, First, Flow, Front, Model, Opener, Outcome, Policies, Seen, Service, Version, World,
};

/// One change of the tables.
#[derive(Debug, Clone)]
pub enum Change {
    /// Other policies of a published endpoint.
    Enforce(u32, Enforced),
    /// An endpoint, new or with other settings.
    Publish(u32, Endpoint),
    /// An endpoint is removed.
    Withdraw(u32),
    /// The identity of a prefix outside of the node.
    Identify(u32, IpNet, u32),
    /// A service port, new or with other backends.
    Serve(Front, Service),
    /// A service port is removed.
    Unserve(Front),
}

/// What a packet depends on besides the tables that packets fill.
#[derive(Debug, Clone)]
pub struct State {
    world: World,
    policies: Policies,
}

impl State {
    /// The present state of a model.
    pub fn of(model: &Model) -> Self {
        Self {
            world: model.world.clone(),
            policies: model.policies.clone(),
        }
    }
}

/// The generation and the epoch that the kernel has for a version of the model.
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    endpoint: u32,
    version: Version,
    generation: u32,
    epoch: u64,
    kernel_epoch: u32,
}

impl Change {
    /// The endpoint that is not ready during the change.
    pub fn interrupted(&self) -> Option<u32> {
        match self {
            Self::Publish(id, _) | Self::Withdraw(id) => Some(*id),
            Self::Enforce(..) | Self::Identify(..) | Self::Serve(..) | Self::Unserve(_) => None,
        }
    }

    /// The states that a packet may meet during the change, if any besides those before and after, and the one after.
    pub fn foresee(&self, before: &Model) -> (Vec<State>, State) {
        let mut during = Vec::new();
        let mut model = Model {
            world: before.world.clone(),
            policies: before.policies.clone(),
            ..Model::default()
        };
        match self {
            Self::Enforce(id, enforced) => model.world.enforce(*id, *enforced),
            Self::Publish(id, endpoint) => {
                if model.world.enforced(*id).is_none() {
                    model.world.enforce(*id, Enforced::default());
                }
                model.publish(*id, endpoint.clone());
            }
            Self::Withdraw(id) => model.withdraw(*id),
            Self::Identify(network, prefix, identity) => {
                model.policies.identities.insert((*network, *prefix), *identity);
                model.world.renew_epochs(*network);
            }
            Self::Serve(front, service) => {
                model.world.services.fronts.insert(*front, service.clone());
            }
            Self::Unserve(front) => {
                model.world.services.fronts.remove(front);
                let (network, address, ..) = *front;
                if !model.world.services.has_address(network, address) {
                    // The port goes first, then the address.
                    let mut first = State::of(&model);
                    let no_port = (network, address, u8::MAX, 0);
                    first.world.services.fronts.insert(no_port, Service::default());
                    during.push(first);
                }
            }
        }
        (during, State::of(&model))
    }
}

impl Lockstep {
    /// A second agent with programs of its own, for the same tables. The first one must not change them any more.
    pub fn beside(&mut self, max_flows: u32) -> Result<Self> {
        let config = self.tables.config()?;
        let mut other = Self::new(Programs::open(max_flows)?)?;
        self.tables.set_config(config)?;
        other.model = self.model.clone();
        other.lists = self.lists;
        other.backends.clone_from(&self.backends);
        Ok(other)
    }

    /// Makes a change.
    pub fn change(&mut self, change: &Change) -> Result<()> {
        match change {
            Change::Enforce(id, enforced) => self.enforce(*id, *enforced),
            Change::Publish(id, endpoint) => self.publish(*id, endpoint),
            Change::Withdraw(id) => self.withdraw(*id),
            Change::Identify(network, prefix, identity) => self.identify(*network, *prefix, *identity),
            Change::Serve(front, service) => self.serve(*front, service),
            Change::Unserve(front) => self.unserve(*front),
        }
    }

    /// The kernel's generations and epochs.
    pub fn marks(&self) -> Result<Vec<Mark>> {
        let mut marks = Vec::new();
        for endpoint in 1..=INTERFACES {
            let world = &self.model.world;
            if let (Some(version), Some(epoch)) = (world.version(endpoint), world.epoch(endpoint)) {
                let (generation, kernel_epoch) = self.tables.generations(endpoint)?;
                marks.push(Mark {
                    endpoint,
                    version,
                    generation,
                    epoch,
                    kernel_epoch,
                });
            }
        }
        Ok(marks)
    }

    /// Takes note of the other agent's generations and epochs.
    pub fn learn(&mut self, marks: &[Mark]) {
        for mark in marks {
            self.generations.insert(mark.version, mark.generation);
            self.epochs.insert((mark.endpoint, mark.epoch), mark.kernel_epoch);
        }
    }

    /// Lets the model continue in another state, with the tables that packets fill.
    pub fn enter(&mut self, state: &State) {
        enter(&mut self.model, state);
    }

    /// Runs a frame in the kernel only.
    pub fn run_kernel(&self, seen: Seen, frame: &[u8]) -> Result<Ran> {
        self.programs().run_as(seen, frame, 0)
    }

    /// Compares a run that met no change.
    pub fn ran_alone(&mut self, seen: Seen, frame: &[u8], ran: &Ran) -> Result<Outcome> {
        self.compare_run(seen, frame, ran, false)
    }

    /// Checks a run that met a change between these states: its result is that of one of them; a packet from or to the
    /// interrupted endpoint may be dropped, or still reach it with the addresses of a free row. Returns the verdict if
    /// it is that of all states.
    pub fn ran_between(
        &mut self,
        seen: Seen,
        frame: &[u8],
        ran: &Ran,
        states: &[&State],
        interrupted: Option<u32>,
    ) -> Result<Option<Verdict>> {
        let mut outcomes = Vec::new();
        for state in states {
            outcomes.extend(self.possible(seen, frame, state));
        }
        let dropped = action_of(Verdict::Truncated);
        let fits = |outcome: &Outcome| {
            let verdict = if outcome.refused {
                Verdict::Answered
            } else {
                outcome.verdict
            };
            let action = action_of(verdict);
            ran.action == action && (action == dropped || ran.frame == outcome.frame)
        };
        let concerns = |id: u32| {
            let to = outcomes.iter().any(|outcome| outcome.destination == Some(id));
            to || seen.endpoint == id || seen.ingress == IFINDEX_BASE + id
        };
        // The packet was let through before, and got the MAC addresses of the free row: its receiver goes away.
        let left_behind = |id: u32| {
            let mut before = outcomes.iter().filter(|outcome| outcome.destination == Some(id));
            let zero = ran.frame.starts_with(&[0; 12]) && ran.action == action_of(Verdict::Redirected);
            zero && before.any(|outcome| outcome.frame[12..] == ran.frame[12..])
        };
        let is_interrupted = interrupted.is_some_and(|id| ran.action == dropped && concerns(id) || left_behind(id));
        ensure!(
            outcomes.iter().any(fits) || is_interrupted,
            "{seen:?}: {}\nkernel action {} {}\nof none of the states: {outcomes:?}",
            hex(frame),
            ran.action.cast_signed(),
            hex(&ran.frame)
        );
        let first = outcomes.first().context("a state")?.verdict;
        Ok(outcomes.iter().all(|outcome| outcome.verdict == first).then_some(first))
    }

    /// The results in a state, one for each backend that the program might choose.
    fn possible(&self, seen: Seen, frame: &[u8], state: &State) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for backend in 0.. {
            let mut model = self.model.clone();
            enter(&mut model, state);
            let mut backends = 1;
            let outcome = model.evaluate(seen, frame, &mut |choice| {
                backends = choice.candidates.len();
                backend.min(backends - 1)
            });
            outcomes.push(outcome);
            if backend + 1 >= backends {
                break;
            }
        }
        outcomes
    }

    /// Copies the kernel's tables that packets fill to the model, without their ages. False where a row has a
    /// generation that is not known yet.
    pub fn resynchronize(&mut self) -> Result<bool> {
        let versions: HashMap<u32, Version> = self
            .generations
            .iter()
            .map(|(version, generation)| (*generation, *version))
            .collect();
        let epochs: HashMap<(u32, u32), u64> = self
            .epochs
            .iter()
            .map(|((endpoint, epoch), kernel)| ((*endpoint, *kernel), *epoch))
            .collect();
        let mut flows = HashMap::new();
        for (key, row) in self.tables.flows()? {
            let Some(entry) = entry(&key, &row, &versions, &epochs) else {
                return Ok(false);
            };
            flows.insert(key, entry);
        }
        self.model.flows = flows;
        self.model.unsure.clear();
        let fragments = self.tables.fragments()?.into_iter();
        self.model.fragments = fragments
            .map(|(datagram, (protocol, ports))| {
                let first = First {
                    protocol,
                    ports,
                    idle: 0,
                };
                (datagram, first)
            })
            .collect();
        self.model.world.services.last = self.tables.affinities()?;
        Ok(true)
    }

    /// Takes the counters of the kernel for the model's.
    pub fn recount(&mut self) -> Result<()> {
        self.model.counts = counted(self.programs())?;
        self.model.hits = self.programs().dataplane().hits()?;
        Ok(())
    }
}

fn enter(model: &mut Model, state: &State) {
    let last = std::mem::take(&mut model.world.services.last);
    model.world = state.world.clone();
    model.world.services.last = last;
    model.policies = state.policies.clone();
}

/// The model's form of a row; `None` for an unknown generation.
fn entry(
    key: &Flow,
    row: &FlowValue,
    versions: &HashMap<u32, Version>,
    epochs: &HashMap<(u32, u32), u64>,
) -> Option<Entry> {
    let end = |kind: u8, end: FlowEnd, opposite: FlowEnd| match kind {
        END_LOCAL => Some(End::Local(end.id, *versions.get(&end.generation)?)),
        END_STACK => Some(End::Stack(*epochs.get(&(opposite.id, end.generation))?)),
        _ => None,
    };
    let has = |flag: u16| row.flags & flag != 0;
    let translated = has(FLOW_TRANSLATED);
    let ends = |address: [u8; 16], port: [u8; 2]| -> (IpAddr, u16) {
        (kni_common::address::to_ip(address), u16::from_be_bytes(port))
    };
    Some(Entry {
        ends: [
            end(row.first_kind, row.first, row.second)?,
            end(row.second_kind, row.second, row.first)?,
        ],
        opened_by: usize::from(has(FLOW_OPENED_BY_SECOND)),
        only_from: translated.then_some(usize::from(has(FLOW_FROM_SECOND))),
        opener: if has(FLOW_HAIRPIN) {
            Opener::Itself
        } else if has(FLOW_NODE) {
            Opener::Node
        } else {
            Opener::Anybody
        },
        service: has(FLOW_SERVICE),
        replied: has(FLOW_REPLIED),
        confirmed: has(FLOW_CONFIRMED),
        aged: has(FLOW_AGED),
        finished: [has(FLOW_FIN_FIRST), has(FLOW_FIN_SECOND)],
        closed: has(FLOW_CLOSED),
        reset: has(FLOW_RESET),
        becomes: if translated {
            Flow {
                source: ends(row.source, row.ports.source),
                destination: ends(row.destination, row.ports.destination),
                ..*key
            }
        } else {
            *key
        },
        lifetime: row.lifetime.into(),
        idle: 0,
    })
}
