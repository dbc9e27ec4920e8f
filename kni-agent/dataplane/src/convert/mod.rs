//! Takes over from programs of layout 2: it alone reads rows of that layout.
//!
//! The old programs run with the old maps until their links are switched; until then a packet's fate is decided by the
//! programs at the interface that it comes from. Both kinds deliver with `bpf_redirect_peer`, past the programs of the
//! receiver, which only has to be ready in the sender's own table of endpoints. So:
//!
//! 1. New maps are made aside and filled with all rows but flows: endpoints (ready as they were), policies, addresses,
//!    services, egress. Nothing that the new programs decide by is missing, and enforcement is what it was. Then they
//!    are put in place, at once ([`Pins::replace_by`]), with the id of the old table of endpoints. An agent that is
//!    killed before starts again; one that is killed later continues with the next step. Maps with another id are of
//!    an agent that has been followed by one of the former layout: they are made anew.
//! 2. Flows are copied, and copied again: the second time those that were used meanwhile. Only the old programs work,
//!    so that the later row is right.
//! 3. All links are switched, one after the other, some 20 us each.
//! 4. When no old program runs any more, flows that were used since the last copy and have no row are added. From here
//!    on an existing row is the newer one.
//!
//! An established flow has its row from step 2 on. A connection that opens during step 3 may lose its first packets,
//! and is repeated by its sender: for milliseconds, two kinds of programs open flows in two tables.
//!
//! The old flow tables are removed after step 4, the other old maps when the agent has adopted every interface
//! ([`crate::Dataplane::remove_other_layouts`]): until then an agent of the former layout can return without a loss.

mod flow;
mod rows;
mod tables;

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::PathBuf,
    time::Instant,
};

use aya::{Ebpf, maps::MapInfo};
use kni_common::{
    IFINDEX_BASE,
    endpoint::EndpointPolicy,
    flow::{FlowKey4, FlowKey6, FlowValue},
    uplink::OUTSIDE,
};
use kni_model::EndpointId;

use self::flow::{Converted, LeftOut, OldKey, Scene};
use super::{
    DataplaneError,
    hook::{self, AttachPoint},
    interface_name, membarrier,
    pin::Pins,
    table::{Row, Table},
    tuple::{FlowKey, Tuple},
    xdp,
};

/// The layout that is converted.
const FORMER: u32 = 2;

/// The maps of layout 2 and the rows that the conversion refers to.
pub(super) struct Predecessor {
    dir: PathBuf,
    /// The kernel's id of `ENDPOINTS`.
    id: u32,
    endpoints: Vec<(u32, rows::Endpoint)>,
    config: rows::Config,
}

/// What the copies have done.
#[derive(Debug, Default)]
struct Sum {
    flows: u32,
    written: u32,
    left_out: BTreeMap<LeftOut, u32>,
}

impl Sum {
    /// The flows of one family. What is left out is counted by the first copy; later ones see the same rows.
    fn add(&mut self, round: Round, converted: &Converted, written: u32) {
        if round == Round::All {
            self.flows += converted.flows;
            for (reason, rows) in &converted.left_out {
                *self.left_out.entry(*reason).or_default() += rows;
            }
        }
        self.written += written;
    }

    fn reasons(&self) -> String {
        let parts = self.left_out.iter();
        let parts: Vec<String> = parts
            .map(|(reason, rows)| format!("{rows} {}", reason.as_str()))
            .collect();
        parts.join(", ")
    }
}

/// Which flows a copy writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// All. A row that exists gives way to one with a later packet.
    All,
    /// Those with a packet since that time (jiffies), likewise.
    Since(u64),
    /// Those with a packet since that time that have no row: new programs write rows too.
    Missing(u64),
}

impl Predecessor {
    /// The maps of layout 2, if there are any whose rows can be taken over.
    pub(super) fn find(pins: &Pins) -> Option<Self> {
        let dir = pins.other_layout(FORMER);
        if !dir.exists() {
            return None;
        }
        let found = Self::open_all(dir);
        found
            .inspect_err(|error| {
                tracing::warn!(
                    error = kni_model::error_chain(error),
                    "the maps of layout {FORMER} are ignored; flows are judged again"
                );
            })
            .ok()
    }

    fn open_all(dir: PathBuf) -> Result<Self, DataplaneError> {
        let path = dir.join("ENDPOINTS");
        let info = MapInfo::from_pin(&path).map_err(DataplaneError::map("ENDPOINTS", "opening the pin"))?;
        let endpoints: Table<u32, rows::Endpoint> = Table::open("ENDPOINTS", &path)?;
        let config: Table<u32, rows::Config> = Table::open("CONFIG", &dir.join("CONFIG"))?;
        Ok(Self {
            id: info.id(),
            endpoints: endpoints.rows()?,
            config: config.get(&0)?.unwrap_or_default(),
            dir,
        })
    }

    fn open<K: Row, V: Row>(&self, name: &'static str) -> Result<Table<K, V>, DataplaneError> {
        Table::open(name, &self.dir.join(name))
    }

    /// Whether the maps in place have the rows of these.
    pub(super) fn is_origin_of(&self, pins: &Pins) -> bool {
        pins.has_origin(self.id)
    }

    /// Makes no later start take up the rows that others have left behind by then.
    pub(super) fn unpin(&self) -> Result<(), DataplaneError> {
        let path = self.dir.join("ENDPOINTS");
        fs::remove_file(&path).map_err(DataplaneError::pin(&path, "unpinning"))
    }

    /// Fills the staged maps with all rows but flows, and puts them in place of others.
    pub(super) fn fill(&self, staged: &Pins, pins: &Pins) -> Result<(), DataplaneError> {
        tables::convert(self, staged)?;
        staged.record_origin(self.id)?;
        pins.replace_by(staged)
    }

    /// Copies the flows and switches the links. `jiffies` reads the clock.
    pub(super) fn hand_over(
        &self,
        ebpf: &mut Ebpf,
        pins: &Pins,
        mut jiffies: impl FnMut() -> Result<u64, DataplaneError>,
    ) -> Result<(), DataplaneError> {
        let (flows4, flows6) = (self.flows("FLOWS4"), self.flows("FLOWS6"));
        if flows4.is_none() && flows6.is_none() {
            return Ok(());
        }
        let begun = Instant::now();
        let targets = Targets::open(pins)?;
        let mut sum = Sum::default();
        let mut copy = |round, now| -> Result<(), DataplaneError> {
            let scene = Scene::new(&self.endpoints, self.config.uplink, now);
            if let Some(flows) = &flows4 {
                targets.copy::<rows::FlowKey4, FlowKey4>(&scene, flows, round, &mut sum)?;
            }
            if let Some(flows) = &flows6 {
                targets.copy::<rows::FlowKey6, FlowKey6>(&scene, flows, round, &mut sum)?;
            }
            Ok(())
        };
        let first = jiffies()?;
        copy(Round::All, first)?;
        let second = jiffies()?;
        copy(Round::Since(first), second)?;
        let copied = begun.elapsed();
        let (switched, failed) = self.switch(ebpf, pins)?;
        membarrier::wait_for_programs();
        copy(Round::Missing(second), jiffies()?)?;
        tracing::info!(
            flows = sum.flows,
            rows = sum.written,
            left_out = sum.reasons(),
            links = switched,
            ?copied,
            took = ?begun.elapsed(),
            "took over the traffic of layout {FORMER}"
        );
        if failed == 0 {
            // Nothing writes them any more: the next agent need not copy flows that ended.
            for name in ["FLOWS4", "FLOWS6"] {
                let path = self.dir.join(name);
                if path.exists() {
                    fs::remove_file(&path).map_err(DataplaneError::pin(&path, "unpinning"))?;
                }
            }
        }
        Ok(())
    }

    /// A flow table; `None` where it was taken over before, or is of another kind.
    fn flows<K: Row>(&self, name: &'static str) -> Option<Table<K, rows::FlowValue>> {
        if !self.dir.join(name).exists() {
            return None;
        }
        let opened = self.open(name);
        opened
            .inspect_err(|error| {
                tracing::warn!(
                    error = kni_model::error_chain(error),
                    "a table of layout {FORMER} is ignored; its flows are judged again"
                );
            })
            .ok()
    }

    /// Switches the programs of all endpoints and of the uplink whose interfaces exist. Returns how many, and how many
    /// failed: adoption tries those again, and closes an interface where it fails too.
    fn switch(&self, ebpf: &mut Ebpf, pins: &Pins) -> Result<(u32, u32), DataplaneError> {
        let policies: Table<u32, EndpointPolicy> = Table::open("ENDPOINT_POLICIES", &pins.map("ENDPOINT_POLICIES"))?;
        let indexes: HashMap<u32, u32> = policies
            .rows()?
            .into_iter()
            .map(|(id, row)| (id, row.ifindex))
            .collect();
        let published = self.endpoints.iter().filter(|(_, row)| row.network != 0);
        let mut endpoints: Vec<EndpointId> = published.map(|(id, _)| EndpointId(*id)).collect();
        // Warm interfaces have links and no row.
        endpoints.extend(pins.linked_endpoints()?);
        endpoints.sort_unstable();
        endpoints.dedup();
        let (mut switched, mut failed) = (0, 0);
        let mut note = |result: Result<bool, DataplaneError>| match result {
            Ok(is_there) => switched += u32::from(is_there),
            Err(error) => {
                failed += 1;
                tracing::warn!(error = kni_model::error_chain(&error), "cannot switch a program");
            }
        };
        for endpoint in endpoints {
            let index = indexes.get(&endpoint.0).copied().filter(|index| *index != 0);
            let Some(ifname) = interface_name(index.unwrap_or(IFINDEX_BASE + endpoint.0)) else {
                continue;
            };
            for point in AttachPoint::of_endpoint(pins, &ifname, endpoint) {
                note(hook::switch(ebpf, &point));
            }
            note(xdp::switch_pod(ebpf, pins, &ifname, endpoint).map(|()| false));
        }
        if let Some(ifname) = interface_name(self.config.uplink) {
            for point in AttachPoint::of_uplink(pins, &ifname) {
                note(hook::switch(ebpf, &point));
            }
            note(xdp::switch_uplink(ebpf, pins, &ifname).map(|()| false));
        }
        Ok((switched, failed))
    }
}

/// The tables of flows across the uplink as seen from outside, whose network is [`OUTSIDE`].
const OUTSIDE_TABLES: [&str; 2] = ["NAT4", "NAT6"];

/// The tables that flows are copied to.
struct Targets {
    flows4: Table<FlowKey4, FlowValue>,
    flows6: Table<FlowKey6, FlowValue>,
    outside4: Table<FlowKey4, FlowValue>,
    outside6: Table<FlowKey6, FlowValue>,
}

impl Targets {
    fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        let [outside4, outside6] = OUTSIDE_TABLES;
        Ok(Self {
            flows4: Table::open("FLOWS4", &pins.map("FLOWS4"))?,
            flows6: Table::open("FLOWS6", &pins.map("FLOWS6"))?,
            outside4: Table::open(outside4, &pins.map(outside4))?,
            outside6: Table::open(outside6, &pins.map(outside6))?,
        })
    }
}

/// A key of today's flow tables.
trait Target: FlowKey + Row + Eq + std::hash::Hash {
    /// The table for rows of a network.
    fn table(targets: &Targets, network: u32) -> &Table<Self, FlowValue>;
}

impl Target for FlowKey4 {
    fn table(targets: &Targets, network: u32) -> &Table<Self, FlowValue> {
        if network == OUTSIDE {
            &targets.outside4
        } else {
            &targets.flows4
        }
    }
}

impl Target for FlowKey6 {
    fn table(targets: &Targets, network: u32) -> &Table<Self, FlowValue> {
        if network == OUTSIDE {
            &targets.outside6
        } else {
            &targets.flows6
        }
    }
}

impl Targets {
    /// Copies the flows of one family.
    fn copy<K: OldKey + Row, T: Target>(
        &self,
        scene: &Scene,
        flows: &Table<K, rows::FlowValue>,
        round: Round,
        sum: &mut Sum,
    ) -> Result<(), DataplaneError> {
        let since = match round {
            Round::All => 0,
            Round::Since(time) | Round::Missing(time) => time,
        };
        let converted = flow::convert(scene, &flows.rows()?, since);
        let (mut written, mut refused) = (0, None);
        for (key, network, row) in latest::<T>(&converted.rows) {
            let table = T::table(self, network);
            match write(table, &key, &row, round) {
                Ok(is_written) => written += u32::from(is_written),
                // A full table, or no memory at this moment: the flow's next packet is judged as a first one.
                Err(error) => refused = Some(error),
            }
        }
        if let Some(error) = refused {
            tracing::warn!(error = kni_model::error_chain(&error), "not every flow is taken over");
        }
        sum.add(round, &converted, written);
        Ok(())
    }
}

/// Rows by key. Where two flows of the old table have one key now, the one that was used later has it.
fn latest<T: Target>(rows: &[(Tuple, FlowValue)]) -> Vec<(T, u32, FlowValue)> {
    let mut places: HashMap<T, usize> = HashMap::new();
    let mut all: Vec<(T, u32, FlowValue)> = Vec::new();
    for (tuple, row) in rows {
        let Some(key) = T::from_tuple(tuple) else { continue };
        match places.get(&key).and_then(|place| all.get_mut(*place)) {
            Some((_, _, present)) if is_later(row, present) => *present = *row,
            Some(_later) => {}
            None => {
                places.insert(key, all.len());
                all.push((key, tuple.network, *row));
            }
        }
    }
    all
}

/// Whether a row was written; see [`Round`].
fn write<T: Target>(
    table: &Table<T, FlowValue>,
    key: &T,
    row: &FlowValue,
    round: Round,
) -> Result<bool, DataplaneError> {
    if table.insert(key, row)? {
        return Ok(true);
    }
    if matches!(round, Round::Missing(_)) {
        return Ok(false);
    }
    let present = table.get(key)?;
    if present.is_some_and(|present| !is_later(row, &present)) {
        return Ok(false);
    }
    table.put(key, row)?;
    Ok(true)
}

/// Whether a row has had a packet after the last one of another.
const fn is_later(row: &FlowValue, than: &FlowValue) -> bool {
    let after = row.last_seen.wrapping_sub(than.last_seen);
    after != 0 && after & (1 << 31) == 0
}

#[cfg(test)]
mod tests {
    use kni_common::flow::{EndPorts, FlowEnd, Ports, scope};

    use super::*;
    use crate::table::fixture;

    fn key(number: u8) -> FlowKey4 {
        FlowKey4 {
            scope: scope(5, 6),
            first: [10, 0, 0, 1],
            second: [10, 0, 0, number],
            ports: EndPorts::default(),
        }
    }

    fn row(last_seen: u32, id: u32) -> FlowValue {
        FlowValue {
            last_seen,
            first: FlowEnd { id, generation: 1 },
            ..FlowValue::default()
        }
    }

    #[test]
    fn only_before_the_switch_a_later_row_replaces_another() {
        // The times wrap between the two.
        let (early, late) = (row(u32::MAX, 1), row(3, 2));
        for (round, present, new, expected) in [
            (Round::All, early, late, late),
            (Round::All, late, early, late),
            (Round::Since(0), early, late, late),
            (Round::Since(0), late, early, late),
            (Round::Missing(0), early, late, early),
            (Round::Missing(0), late, early, late),
        ] {
            let table = fixture::hash(16);
            assert!(write(&table, &key(2), &present, round).unwrap(), "there is none");
            let written = write(&table, &key(2), &new, round).unwrap();
            assert_eq!(table.get(&key(2)).unwrap(), Some(expected), "{round:?}");
            assert_eq!(written, expected == new, "{round:?}");
        }
    }

    #[test]
    fn of_two_flows_with_one_key_the_later_one_has_it() {
        let there = Tuple {
            network: 5,
            source: kni_common::address::from_ip([10, 0, 0, 1].into()),
            destination: kni_common::address::from_ip([10, 0, 0, 2].into()),
            ports: Ports::default(),
            protocol: 6,
        };
        for rows in [[row(7, 1), row(8, 2)], [row(8, 2), row(7, 1)]] {
            let [one, two] = rows;
            let latest = latest::<FlowKey4>(&[(there, one), (there.reversed(), two)]);
            assert_eq!(latest, [(key(2), 5, row(8, 2))]);
        }
    }
}
