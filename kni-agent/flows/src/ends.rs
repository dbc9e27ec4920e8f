//! Resolves the ends of an explain request to interfaces and addresses.

use std::{net::IpAddr, sync::Arc};

use kni_model::{
    Attachment, Network, NetworkId, NetworkName, Sandbox,
    flow_view::{ExplainQuestion, QuestionError},
    selection::PRIMARY_IFNAME,
};

use super::{Naming, RemotePod};

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

/// An interface of a pod.
pub(super) enum Interface {
    /// Of this node.
    Local(Box<Attachment>),
    /// Of another node.
    Remote(Arc<RemotePod>),
}

impl Interface {
    fn network(&self) -> NetworkId {
        match self {
            Self::Local(attachment) => attachment.network_id,
            Self::Remote(remote) => remote.network,
        }
    }

    fn address(&self, v4: bool) -> Option<IpAddr> {
        match self {
            Self::Local(attachment) if v4 => attachment.ipv4.map(IpAddr::V4),
            Self::Local(attachment) => attachment.ipv6.map(IpAddr::V6),
            Self::Remote(remote) => remote.addresses.iter().copied().find(|ip| ip.is_ipv4() == v4),
        }
    }

    fn local(self) -> Option<Attachment> {
        match self {
            Self::Local(attachment) => Some(*attachment),
            Self::Remote(_) => None,
        }
    }
}

/// Both ends in one address family; the interface of each that is a pod of this node.
pub(super) struct Ends {
    pub(super) network: NetworkId,
    pub(super) source: Option<Attachment>,
    pub(super) source_ip: IpAddr,
    pub(super) destination: Option<Attachment>,
    pub(super) destination_ip: IpAddr,
}

/// The addresses of a question about a packet that arrives.
pub(super) fn of_arrival(question: &ExplainQuestion) -> Result<(IpAddr, IpAddr), QuestionError> {
    let address = |field, text| match parse(field, text)? {
        Named::Address(ip) => Ok(ip),
        Named::Pod { .. } => Err(QuestionError::Invalid {
            field,
            reason: format!("{text:?} must be an address where the tunnel is given that the packet comes through"),
        }),
    };
    Ok((
        address("source", &question.source)?,
        address("destination", &question.destination)?,
    ))
}

/// Finds both ends in the network of the request.
pub(super) fn find(question: &ExplainQuestion, naming: &dyn Naming) -> Result<Ends, QuestionError> {
    let source = parse("source", &question.source)?;
    let destination = parse("destination", &question.destination)?;
    let network = network(question, &source, &destination, naming)?;
    let from = interface(&source, &network, naming)?;
    let to = interface(&destination, &network, naming)?;
    let is_here = |found: &Option<Interface>| matches!(found, Some(Interface::Local(_)));
    if !is_here(&from) && !is_here(&to) {
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
        source: from.and_then(Interface::local),
        source_ip,
        destination: to.and_then(Interface::local),
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
            let id = first_interface(named, None, naming)?.network();
            let found = networks.iter().find(|network| network.id == id).cloned();
            found.ok_or_else(|| not_found(&id.to_string()))
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
            Ok(found.map(|(_, attachment)| Interface::Local(Box::new(attachment))))
        }
    }
}

/// The pod's interface of that name, or its first one, on the network if one is given. A pod of another node is known
/// if it is a confirmed member.
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
    if let Some(attachment) = found {
        return Ok(Interface::Local(Box::new(attachment)));
    }
    if sandbox.is_none()
        && let Some(remote) = remote_interface((namespace, name), ifname.as_deref(), network, naming)
    {
        return Ok(Interface::Remote(remote));
    }
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
    Err(QuestionError::NotFound { what })
}

/// That interface of a pod of another node: the primary one first, then by name.
fn remote_interface(
    (namespace, name): (&str, &str),
    ifname: Option<&str>,
    network: Option<&NetworkName>,
    naming: &dyn Naming,
) -> Option<Arc<RemotePod>> {
    let fits = |remote: &Arc<RemotePod>| {
        ifname.is_none_or(|ifname| remote.ifname.as_str() == ifname)
            && network.is_none_or(|network| naming.network_name(remote.network).as_ref() == Some(network))
    };
    let mut found: Vec<Arc<RemotePod>> = naming.remote_pod(namespace, name).into_iter().filter(fits).collect();
    found.sort_by_key(|remote| (remote.ifname.as_str() != PRIMARY_IFNAME, remote.ifname.clone()));
    found.into_iter().next()
}

fn address(named: &Named, interface: Option<&Interface>, v4: bool) -> Option<IpAddr> {
    match named {
        Named::Address(ip) => Some(*ip).filter(|ip| ip.is_ipv4() == v4),
        Named::Pod { .. } => interface?.address(v4),
    }
}
