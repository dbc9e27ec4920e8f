//! Configures interfaces on a shared parent link: addresses, gateways and routes.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::Attachment;
use kni_netlink::{Netlink, PlainConfig};

use super::context::Build;
use crate::error::AttachError;

/// Addresses and routes of the pod's interface.
pub(super) async fn configure(build: &Build<'_>, attachment: &Attachment, inside: &Netlink) -> Result<(), AttachError> {
    let link = &build.link;
    let on_link = |address: IpAddr| {
        let subnet = link.subnets.iter().find(|subnet| subnet.contains(&address));
        subnet.map_or(IpNet::from(address), |subnet| {
            IpNet::new(address, subnet.prefix_len()).unwrap_or(IpNet::from(address))
        })
    };
    let has_family = |gateway: &IpAddr| attachment.addresses().any(|ip| ip.is_ipv4() == gateway.is_ipv4());
    let gateways = link.gateways.iter().copied();
    let config = PlainConfig {
        ifindex: attachment.ifindex,
        mtu: attachment.mtu,
        addresses: attachment.addresses().map(on_link).collect(),
        gateways: gateways
            .filter(|gateway| attachment.default_route && has_family(gateway))
            .collect(),
        route_metric: build.metric(),
    };
    let configured = inside.configure_plain(&config).await;
    configured.map_err(build.subject.failed("configuring the pod interface"))
}
