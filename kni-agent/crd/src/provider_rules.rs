//! Validates the parameters of a provider and the fields of the network that it supports.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::{
    IfName, Provider,
    provider::{CniSource, HostDevices, Macvlan, MacvlanMode, Tap},
};

use super::{
    PodNetworkSpec,
    cidr::read_addresses,
    invalid::{FieldError, at, shown},
    provider::{MacvlanModeSpec, ProviderSpec, ProviderType},
};

/// Maximum number of devices of one network.
const MAX_DEVICES: usize = 256;
/// Maximum length of the name of a configuration or a file (`NAME_MAX` of Linux).
const MAX_NAME: usize = 255;
/// Reserved by the kernel as "no user or group".
const NO_ID: u32 = u32::MAX;

/// Reads the provider, and refuses fields of the spec that only apply to another one.
pub(super) fn read_provider(spec: &PodNetworkSpec, subnets: &[IpNet]) -> Result<Provider, FieldError> {
    let given = spec.provider.clone().unwrap_or_default();
    refuse_parameters_of_others(&given)?;
    let provider = match given.kind {
        ProviderType::Ebpf => Provider::Ebpf,
        ProviderType::Macvlan => Provider::Macvlan(macvlan(&given, subnets)?),
        ProviderType::HostDevice => Provider::HostDevice(host_device(&given, subnets)?),
        ProviderType::Tap => Provider::Tap(tap(&given)?),
        ProviderType::Cni => Provider::Cni(cni(&given)?),
    };
    refuse_fields_of_others(spec, &provider)?;
    Ok(provider)
}

/// Minimum number of subnets of a network.
pub(super) fn fewest_subnets(spec: &PodNetworkSpec) -> usize {
    let kind = spec.provider.as_ref().map_or(ProviderType::Ebpf, |given| given.kind);
    usize::from(kind == ProviderType::Ebpf)
}

fn refuse_parameters_of_others(given: &ProviderSpec) -> Result<(), FieldError> {
    use ProviderType::{Cni, HostDevice, Macvlan, Tap};
    let parameters: [(&str, bool, &[ProviderType]); 10] = [
        ("parent", given.parent.is_some(), &[Macvlan]),
        ("allowUplink", given.allow_uplink.is_some(), &[Macvlan]),
        ("mode", given.mode.is_some(), &[Macvlan]),
        ("devices", !given.devices.is_empty(), &[HostDevice]),
        ("gateways", !given.gateways.is_empty(), &[Macvlan, HostDevice]),
        ("owner", given.owner.is_some(), &[Tap]),
        ("group", given.group.is_some(), &[Tap]),
        ("multiQueue", given.multi_queue.is_some(), &[Tap]),
        ("confName", given.conf_name.is_some(), &[Cni]),
        ("file", given.file.is_some(), &[Cni]),
    ];
    for (name, present, meant_for) in parameters {
        if present && !meant_for.contains(&given.kind) {
            let types: Vec<&str> = meant_for.iter().map(|kind| kind.as_str()).collect();
            let reason = format!("has a meaning with type {} only", types.join(" or "));
            return Err(at(format!("spec.provider.{name}"), reason));
        }
    }
    Ok(())
}

fn refuse_fields_of_others(spec: &PodNetworkSpec, provider: &Provider) -> Result<(), FieldError> {
    if provider.is_ebpf() {
        return Ok(());
    }
    let ours = [
        ("egress", spec.egress.is_some()),
        ("serviceSubnets", !spec.service_subnets.is_empty()),
        ("xdp", spec.xdp),
    ];
    for (name, present) in ours {
        if present {
            let reason = format!("has a meaning with provider Ebpf only, not with {}", provider.as_str());
            return Err(at(format!("spec.{name}"), reason));
        }
    }
    if spec.default && !matches!(provider, Provider::Cni(_)) {
        let reason = format!(
            "the default network is one with provider Ebpf or CNI, not {}: the node must reach its pods",
            provider.as_str()
        );
        return Err(at("spec.default", reason));
    }
    if matches!(provider, Provider::Cni(_)) && !spec.exclude_subnets.is_empty() {
        return Err(at(
            "spec.excludeSubnets",
            "has no meaning with provider CNI: plugins assign the addresses",
        ));
    }
    Ok(())
}

fn macvlan(given: &ProviderSpec, subnets: &[IpNet]) -> Result<Macvlan, FieldError> {
    let field = "spec.provider.parent";
    let parent = given
        .parent
        .as_deref()
        .ok_or_else(|| at(field, "is missing: type Macvlan needs an interface of the node"))?;
    Ok(Macvlan {
        parent: ifname(field, parent)?,
        mode: match given.mode {
            None | Some(MacvlanModeSpec::Bridge) => MacvlanMode::Bridge,
            Some(MacvlanModeSpec::Private) => MacvlanMode::Private,
            Some(MacvlanModeSpec::Vepa) => MacvlanMode::Vepa,
            Some(MacvlanModeSpec::Passthru) => MacvlanMode::Passthru,
        },
        allow_uplink: given.allow_uplink.unwrap_or(false),
        gateways: gateways(given, subnets)?,
    })
}

fn host_device(given: &ProviderSpec, subnets: &[IpNet]) -> Result<HostDevices, FieldError> {
    let field = "spec.provider.devices";
    if given.devices.is_empty() || given.devices.len() > MAX_DEVICES {
        let reason = format!("has {} entries, not 1 to {MAX_DEVICES}", given.devices.len());
        return Err(at(field, reason));
    }
    let mut devices: Vec<IfName> = Vec::new();
    for (index, device) in given.devices.iter().enumerate() {
        let path = format!("{field}[{index}]");
        let device = ifname(&path, device)?;
        if devices.contains(&device) {
            return Err(at(path, format!("{device} is there twice")));
        }
        devices.push(device);
    }
    Ok(HostDevices {
        devices,
        gateways: gateways(given, subnets)?,
    })
}

fn tap(given: &ProviderSpec) -> Result<Tap, FieldError> {
    for (name, id) in [("owner", given.owner), ("group", given.group)] {
        if id == Some(NO_ID) {
            return Err(at(
                format!("spec.provider.{name}"),
                format!("{NO_ID} is not a valid ID"),
            ));
        }
    }
    Ok(Tap {
        owner: given.owner,
        group: given.group,
        multi_queue: given.multi_queue.unwrap_or(false),
    })
}

fn cni(given: &ProviderSpec) -> Result<CniSource, FieldError> {
    let plain = |field: &str, name: &str| {
        let legal = !name.is_empty() && name.len() <= MAX_NAME && !name.chars().any(char::is_control);
        if legal {
            Ok(name.to_owned())
        } else {
            Err(at(
                field,
                format!("{:?} is not 1 to {MAX_NAME} printable bytes", shown(name)),
            ))
        }
    };
    match (&given.conf_name, &given.file) {
        (Some(name), None) => plain("spec.provider.confName", name).map(CniSource::Name),
        (None, Some(file)) => {
            let field = "spec.provider.file";
            let file = plain(field, file)?;
            let ending = [".conf", ".conflist", ".json"];
            if file.contains('/') || !ending.iter().any(|ending| file.ends_with(ending)) {
                let reason = format!("{:?} is not the name of a .conflist, .conf or .json file", shown(&file));
                return Err(at(field, reason));
            }
            Ok(CniSource::File(file))
        }
        (Some(_), Some(_)) => Err(at("spec.provider.file", "either confName or file, not both")),
        (None, None) => Err(at(
            "spec.provider.confName",
            "is missing: type CNI needs the name of a configuration, or a file",
        )),
    }
}

fn ifname(field: &str, text: &str) -> Result<IfName, FieldError> {
    text.parse()
        .map_err(|error: kni_model::InvalidId| at(field, error.to_string()))
}

fn gateways(given: &ProviderSpec, subnets: &[IpNet]) -> Result<Vec<IpAddr>, FieldError> {
    let field = "spec.provider.gateways";
    let gateways = read_addresses(field, &given.gateways)?;
    for (index, gateway) in gateways.iter().enumerate() {
        if !subnets.iter().any(|subnet| subnet.contains(gateway)) {
            let reason = format!("{gateway} is not inside any of the network's subnets");
            return Err(at(format!("{field}[{index}]"), reason));
        }
    }
    Ok(gateways)
}

#[cfg(test)]
mod tests {
    use kni_model::NetworkSpec;

    use super::*;
    use crate::{FromObject as _, PodNetwork};

    fn read(spec: &str) -> Result<NetworkSpec, (String, String)> {
        let spec: PodNetworkSpec = serde_json::from_str(spec).expect("the shape is right");
        NetworkSpec::from_object(&PodNetwork::new("blue", spec)).map_err(|error| (error.field, error.reason))
    }

    fn provider(text: &str) -> Provider {
        read(&format!(r#"{{"subnets":["10.0.0.0/24"],"provider":{text}}}"#))
            .unwrap()
            .provider
    }

    #[test]
    fn each_type_takes_its_parameters() {
        assert_eq!(provider(r#"{"type":"Ebpf"}"#), Provider::Ebpf);
        let Provider::Macvlan(macvlan) = provider(r#"{"type":"Macvlan","parent":"eth1","gateways":["10.0.0.9"]}"#)
        else {
            panic!("not a macvlan");
        };
        assert_eq!((macvlan.parent.as_str(), macvlan.mode), ("eth1", MacvlanMode::Bridge));
        assert!(!macvlan.allow_uplink, "not unless the network permits it");
        assert_eq!(macvlan.gateways.len(), 1);
        let Provider::HostDevice(devices) = provider(r#"{"type":"HostDevice","devices":["a","b"]}"#) else {
            panic!("not host devices");
        };
        assert_eq!(devices.devices.len(), 2);
        let tap = provider(r#"{"type":"Tap","owner":107,"multiQueue":true}"#);
        let wanted = Tap {
            owner: Some(107),
            group: None,
            multi_queue: true,
        };
        assert_eq!(tap, Provider::Tap(wanted));
        assert_eq!(
            provider(r#"{"type":"CNI","file":"10-x.conflist"}"#),
            Provider::Cni(CniSource::File("10-x.conflist".to_owned()))
        );
    }

    #[test]
    fn subnets_are_needed_by_our_own_dataplane_alone() {
        for (provider, fine) in [
            (r#"{"type":"Ebpf"}"#, false),
            (r#"{"type":"CNI","confName":"cbr0"}"#, true),
            (r#"{"type":"Tap"}"#, true),
            (r#"{"type":"Macvlan","parent":"eth1"}"#, true),
            (r#"{"type":"HostDevice","devices":["eth1"]}"#, true),
        ] {
            let read = read(&format!(r#"{{"provider":{provider}}}"#));
            assert_eq!(read.is_ok(), fine, "{provider}: {read:?}");
        }
    }

    /// A spec, the field in the error, and a part of the reason.
    const MEANINGLESS: [(&str, &str, &str); 16] = [
        (r#"{"provider":{"type":"Macvlan"}}"#, "spec.provider.parent", "missing"),
        (
            r#"{"provider":{"type":"Tap","allowUplink":true}}"#,
            "spec.provider.allowUplink",
            "Macvlan only",
        ),
        (
            r#"{"provider":{"type":"Macvlan","parent":"a/b"}}"#,
            "spec.provider.parent",
            "interface name",
        ),
        (
            r#"{"provider":{"type":"Tap","parent":"eth1"}}"#,
            "spec.provider.parent",
            "Macvlan only",
        ),
        (
            r#"{"provider":{"type":"Tap","owner":4294967295}}"#,
            "spec.provider.owner",
            "not a valid ID",
        ),
        (
            r#"{"provider":{"type":"HostDevice"}}"#,
            "spec.provider.devices",
            "0 entries",
        ),
        (
            r#"{"provider":{"type":"HostDevice","devices":["a","a"]}}"#,
            "spec.provider.devices[1]",
            "twice",
        ),
        (r#"{"provider":{"type":"CNI"}}"#, "spec.provider.confName", "missing"),
        (
            r#"{"provider":{"type":"CNI","confName":"a","file":"a.conf"}}"#,
            "spec.provider.file",
            "not both",
        ),
        (
            r#"{"provider":{"type":"CNI","file":"../a.conf"}}"#,
            "spec.provider.file",
            "not the name",
        ),
        (
            r#"{"provider":{"type":"CNI","confName":"a"},"xdp":true}"#,
            "spec.xdp",
            "Ebpf only",
        ),
        (
            r#"{"provider":{"type":"Tap"},"egress":{"mode":"None"}}"#,
            "spec.egress",
            "not with Tap",
        ),
        (
            r#"{"provider":{"type":"Tap"},"serviceSubnets":["10.9.0.0/16"]}"#,
            "spec.serviceSubnets",
            "Ebpf only",
        ),
        (
            r#"{"provider":{"type":"Tap"},"default":true}"#,
            "spec.default",
            "Ebpf or CNI",
        ),
        (
            r#"{"provider":{"type":"Macvlan","parent":"e","gateways":["10.1.0.1"]},"subnets":["10.0.0.0/24"]}"#,
            "spec.provider.gateways[0]",
            "not inside",
        ),
        (
            r#"{"subnets":["10.0.0.0/24"],"excludeSubnets":["10.0.0.9/32"],"provider":{"type":"CNI","confName":"a"}}"#,
            "spec.excludeSubnets",
            "plugins assign",
        ),
    ];

    #[test]
    fn what_means_nothing_is_refused_by_field() {
        for (spec, field, why) in MEANINGLESS {
            let (at, reason) = read(spec).expect_err(spec);
            assert_eq!(at, field, "{spec}: {reason}");
            assert!(reason.contains(why), "{spec}: {reason}");
        }
        let default = read(r#"{"provider":{"type":"CNI","confName":"a"},"default":true}"#).unwrap();
        assert_eq!(default.egress, kni_model::network::EgressMode::None);
    }

    #[test]
    fn a_gateway_is_never_handed_out() {
        let spec =
            read(r#"{"subnets":["10.0.0.0/24"],"provider":{"type":"Macvlan","parent":"e","gateways":["10.0.0.77"]}}"#);
        assert_eq!(spec.unwrap().exclude_subnets, ["10.0.0.77/32".parse().unwrap()]);
    }
}
