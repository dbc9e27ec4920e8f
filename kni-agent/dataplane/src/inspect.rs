//! Describes the pinned maps and their fill level.

use aya::maps::MapInfo;
use kni_common::{
    counter::COUNTERS_PER_ENDPOINT,
    layout::{MapKind, MapSpec},
};
use kni_model::view::MapView;

use super::{DataplaneError, FlowCensus, pin::Pins, table};

pub(super) fn maps(pins: &Pins, specs: &[MapSpec], endpoints: u32) -> Result<Vec<MapView>, DataplaneError> {
    specs.iter().map(|spec| view(pins, endpoints, spec)).collect()
}

fn view(pins: &Pins, endpoints: u32, spec: &MapSpec) -> Result<MapView, DataplaneError> {
    let pin = pins.map(spec.name);
    let info = MapInfo::from_pin(&pin).map_err(DataplaneError::map(spec.name, "reading the pin"))?;
    Ok(MapView {
        name: spec.name.to_owned(),
        id: info.id(),
        kind: kind(spec.kind).to_owned(),
        key_size: info.key_size(),
        value_size: info.value_size(),
        max_entries: info.max_entries(),
        entries: entries(pins, endpoints, spec)?,
        pin,
        purpose: spec.purpose.to_owned(),
    })
}

const fn kind(kind: MapKind) -> &'static str {
    match kind {
        MapKind::Array => "array",
        MapKind::PerCpuArray => "percpu_array",
        MapKind::Hash => "hash",
        MapKind::PerCpuHash => "percpu_hash",
        MapKind::LruHash => "lru_hash",
        MapKind::LpmTrie => "lpm_trie",
        MapKind::RingBuf => "ringbuf",
    }
}

/// Rows in use. `endpoints` is the number of published endpoints: arrays have a row, or several, for each.
fn entries(pins: &Pins, endpoints: u32, spec: &MapSpec) -> Result<u32, DataplaneError> {
    Ok(match spec.kind {
        MapKind::Array | MapKind::PerCpuArray if spec.name == "COUNTERS" => {
            endpoints.saturating_mul(COUNTERS_PER_ENDPOINT)
        }
        // CONFIG and EXPLANATION.
        MapKind::Array | MapKind::PerCpuArray if spec.max_entries == 1 => 1,
        MapKind::Array | MapKind::PerCpuArray => endpoints,
        MapKind::Hash | MapKind::PerCpuHash | MapKind::LruHash | MapKind::LpmTrie => {
            table::count(spec.name, &pins.map(spec.name))?
        }
        MapKind::RingBuf => 0,
    })
}

/// Name, rows in use and capacity of each map with keys. Swept flow tables are not walked again.
pub(super) fn pressure(
    pins: &Pins,
    specs: &[MapSpec],
    endpoints: u32,
    census: Option<&FlowCensus>,
) -> Result<Vec<(String, u32, u32)>, DataplaneError> {
    let with_keys = specs
        .iter()
        .filter(|spec| spec.kind != MapKind::RingBuf && spec.max_entries > 1);
    with_keys
        .map(|spec| {
            let entries = match (spec.name, census) {
                ("FLOWS4", Some(census)) => census.flows4,
                ("FLOWS6", Some(census)) => census.flows6,
                ("NAT4", Some(census)) => census.nat4,
                ("NAT6", Some(census)) => census.nat6,
                _ => entries(pins, endpoints, spec)?,
            };
            Ok((spec.name.to_owned(), entries, spec.max_entries))
        })
        .collect()
}
