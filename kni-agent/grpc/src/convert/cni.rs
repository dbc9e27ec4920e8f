//! Parses the attachment that the CNI plugin describes in `extradata`.

use std::{collections::BTreeMap, net::IpAddr};

use kni_model::{CniAttachment, PrimarySelection, SandboxId};
use kni_pods::{Garbage, GarbageRequest};
use kni_proto::{cni, runtime};

use super::{bounds, error::Refusal};

type Entries = BTreeMap<String, String>;

/// The CNI attachment of a request; `None` for clients of KNI.
pub(super) fn attachment(extradata: &Entries, id: &str) -> Result<Option<CniAttachment>, Refusal> {
    let Some(network) = value(extradata, cni::NETWORK) else {
        return Ok(None);
    };
    let ifname = required(extradata, cni::IFNAME)?;
    let container = value(extradata, cni::CONTAINER).unwrap_or(id);
    let invocation = required(extradata, cni::INVOCATION)?;
    for (key, text) in [
        (cni::NETWORK, network),
        (cni::CONTAINER, container),
        (cni::INVOCATION, invocation),
    ] {
        bounds::name(&field(key), text)?;
    }
    if cni::sandbox_id(container, ifname) != id {
        let reason = format!(
            "the sandbox of interface {ifname} of container {container:?} is {:?}",
            cni::sandbox_id(container, ifname)
        );
        return Err(Refusal::new("id", reason));
    }
    Ok(Some(CniAttachment {
        network: network.to_owned(),
        container: container.to_owned(),
        ifname: parse(cni::IFNAME, ifname)?,
        invocation: invocation.to_owned(),
        completed_ns: 0,
    }))
}

/// The runtime's settings of the interface take precedence over the pod's annotations.
pub(super) fn selection(extradata: &Entries, annotated: PrimarySelection) -> Result<PrimarySelection, Refusal> {
    let network = value(extradata, cni::POD_NETWORK).map(|name| parse(cni::POD_NETWORK, name));
    let mac = value(extradata, cni::MAC).map(|mac| parse(cni::MAC, mac));
    let default_route = value(extradata, cni::DEFAULT_ROUTE).map(|wanted| parse(cni::DEFAULT_ROUTE, wanted));
    let ips: Vec<IpAddr> = match value(extradata, cni::IPS) {
        Some(list) => list
            .split(',')
            .map(|ip| parse(cni::IPS, ip.trim()))
            .collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    Ok(PrimarySelection {
        none: annotated.none && network.is_none(),
        network: network.transpose()?.or(annotated.network),
        ips: if ips.is_empty() { annotated.ips } else { ips },
        mac: mac.transpose()?.or(annotated.mac),
        default_route: default_route.transpose()?.or(annotated.default_route),
        ..annotated
    })
}

/// The CNI call that a detach undoes, if it names one.
pub(crate) fn invocation(extradata: &Entries) -> Option<&str> {
    value(extradata, cni::INVOCATION)
}

/// Attachments with illegal names never existed and are ignored.
pub(crate) fn garbage_request(request: runtime::CollectGarbageRequest) -> GarbageRequest {
    let runtime::CollectGarbageRequest {
        cni_network,
        attachments,
        began_ns,
    } = request;
    let ids = attachments.iter().filter_map(|kept| {
        cni::sandbox_id(&kept.container_id, &kept.ifname)
            .parse::<SandboxId>()
            .ok()
    });
    GarbageRequest {
        network: cni_network,
        kept: ids.collect(),
        began_ns,
    }
}

pub(crate) fn garbage(garbage: Garbage) -> runtime::CollectGarbageResponse {
    let Garbage { detached, errors } = garbage;
    let wire = |gone: CniAttachment| runtime::CniAttachment {
        container_id: gone.container,
        ifname: gone.ifname.into(),
    };
    runtime::CollectGarbageResponse {
        detached: detached.into_iter().map(wire).collect(),
        errors,
    }
}

fn value<'a>(extradata: &'a Entries, key: &str) -> Option<&'a str> {
    extradata.get(key).map(String::as_str).filter(|value| !value.is_empty())
}

fn required<'a>(extradata: &'a Entries, key: &str) -> Result<&'a str, Refusal> {
    value(extradata, key).ok_or_else(|| Refusal::new(field(key), format!("missing beside {}", cni::NETWORK)))
}

fn parse<T: std::str::FromStr<Err: std::fmt::Display>>(key: &str, text: &str) -> Result<T, Refusal> {
    let quote: String = text.chars().take(bounds::MAX_QUOTE).collect();
    text.parse()
        .map_err(|invalid| Refusal::new(field(key), format!("{quote:?}: {invalid}")))
}

fn field(key: &str) -> String {
    format!("extradata[{key:?}]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(entries: &[(&str, &str)]) -> Entries {
        entries
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    const WHOLE: [(&str, &str); 4] = [
        (cni::NETWORK, "kni"),
        (cni::IFNAME, "net1"),
        (cni::CONTAINER, "abc"),
        (cni::INVOCATION, "x"),
    ];

    #[test]
    fn only_a_network_name_makes_a_cni_attachment() {
        assert_eq!(attachment(&Entries::new(), "abc"), Ok(None));
        assert_eq!(attachment(&entries(&[(cni::IFNAME, "eth0")]), "abc"), Ok(None));
        let found = attachment(&entries(&WHOLE), "abc:net1").unwrap().unwrap();
        assert_eq!((found.network.as_str(), found.container.as_str()), ("kni", "abc"));
        assert!(found.is_additional());
        let primary = [(cni::NETWORK, "kni"), (cni::IFNAME, "eth0"), (cni::INVOCATION, "x")];
        let found = attachment(&entries(&primary), "abc").unwrap().unwrap();
        assert!(found.container == "abc" && !found.is_additional());
    }

    #[test]
    fn what_is_missing_or_illegal_is_named() {
        for (index, key) in [(1, cni::IFNAME), (3, cni::INVOCATION)] {
            let mut less = WHOLE.to_vec();
            less.remove(index);
            let refusal = attachment(&entries(&less), "abc:net1").unwrap_err();
            assert_eq!(refusal.field, format!("extradata[{key:?}]"));
        }
        let refusal = attachment(&entries(&WHOLE), "abc").unwrap_err();
        assert!(
            refusal.field == "id" && refusal.reason.contains("abc:net1"),
            "{refusal:?}"
        );
        for (key, wrong) in [
            (cni::IPS, "10.0.0.1/24"),
            (cni::MAC, "01:00:00:00:00:01"),
            (cni::POD_NETWORK, "Not"),
            (cni::DEFAULT_ROUTE, "yes"),
        ] {
            let refusal = selection(&entries(&[(key, wrong)]), PrimarySelection::default()).unwrap_err();
            assert_eq!(refusal.field, format!("extradata[{key:?}]"));
        }
    }

    #[test]
    fn the_runtimes_wishes_come_before_annotations() {
        let annotated = PrimarySelection {
            network: "blue".parse().ok(),
            ips: vec!["10.0.0.9".parse().unwrap()],
            ..PrimarySelection::default()
        };
        let wishes = [
            (cni::POD_NETWORK, "red"),
            (cni::IPS, "10.0.0.7, fd00::7"),
            (cni::MAC, "02:00:00:00:00:07"),
            (cni::DEFAULT_ROUTE, "true"),
        ];
        let both = selection(&entries(&wishes), annotated.clone()).unwrap();
        assert_eq!(both.network.unwrap().as_str(), "red");
        assert_eq!((both.ips.len(), both.default_route), (2, Some(true)));
        assert_eq!(both.mac.unwrap().to_string(), "02:00:00:00:00:07");
        assert_eq!(selection(&Entries::new(), annotated.clone()), Ok(annotated));
    }
}
