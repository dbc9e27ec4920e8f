//! Sizes each map by the options.

use kni_common::{
    counter::COUNTERS_PER_ENDPOINT,
    layout::{ALL_MAPS, MapSpec},
};

use super::DataplaneOptions;

/// The expected maps for the configured sizes.
pub(super) fn specs(options: &DataplaneOptions) -> Vec<MapSpec> {
    let DataplaneOptions {
        max_endpoints,
        max_flows,
        max_policy_rows,
        max_services,
        ..
    } = *options;
    let sized = |spec: &MapSpec| match spec.name {
        "ENDPOINTS" | "ENDPOINT_POLICIES" | "INTERFACES" | "EVENT_GATES" | "FLOW_SHARES" | "MASQUERADE"
        | "SHARED_EGRESS" => max_endpoints,
        "ADDRESSES" => 2 * max_endpoints + max_services,
        "COUNTERS" => max_endpoints * COUNTERS_PER_ENDPOINT,
        "DROPS" => 16 * max_endpoints,
        "FLOWS4" | "FLOWS6" => max_flows,
        "POLICY" | "PORTS" | "IDENTITIES" => max_policy_rows,
        "SERVICES" | "AFFINITY" => max_services,
        "BACKENDS" => 4 * max_services,
        _ => spec.max_entries,
    };
    let with_size = |spec: &MapSpec| MapSpec {
        max_entries: sized(spec),
        ..*spec
    };
    ALL_MAPS.iter().map(with_size).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use kni_common::layout::{
        DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS, DEFAULT_MAX_POLICY_ROWS, DEFAULT_MAX_SERVICES, MapKind,
    };

    use super::*;
    use crate::HookChoice;

    #[test]
    fn the_defaults_are_what_the_programs_declare() {
        let options = DataplaneOptions {
            object: Vec::new(),
            root: PathBuf::new(),
            max_endpoints: DEFAULT_MAX_ENDPOINTS,
            max_flows: DEFAULT_MAX_FLOWS,
            max_policy_rows: DEFAULT_MAX_POLICY_ROWS,
            max_services: DEFAULT_MAX_SERVICES,
            hook: HookChoice::Auto,
        };
        assert_eq!(specs(&options), ALL_MAPS);
        let doubled = DataplaneOptions {
            max_endpoints: 2 * DEFAULT_MAX_ENDPOINTS,
            max_flows: 2 * DEFAULT_MAX_FLOWS,
            max_policy_rows: 2 * DEFAULT_MAX_POLICY_ROWS,
            max_services: 2 * DEFAULT_MAX_SERVICES,
            ..options
        };
        let fixed: Vec<&str> = specs(&doubled)
            .iter()
            .zip(ALL_MAPS)
            .filter(|(sized, declared)| sized.max_entries == declared.max_entries)
            .map(|(sized, _)| sized.name)
            .collect();
        assert_eq!(
            fixed,
            [
                "ROUTES",
                "NAT4",
                "NAT6",
                "FRAGMENTS",
                "FRAGMENTS_OUTSIDE",
                "CONFIG",
                "HITS",
                "HOST_PORTS",
                "NODE_PORTS",
                "NODE_PEERS",
                "SOURCES",
                "EGRESS_SHARES",
                "NODES",
                "NUMBERS",
                "NETWORKS",
                "OVERLAY",
                "EXPLANATION",
                "DROP_EVENTS",
                "FLOW_EVENTS"
            ]
        );
        assert!(
            specs(&doubled)
                .iter()
                .all(|spec| spec.kind != MapKind::RingBuf || spec.max_entries == 1 << 20)
        );
    }
}
