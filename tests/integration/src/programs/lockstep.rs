//! Kernel and model, changed and asked in step; every difference is an error that quotes the frame.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context as _, Result, bail, ensure};
use kni_agent::{
    dataplane::EndpointConfig,
    model::{EndpointId, MacAddr, NetworkId},
};
use kni_common::{
    Direction, Verdict,
    flow::{FlowValue, KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK},
};

use super::{CAPACITY, INTERFACES, Programs, Ran, action_of, hex, tables::Tables};
use crate::model::{Counts, Endpoint, Incarnation, Model, Outcome, Way, World};

/// The programs and their model.
pub struct Lockstep {
    programs: Programs,
    tables: Tables,
    /// The model; its world is changed through this type only.
    pub model: Model,
    generations: HashMap<Incarnation, u32>,
}

impl Lockstep {
    /// Begins with nobody there.
    pub fn new(programs: Programs) -> Result<Self> {
        let tables = Tables::open(&programs.dataplane().pin_path())?;
        let model = Model {
            world: World::new(CAPACITY),
            ..Model::default()
        };
        Ok(Self {
            programs,
            tables,
            model,
            generations: HashMap::new(),
        })
    }

    /// [`Programs::inside`] with the model beside them.
    pub fn inside<R: Send>(name: &str, max_flows: u32, work: impl FnOnce(&mut Self) -> Result<R> + Send) -> Result<R> {
        Programs::inside(name, max_flows, |programs| work(&mut Self::new(programs)?))
    }

    /// The programs.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Makes an endpoint ready, under a new generation.
    pub fn publish(&mut self, id: u32, endpoint: &Endpoint) -> Result<()> {
        self.programs.dataplane().publish(&EndpointConfig {
            endpoint: EndpointId(id),
            network: NetworkId::try_from(endpoint.network)?,
            ipv4: endpoint.ipv4,
            ipv6: endpoint.ipv6,
            mac: MacAddr(endpoint.mac),
            host_mac: MacAddr(endpoint.host_mac),
            host_access: endpoint.host_access,
        })?;
        self.model.publish(id, endpoint.clone());
        let incarnation = self.model.world.incarnation(id).context("published just now")?;
        self.generations.insert(incarnation, self.tables.generation(id)?);
        Ok(())
    }

    /// Withdraws an endpoint.
    pub fn withdraw(&mut self, id: u32) -> Result<()> {
        self.programs.dataplane().withdraw(EndpointId(id))?;
        self.model.withdraw(id);
        Ok(())
    }

    /// Stops or resumes an endpoint's traffic in place.
    pub fn set_ready(&mut self, id: u32, ready: bool) -> Result<()> {
        self.tables.set_ready(id, ready)?;
        self.model.world.set_ready(id, ready);
        Ok(())
    }

    /// Sets a network's routes.
    pub fn set_routes(&mut self, network: u32, subnets: &[ipnet::IpNet], host_access: bool) -> Result<()> {
        let id = NetworkId::try_from(network)?;
        self.programs.dataplane().set_routes(id, subnets, host_access)?;
        self.model.world.set_routes(network, subnets, host_access);
        Ok(())
    }

    /// Runs a frame in both and compares what can be seen of it at once: return value, bytes, and that nobody gets
    /// what is not theirs.
    pub fn run(&mut self, direction: Direction, id: u32, frame: &[u8]) -> Result<Outcome> {
        let sender = self.model.world.endpoint(id).cloned();
        let expected = self.model.judge(direction, id, frame);
        let ran = self.programs.run(direction, id, frame)?;
        let told = || format!("{} of endpoint {id}: {}", direction.as_str(), hex(frame));
        self.isolated(sender.as_ref(), direction, &expected, &ran)
            .with_context(told)?;
        if ran.action != action_of(expected.verdict) || ran.frame != expected.frame {
            let tables = self.compare_tables().err();
            bail!(
                "{}\n model {} {:?} {}\nkernel action {} {}\ntables: {tables:?}",
                told(),
                expected.verdict.as_str(),
                expected.destination,
                hex(&expected.frame),
                ran.action.cast_signed(),
                hex(&ran.frame)
            );
        }
        Ok(expected)
    }

    /// What must hold whatever the model says: a frame that was redirected with another's MAC address is in its
    /// network and for its address.
    fn isolated(&self, sender: Option<&Endpoint>, direction: Direction, expected: &Outcome, ran: &Ran) -> Result<()> {
        let redirected = ran.action == action_of(Verdict::Redirected);
        if !redirected || expected.verdict == Verdict::Answered {
            return Ok(());
        }
        let sender = sender.context("redirected for nobody")?;
        ensure!(direction == Direction::FromPod, "to_pod redirects");
        let receiver = (1..CAPACITY)
            .filter_map(|id| self.model.world.endpoint(id))
            .find(|endpoint| endpoint.mac == ran.frame[..6])
            .context("redirected to an unknown MAC address")?;
        ensure!(
            receiver.network == sender.network,
            "from network {} to {}",
            sender.network,
            receiver.network
        );
        let mine = match ran.frame[12..14] {
            [8, 0] => receiver.ipv4.is_some_and(|ip| ran.frame[30..34] == ip.octets()),
            _ => receiver.ipv6.is_some_and(|ip| ran.frame[38..54] == ip.octets()),
        };
        ensure!(mine, "the receiver does not have the destination address");
        Ok(())
    }

    /// [`Self::run`], and the verdicts that the kernel counted for it.
    pub fn run_counted(&mut self, direction: Direction, id: u32, frame: &[u8]) -> Result<(Outcome, Counts)> {
        let before = counted(&self.programs)?;
        let outcome = self.run(direction, id, frame);
        let mut delta = counted(&self.programs)?;
        delta.retain(|key, (packets, bytes)| {
            let (old_packets, old_bytes) = before.get(key).copied().unwrap_or_default();
            *packets -= old_packets;
            *bytes -= old_bytes;
            *packets > 0
        });
        let outcome = outcome.with_context(|| format!("the kernel counted {delta:?}"))?;
        Ok((outcome, delta))
    }

    /// Compares all counters and returns the kernel's.
    pub fn compare_counters(&self) -> Result<Counts> {
        let kernel = counted(&self.programs)?;
        same("counters", &self.model.counts, &kernel)?;
        Ok(kernel)
    }

    /// Compares both flow tables and the fragment table, row by row.
    pub fn compare_tables(&self) -> Result<()> {
        let mut kernel = BTreeMap::new();
        for (flow, row) in self.tables.flows()? {
            kernel.insert(flow, fields(&row));
        }
        let mut expected = BTreeMap::new();
        for (flow, way) in &self.model.flows {
            expected.insert(*flow, self.row_of(*way));
        }
        same("flows", &expected, &kernel)?;
        let fragments = self.tables.fragments()?;
        ensure!(
            fragments == self.model.fragments,
            "fragments: kernel {fragments:?}, model {:?}",
            self.model.fragments
        );
        Ok(())
    }

    /// Empties flow and fragment tables of both.
    pub fn flush(&mut self) -> Result<()> {
        self.tables.flush()?;
        self.model.flows.clear();
        self.model.fragments.clear();
        Ok(())
    }

    fn row_of(&self, way: Way) -> [u32; 4] {
        let generation = |incarnation| self.generations[&incarnation];
        match way {
            Way::Local { sender, to, receiver } => [KIND_LOCAL, generation(sender), generation(receiver), to],
            Way::ToStack { sender } => [KIND_TO_STACK, generation(sender), 0, 0],
            Way::FromStack { receiver } => [KIND_FROM_STACK, 0, generation(receiver), 0],
        }
    }
}

/// Kind, generations and destination, where the kind has one.
fn fields(row: &FlowValue) -> [u32; 4] {
    let destination = if row.kind == KIND_LOCAL { row.destination } else { 0 };
    [row.kind, row.source_generation, row.destination_generation, destination]
}

/// What the kernel counted, zero rows left out.
pub fn counted(programs: &Programs) -> Result<Counts> {
    let mut counts = Counts::new();
    for id in 1..=INTERFACES {
        for (direction, verdict, count) in programs.dataplane().forwarded(EndpointId(id))? {
            counts.insert((id, direction, verdict), (count.packets, count.bytes));
        }
    }
    for drop in programs.dataplane().drops()? {
        let key = (drop.endpoint.0, drop.direction, drop.reason);
        counts.insert(key, (drop.count.packets, drop.count.bytes));
    }
    Ok(counts)
}

fn same<K: Ord + std::fmt::Debug, V: PartialEq + std::fmt::Debug>(
    what: &str,
    model: &BTreeMap<K, V>,
    kernel: &BTreeMap<K, V>,
) -> Result<()> {
    let mut differences = Vec::new();
    for (key, value) in model {
        let found = kernel.get(key);
        if found != Some(value) {
            differences.push(format!("{key:?}: model {value:?}, kernel {found:?}"));
        }
    }
    for (key, value) in kernel {
        if !model.contains_key(key) {
            differences.push(format!("{key:?}: model has none, kernel {value:?}"));
        }
    }
    ensure!(
        differences.is_empty(),
        "{what} differ:\n{}",
        differences[..differences.len().min(20)].join("\n")
    );
    Ok(())
}
