//! Resolves the ends of an explain request to interfaces and addresses.

use std::{net::IpAddr, sync::Arc};

use kni_model::{
    Attachment, Network, NetworkId, NetworkName, Sandbox,
    flow_view::{ExplainQuestion, QuestionError},
};

use super::Naming;

/// One end of a request, as written.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Named {
    Pod {
        namespace: String,
        name: String,
        ifname: Option<String>,
    },
    Address(IpAddr),
}

/// An interface of a pod of this node.
pub(super) struct Interface {
    pub(super) attachment: Attachment,
}

/// Both ends in one address family.
pub(super) struct Ends {
    pub(super) network: NetworkId,
    pub(super) source: Option<Interface>,
    pub(super) source_ip: IpAddr,
    pub(super) destination: Option<Interface>,
    pub(super) destination_ip: IpAddr,
}

/// Finds both ends in the network of the request.
pub(super) fn find(question: &ExplainQuestion, naming: &dyn Naming) -> Result<Ends, QuestionError> {
    let source = parse("source", &question.source)?;
    let destination = parse("destination", &question.destination)?;
    let network = network(question, &source, &destination, naming)?;
    let from = interface(&source, &network, naming)?;
    let to = interface(&destination, &network, naming)?;
    if from.is_none() && to.is_none() {
        return Err(QuestionError::Invalid {
            field: "source",
            reason: format!("neither end is a pod of this node on network {}", network.spec.name),
        });
    }
    let pair = [true, false].into_iter().find_map(|v4| {
        let source_ip = address(&source, from.as_ref(), v4)?;
        Some((source_ip, address(&destination, to.as_ref(), v4)?))
    });
    let (source_ip, destination_ip) = pair.ok_or_else(|| QuestionError::Invalid {
        field: "destination",
        reason: "both ends must have addresses of one family".to_owned(),
    })?;
    Ok(Ends {
        network: network.id,
        source: from,
        source_ip,
        destination: to,
        destination_ip,
    })
}

fn parse(field: &'static str, text: &str) -> Result<Named, QuestionError> {
    let invalid = || QuestionError::Invalid {
        field,
        reason: format!("{text:?} is neither namespace/pod, namespace/pod@interface nor an address"),
    };
    let Some((namespace, rest)) = text.split_once('/') else {
        let address: IpAddr = text.parse().map_err(|_not_one| invalid())?;
        return Ok(Named::Address(address.to_canonical()));
    };
    let (name, ifname) = rest
        .split_once('@')
        .map_or((rest, None), |(name, ifname)| (name, Some(ifname)));
    if namespace.is_empty() || name.is_empty() || name.contains('/') || ifname.is_some_and(str::is_empty) {
        return Err(invalid());
    }
    Ok(Named::Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        ifname: ifname.map(str::to_owned),
    })
}

/// The requested network; else that of a requested interface; else that of the source's first interface, or of the
/// destination's; else the default network.
fn network(
    question: &ExplainQuestion,
    source: &Named,
    destination: &Named,
    naming: &dyn Naming,
) -> Result<Network, QuestionError> {
    let networks = naming.networks();
    let by_name = |name: &NetworkName| networks.iter().find(|network| network.spec.name == *name).cloned();
    let not_found = |name: &str| QuestionError::NotFound {
        what: format!("network {name}"),
    };
    if let Some(wanted) = &question.network {
        let name = wanted.parse().ok();
        return name.as_ref().and_then(by_name).ok_or_else(|| not_found(wanted));
    }
    let with_interface = |named: &&Named| matches!(named, Named::Pod { ifname: Some(_), .. });
    let without = |named: &&Named| matches!(named, Named::Pod { ifname: None, .. });
    let ends = [source, destination];
    let deciding = ends
        .into_iter()
        .find(with_interface)
        .or_else(|| ends.into_iter().find(without));
    match deciding {
        Some(named) => {
            let name = first_interface(named, None, naming)?.attachment.network;
            by_name(&name).ok_or_else(|| not_found(name.as_str()))
        }
        None => networks
            .iter()
            .find(|network| network.spec.default)
            .cloned()
            .ok_or_else(|| not_found("(the default one)")),
    }
}

fn interface(named: &Named, network: &Network, naming: &dyn Naming) -> Result<Option<Interface>, QuestionError> {
    match named {
        Named::Pod { .. } => first_interface(named, Some(&network.spec.name), naming).map(Some),
        Named::Address(ip) => {
            let endpoint = naming.endpoint_at(network.id, *ip);
            let found = endpoint.and_then(|endpoint| naming.attachment(endpoint));
            Ok(found.map(|(_, attachment)| Interface { attachment }))
        }
    }
}

/// The pod's interface of that name, or its first one, on the network if one is given.
fn first_interface(
    named: &Named,
    network: Option<&NetworkName>,
    naming: &dyn Naming,
) -> Result<Interface, QuestionError> {
    let Named::Pod {
        namespace,
        name,
        ifname,
    } = named
    else {
        return Err(QuestionError::Failed("an address is no pod".to_owned()));
    };
    let sandbox: Option<Arc<Sandbox>> = naming.sandbox_of(namespace, name);
    let fits = |attachment: &&Attachment| {
        ifname
            .as_ref()
            .is_none_or(|ifname| attachment.ifname.as_str() == ifname)
            && network.is_none_or(|network| attachment.network == *network)
    };
    let found = sandbox
        .as_ref()
        .and_then(|sandbox| sandbox.attachments.iter().find(fits).cloned());
    found.map(|attachment| Interface { attachment }).ok_or_else(|| {
        let mut what = format!("pod {namespace}/{name}");
        if sandbox.is_some() {
            let interface = ifname
                .as_ref()
                .map(|ifname| format!(" by {ifname}"))
                .unwrap_or_default();
            let network = network
                .map(|network| format!(" to network {network}"))
                .unwrap_or_default();
            what = format!("{what}{interface}{network}");
        } else if let Some(refusal) = naming.refusal_of(namespace, name) {
            what = format!("{what} was refused ({refusal}), so it");
        }
        QuestionError::NotFound { what }
    })
}

fn address(named: &Named, interface: Option<&Interface>, v4: bool) -> Option<IpAddr> {
    match (named, interface) {
        (Named::Address(ip), _) => Some(*ip).filter(|ip| ip.is_ipv4() == v4),
        (Named::Pod { .. }, Some(Interface { attachment })) if v4 => attachment.ipv4.map(IpAddr::V4),
        (Named::Pod { .. }, Some(Interface { attachment })) => attachment.ipv6.map(IpAddr::V6),
        (Named::Pod { .. }, None) => None,
    }
}
