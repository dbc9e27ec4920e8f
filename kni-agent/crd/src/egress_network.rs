//! Validates the egress mode and the service ranges of a `PodNetwork`.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::network::EgressMode;

use super::{
    PodNetworkSpec,
    cidr::{check_range, read_addresses, read_cidrs},
    invalid::{FieldError, at},
    pod_network::EgressChoice,
};

/// Maximum number of ranges of virtual addresses of one network.
const MAX_SERVICE_SUBNETS: usize = 16;

/// Reads the egress mode and the dedicated source addresses.
pub(super) fn read_egress(spec: &PodNetworkSpec, ours: &[IpNet]) -> Result<(EgressMode, Vec<IpAddr>), FieldError> {
    let egress = spec.egress.clone().unwrap_or_default();
    let mode = match egress.mode {
        Some(EgressChoice::None) => EgressMode::None,
        Some(EgressChoice::Route) => EgressMode::Route,
        Some(EgressChoice::Masquerade) => EgressMode::Masquerade,
        None => EgressMode::implied(spec.default),
    };
    if mode == EgressMode::Route && !spec.default {
        let reason = "Route is for the default network: other networks may use the same addresses, so replies could \
                      not be routed back; set Masquerade or None";
        return Err(at("spec.egress.mode", reason));
    }
    let field = "spec.egress.addresses";
    let addresses = read_addresses(field, &egress.addresses)?;
    if mode != EgressMode::Masquerade && !addresses.is_empty() {
        return Err(at(field, "has a meaning with mode Masquerade only"));
    }
    for (index, address) in addresses.iter().enumerate() {
        if let Some(range) = ours.iter().find(|range| range.contains(address)) {
            let reason = format!("{address} is inside {range} of the same network; answers would not come back");
            return Err(at(format!("{field}[{index}]"), reason));
        }
    }
    Ok((mode, addresses))
}

/// Reads the ranges of virtual addresses, which must overlap neither each other nor `subnets`.
pub(super) fn read_service_subnets(spec: &PodNetworkSpec, subnets: &[IpNet]) -> Result<Vec<IpNet>, FieldError> {
    let field = "spec.serviceSubnets";
    let ranges = read_cidrs(field, &spec.service_subnets, 0, MAX_SERVICE_SUBNETS)?;
    for (index, range) in ranges.iter().enumerate() {
        let earlier = ranges.get(..index).unwrap_or_default();
        check_range(range, subnets)
            .and_then(|()| check_range(range, earlier))
            .map_err(|reason| at(format!("{field}[{index}]"), reason))?;
    }
    Ok(ranges)
}
