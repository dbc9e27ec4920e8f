//! Tells of the pinned maps.

use aya::maps::MapInfo;
use kni_common::{
    counter::COUNTERS_PER_ENDPOINT,
    layout::{ALL_MAPS, MapKind, MapSpec},
};

use super::{DataplaneError, maps::Maps, pin::Pins};
use crate::model::view::MapView;

pub(super) fn maps(maps: &Maps, pins: &Pins, max_endpoints: u32) -> Result<Vec<MapView>, DataplaneError> {
    ALL_MAPS
        .iter()
        .map(|spec| view(maps, pins, max_endpoints, spec))
        .collect()
}

fn view(maps: &Maps, pins: &Pins, max_endpoints: u32, spec: &MapSpec) -> Result<MapView, DataplaneError> {
    let pin = pins.map(spec.name);
    let info = MapInfo::from_pin(&pin).map_err(DataplaneError::map(spec.name, "reading the pin"))?;
    Ok(MapView {
        name: spec.name.to_owned(),
        id: info.id(),
        kind: kind(spec.kind).to_owned(),
        key_size: info.key_size(),
        value_size: info.value_size(),
        max_entries: info.max_entries(),
        entries: entries(maps, max_endpoints, spec.name)?,
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

fn entries(maps: &Maps, max_endpoints: u32, name: &str) -> Result<u32, DataplaneError> {
    let in_use = || maps.published(max_endpoints).map(|endpoints| count(endpoints.len()));
    Ok(match name {
        "ENDPOINTS" | "EVENT_GATES" => in_use()?,
        "COUNTERS" => in_use()?.saturating_mul(COUNTERS_PER_ENDPOINT),
        "ADDRESSES" => count(maps.addresses.keys().count()),
        "ROUTES" => count(maps.routes.keys().count()),
        "FLOWS4" => count(maps.flows4.keys().count()),
        "FLOWS6" => count(maps.flows6.keys().count()),
        "FRAGMENTS" => count(maps.fragments.keys().count()),
        "DROPS" => count(maps.drops.keys().count()),
        _ => 0,
    })
}

fn count(rows: usize) -> u32 {
    u32::try_from(rows).unwrap_or(u32::MAX)
}
