//! Parses the pod's annotations about its primary interface.

use std::{collections::BTreeMap, net::IpAddr, str::FromStr};

use kni_model::{NetworkSelection, PrimarySelection};

use super::error::Refusal;

/// Network of the primary interface.
const NETWORK: &str = "kni.dev/network";
/// Value of [`NETWORK`] for a pod without a primary interface; no network may have that name.
const NO_NETWORK: &str = "none";
/// Addresses of the primary interface, a comma list.
const IPS: &str = "kni.dev/ips";
/// MAC address of the primary interface.
const MAC: &str = "kni.dev/mac";
/// Most addresses that one interface may request.
const MAX_IPS: usize = 16;
/// Longest value that an error repeats, in characters.
const MAX_QUOTE: usize = 64;

/// Parses the three annotations of KNI. Absent and blank ones request nothing.
pub(super) fn selection(annotations: &BTreeMap<String, String>) -> Result<PrimarySelection, Refusal> {
    let value = |key| {
        annotations
            .get(key)
            .map(|value| value.trim())
            .filter(|value| !value.is_empty())
    };
    Ok(PrimarySelection {
        network: value(NETWORK)
            .filter(|value| *value != NO_NETWORK)
            .map(|value| parse(NETWORK, value))
            .transpose()?,
        none: value(NETWORK) == Some(NO_NETWORK),
        ips: value(IPS).map(addresses).transpose()?.unwrap_or_default(),
        mac: value(MAC).map(|value| parse(MAC, value)).transpose()?,
        ..PrimarySelection::default()
    })
}

/// The network that Multus' annotation selects, where nothing else names one. Addresses and MAC address of KNI's own
/// annotations take precedence.
pub(super) fn or_selected(primary: PrimarySelection, selected: Option<NetworkSelection>) -> PrimarySelection {
    let selected = selected.filter(|_| primary.network.is_none() && !primary.none);
    let Some(selection) = selected else { return primary };
    PrimarySelection {
        network: Some(selection.network.clone()),
        ips: if primary.ips.is_empty() {
            selection.ips.clone()
        } else {
            primary.ips
        },
        mac: primary.mac.or(selection.mac),
        selection: Some(selection),
        ..primary
    }
}

fn parse<T: FromStr<Err: std::fmt::Display>>(annotation: &str, value: &str) -> Result<T, Refusal> {
    value
        .parse()
        .map_err(|invalid| refuse(annotation, format!("{invalid}")))
}

fn addresses(list: &str) -> Result<Vec<IpAddr>, Refusal> {
    let mut ips = Vec::new();
    for item in list.split(',').map(str::trim) {
        let quote = || item.chars().take(MAX_QUOTE).collect::<String>();
        let ip = item
            .parse()
            .map_err(|_not_an_address| refuse(IPS, format!("{:?} is not an address without prefix", quote())))?;
        if ips.contains(&ip) {
            return Err(refuse(IPS, format!("{ip} is requested twice")));
        }
        if ips.len() == MAX_IPS {
            return Err(refuse(IPS, format!("more than {MAX_IPS} addresses")));
        }
        ips.push(ip);
    }
    Ok(ips)
}

fn refuse(annotation: &str, reason: String) -> Refusal {
    Refusal::new(format!("annotations[{annotation:?}]"), reason)
}
