//! Builds the sandbox of a simulated pod, and the views of its interfaces.

use std::{path::PathBuf, sync::Arc};

use kni_model::{
    Attachment, Bandwidth, EndpointId, IfName, InterfaceKind, InvalidId, MacAddr, NetnsIdentity, NetworkId, Phase,
    Sandbox,
    selection::PRIMARY_IFNAME,
    view::{EndpointCounts, InterfaceView, ProgramView},
};

use super::{MTU, NewPod};

pub(super) fn sandbox(
    new: &NewPod<'_>,
    network_id: NetworkId,
    endpoint: u32,
    (ipv4, ipv6): (Option<std::net::Ipv4Addr>, Option<std::net::Ipv6Addr>),
) -> Result<Sandbox, InvalidId> {
    let ifname: IfName = PRIMARY_IFNAME.parse()?;
    let [_, a, b, c] = endpoint.to_be_bytes();
    let mac = MacAddr([2, 0, 0, a, b, c]);
    let attachment = Attachment {
        endpoint: EndpointId(endpoint),
        network: new.network.clone(),
        definition: None,
        network_id,
        ifname: ifname.clone(),
        ifindex: 2,
        host_ifname: ifname.clone(),
        host_ifindex: endpoint,
        mac,
        host_mac: mac,
        ipv4,
        ipv6,
        mtu: MTU,
        default_route: true,
        host_access: false,
        routes: Vec::new(),
        xdp: false,
        kind: InterfaceKind::Veth,
        bandwidth: Bandwidth::default(),
    };
    Ok(Sandbox {
        id: new.pod.uid.parse()?,
        pod: new.pod.clone(),
        phase: Phase::Ready,
        netns: PathBuf::from("/run/netns").join(&new.pod.uid),
        netns_identity: NetnsIdentity {
            dev: 4,
            inode: u64::from(endpoint),
        },
        labels: new.labels.clone(),
        port_mappings: Vec::new(),
        container_ports: Vec::new(),
        attachments: vec![attachment],
        cni: None,
        parent: None,
    })
}

pub(super) fn interfaces(sandbox: &Arc<Sandbox>) -> Vec<InterfaceView> {
    let program = |hook: &str, name: &str, id: u32| ProgramView {
        name: name.to_owned(),
        id,
        hook: hook.to_owned(),
        link_id: id,
    };
    let views = sandbox.attachments.iter().map(|attachment| InterfaceView {
        sandbox: Arc::clone(sandbox),
        attachment: attachment.clone(),
        programs: vec![
            program("tcx/ingress", "from_pod", attachment.endpoint.0),
            program("tcx/egress", "to_pod", attachment.endpoint.0),
        ],
        counts: EndpointCounts::default(),
        provisional: false,
        problems: Vec::new(),
    });
    views.collect()
}
