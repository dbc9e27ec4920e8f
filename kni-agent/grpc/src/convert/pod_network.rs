//! Converts the messages of containerd's pod network service to those of `kni.KNI`, so that one code path reads both.

use std::collections::BTreeMap;

use kni_model::{Attachment, InterfaceKind, Sandbox};
use kni_proto::{
    kni::{AttachInterfaceRequest, DnsConfig, Isolation, PortMapping, Protocol},
    networking::{
        self, InterfaceIPs, InterfaceType, NetworkInterface, RouteEntry, SetupPodNetworkRequest,
        SetupPodNetworkResponse,
    },
};

use super::{
    bounds,
    error::{Refusal, RequestError},
    identity::{Identity, LABEL_UID},
};

/// The equivalent request of `kni.KNI`, with the results of earlier services of the chain.
pub(crate) fn setup_request(
    request: SetupPodNetworkRequest,
) -> Result<(AttachInterfaceRequest, SetupPodNetworkResponse), RequestError> {
    let SetupPodNetworkRequest {
        sandbox_id,
        netns_path,
        pod_name,
        pod_namespace,
        pod_uid,
        annotations,
        mut labels,
        port_mappings,
        dns_config,
        cgroup_parent,
        prev_result,
    } = request;
    let identity = Identity {
        name: &pod_name,
        namespace: &pod_namespace,
        uid: &pod_uid,
        labels: Some(&labels),
        extradata: None,
    };
    let pod = identity.pod();
    let ports = ports(port_mappings).map_err(|refusal| refusal.of(&pod, &sandbox_id))?;
    if !pod_uid.is_empty() {
        labels.insert(LABEL_UID.to_owned(), pod_uid);
    }
    let mut extradata = BTreeMap::new();
    if !cgroup_parent.is_empty() {
        extradata.insert("cgroupPath".to_owned(), cgroup_parent);
    }
    let attach = AttachInterfaceRequest {
        name: pod_name,
        id: sandbox_id,
        namespace: pod_namespace,
        isolation: Some(Isolation {
            path: netns_path,
            ..Isolation::default()
        }),
        dns_config: dns_config.as_ref().map(|dns| DnsConfig {
            servers: dns.servers.clone(),
            searches: dns.searches.clone(),
            options: dns.options.clone(),
        }),
        port_mappings: ports,
        labels,
        annotations,
        extradata,
    };
    let mut before = prev_result.unwrap_or_default();
    before.dns = before.dns.or(dns_config);
    Ok((attach, before))
}

fn ports(wire: Vec<networking::PortMapping>) -> Result<Vec<PortMapping>, Refusal> {
    wire.into_iter()
        .enumerate()
        .map(|(index, port)| one(index, port))
        .collect()
}

fn one(index: usize, wire: networking::PortMapping) -> Result<PortMapping, Refusal> {
    let refuse = |field: &str, reason: String| Refusal::new(format!("port_mappings[{index}].{field}"), reason);
    let protocol = match wire.protocol.to_ascii_uppercase().as_str() {
        // As in a Pod, TCP is the default.
        "" | "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        _ => {
            let quote: String = wire.protocol.chars().take(bounds::MAX_QUOTE).collect();
            return Err(refuse("protocol", format!("{quote:?} is none of TCP, UDP and SCTP")));
        }
    };
    let port = |field: &str, value: u32| {
        i32::try_from(value).map_err(|_range| refuse(field, format!("{value} is not a port (0 to 65535)")))
    };
    Ok(PortMapping {
        protocol: protocol.into(),
        container_port: port("container_port", wire.container_port)?,
        host_port: port("host_port", wire.host_port)?,
        host_ip: wire.host_ip,
    })
}

/// The result of a sandbox, appended to the results of earlier services.
pub(crate) fn setup_answer(sandbox: &Sandbox, before: SetupPodNetworkResponse) -> SetupPodNetworkResponse {
    let SetupPodNetworkResponse {
        mut interfaces,
        mut routes,
        dns,
    } = before;
    // A repeated request contains our own result where the runtime has kept it.
    interfaces.retain(|other| {
        !sandbox
            .attachments
            .iter()
            .any(|ours| ours.ifname.as_str() == other.name)
    });
    routes.retain(|other| {
        !sandbox
            .attachments
            .iter()
            .any(|ours| ours.ifname.as_str() == other.interface_name)
    });
    interfaces.extend(sandbox.attachments.iter().map(interface));
    routes.extend(self::routes(sandbox));
    SetupPodNetworkResponse {
        interfaces,
        routes,
        dns,
    }
}

/// The interfaces of a sandbox, the primary one first.
pub(crate) fn interfaces(sandbox: &Sandbox) -> Vec<NetworkInterface> {
    sandbox.attachments.iter().map(interface).collect()
}

fn interface(attachment: &Attachment) -> NetworkInterface {
    NetworkInterface {
        name: attachment.ifname.to_string(),
        mac_address: attachment.mac.to_string(),
        r#type: InterfaceType::Netdev.into(),
        mtu: attachment.mtu,
        addresses: cidrs(attachment),
    }
}

/// Interfaces made by plugins have prefixes of their own.
fn cidrs(attachment: &Attachment) -> Vec<String> {
    match &attachment.kind {
        InterfaceKind::Cni(interface) => interface.addresses.iter().map(ToString::to_string).collect(),
        InterfaceKind::Veth | InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) => {
            let each = attachment.addresses();
            each.map(|address| format!("{address}/{}", attachment.prefix_len(address)))
                .collect()
        }
    }
}

/// The addresses of a sandbox, without prefix, by interface.
pub(crate) fn interface_ips(sandbox: &Sandbox) -> BTreeMap<String, InterfaceIPs> {
    let of = |attachment: &Attachment| InterfaceIPs {
        ips: attachment.addresses().map(|address| address.to_string()).collect(),
    };
    let each = sandbox.attachments.iter();
    each.map(|attachment| (attachment.ifname.to_string(), of(attachment)))
        .collect()
}

/// The routes of a sandbox.
pub(crate) fn routes(sandbox: &Sandbox) -> Vec<RouteEntry> {
    let each = sandbox.attachments.iter();
    each.flat_map(|attachment| {
        let routes = attachment.pod_routes().into_iter();
        routes.map(|(destination, gateway)| RouteEntry {
            destination: destination.to_string(),
            gateway: gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
            interface_name: attachment.ifname.to_string(),
            metric: 0,
        })
    })
    .collect()
}
