//! Describes a network to clients and operators, from the state in memory.

use kni_ipam::{FamilyUsage, Usage};
use kni_model::{
    NumberProblem, shared_numbers,
    view::{AddressUse, NetworkView},
};

use crate::registry::{KnownNetwork, State};

/// A network, without what its plugins report.
pub(super) fn view(state: &State, known: &KnownNetwork) -> NetworkView {
    let spec = &known.network.spec;
    let usage = state.ipam.usage(&spec.name);
    let reason = if state.in_sync {
        closed(known).unwrap_or_default()
    } else {
        "the agent has not applied its networks yet"
    };
    NetworkView {
        network: known.network.clone(),
        ready: reason.is_empty(),
        reason: reason.to_owned(),
        attachments: u32::try_from(state.attachments_of(&spec.name)).unwrap_or(u32::MAX),
        total_addresses: usage.as_ref().map_or(0, |usage| usage.total),
        used_addresses: usage.as_ref().map_or(0, |usage| usage.used),
        ipv4: usage.as_ref().map(|usage| family(&usage.ipv4)).unwrap_or_default(),
        ipv6: usage.as_ref().map(|usage| family(&usage.ipv6)).unwrap_or_default(),
        exhausted: usage.as_ref().map(exhausted).unwrap_or_default(),
        origin: known.origin.clone(),
        features: spec.provider.features(),
        number: spec.number,
        number_problem: known.number_problem.clone(),
        number_retained: known.number_problem.as_ref().is_some_and(NumberProblem::is_retained),
    }
}

/// Networks with the same number would receive each other's packets from other nodes, so none of them has it.
pub(super) fn close_shared(views: &mut [NetworkView]) {
    let numbers = views
        .iter()
        .filter_map(|view| Some((&view.network.spec.name, view.number?)));
    let shared = shared_numbers(numbers);
    for view in views {
        let networks = view.number.and_then(|number| Some((number, shared.get(&number)?)));
        if let Some((number, networks)) = networks {
            view.number = None;
            view.number_problem = Some(NumberProblem::Shared {
                number,
                networks: networks.clone(),
            });
        }
    }
}

/// Why a network accepts no new attachments.
pub(super) fn closed(known: &KnownNetwork) -> Option<&'static str> {
    match (known.orphaned, known.network.spec.enabled) {
        (true, _) => Some("its manifest is gone; it goes with its last attachment"),
        (false, false) => Some("disabled (spec.enabled: false)"),
        (false, true) => None,
    }
}

fn family(usage: &FamilyUsage) -> AddressUse {
    AddressUse {
        total: usage.total,
        used: usage.used,
        free: usage.free,
        resting: usage.resting,
    }
}

/// Each family of a network gives an address to each pod, so an exhausted one prevents new pods.
fn exhausted(usage: &Usage) -> String {
    let families = [("IPv4", &usage.ipv4), ("IPv6", &usage.ipv6)];
    let full = families
        .into_iter()
        .filter(|(_, family)| family.total > 0 && family.free == 0);
    full.map(|(name, _)| name).collect::<Vec<_>>().join(" and ")
}
