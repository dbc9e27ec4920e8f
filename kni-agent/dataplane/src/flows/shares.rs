//! Derives the rows of `FLOW_SHARES`: the counted flows and the limit of each endpoint.

use std::collections::BTreeMap;

use kni_common::{
    config::{FlowCount, FlowShare, SHARE_WINDOW_SHIFT},
    endpoint::EndpointRow,
};
use kni_model::EndpointId;

use super::{FlowUse, low};

/// The rows of `FLOW_SHARES`, including those of endpoints without flows. `capacity`: rows of a flow table.
pub(super) fn shares(
    now: u64,
    endpoints: &[(u32, EndpointRow)],
    counted: &BTreeMap<EndpointId, FlowUse>,
    capacity: u32,
) -> Vec<(u32, FlowShare)> {
    let window = low(now >> SHARE_WINDOW_SHIFT);
    let limits = limits(endpoints, counted, capacity);
    let published = endpoints.iter().filter(|(_, row)| row.network != 0);
    published
        .map(|(endpoint, row)| {
            let used = counted.get(&EndpointId(*endpoint)).copied().unwrap_or_default();
            let count = |counted| FlowCount { counted, opened: 0 };
            let share = FlowShare {
                window,
                limit: limits.get(&row.network).copied().unwrap_or(0),
                connections: count(used.connections),
                datagrams: count(used.datagrams),
                inbound: count(used.inbound),
            };
            (*endpoint, share)
        })
        .collect()
}

/// The limits of endpoints in networks that have more than half of a table: an equal part of that half, so that the
/// interfaces of one tenant together leave room for all others.
fn limits(
    endpoints: &[(u32, EndpointRow)],
    counted: &BTreeMap<EndpointId, FlowUse>,
    capacity: u32,
) -> BTreeMap<u32, u32> {
    let mut networks: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    for (endpoint, row) in endpoints.iter().filter(|(_, row)| row.network != 0) {
        let used = counted.get(&EndpointId(*endpoint)).copied().unwrap_or_default();
        let (members, flows) = networks.entry(row.network).or_default();
        *members += 1;
        *flows = flows.saturating_add(used.total());
    }
    let several = networks.len() > 1;
    let half = capacity / 2;
    let crowded = networks.into_iter().filter(|(_, (_, flows))| several && *flows > half);
    crowded
        .map(|(network, (members, _))| (network, (half / members).max(1)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_with_more_than_half_of_the_table_is_limited() {
        let row = |network| EndpointRow {
            network,
            ..EndpointRow::default()
        };
        let endpoints = [(1, row(1)), (2, row(1)), (3, row(2)), (4, row(0))];
        let used = |connections| FlowUse {
            connections,
            ..FlowUse::default()
        };
        let counted = |one, other| {
            [(EndpointId(1), used(one)), (EndpointId(2), used(other))]
                .into_iter()
                .collect()
        };
        assert_eq!(limits(&endpoints, &counted(300, 200), 1000), BTreeMap::new());
        assert_eq!(
            limits(&endpoints, &counted(300, 201), 1000),
            [(1, 250)].into_iter().collect()
        );
        let only_one = &endpoints[..2];
        assert_eq!(
            limits(only_one, &counted(900, 0), 1000),
            BTreeMap::new(),
            "nobody else needs it"
        );
    }
}
