//! Makes veth pairs with programs at their host ends, one step after the other, and adopts those of an earlier agent.

use std::sync::Arc;

use ipnet::IpNet;
use kni_common::IFINDEX_BASE;
use kni_dataplane::{DataplaneError, EndpointConfig};
use kni_model::{Attachment, EndpointId, IfName, MacAddr};
use kni_netlink::{self as netlink, Netlink, Netns, PodInterfaceConfig, VethSpec};

use super::{bandwidth, context::Build, xdp};
use crate::{
    alias::alias,
    error::{AttachError, Subject},
    kernel::Kernel,
};

/// MTU of prewarmed interfaces; the network's own is set when it is known.
pub(crate) const PREWARMED_MTU: u32 = 1500;

/// A pair to be made, for a pod or for the pool.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) endpoint: EndpointId,
    pub(crate) host_ifname: IfName,
    pub(crate) host_mac: MacAddr,
    pub(crate) ifname: IfName,
    pub(crate) mac: MacAddr,
    pub(crate) mtu: u32,
    pub(crate) alias: String,
}

/// Whether an attach waits for the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Made {
    /// For the pool: with TCX links, which take some 30 ms.
    Prewarmed,
    /// For an attach: with the fastest hook.
    OnDemand,
}

/// Gives an attachment its interface; the dataplane row comes last (I1).
pub(super) async fn make(kernel: &Kernel, build: &Build<'_>, attachment: &mut Attachment) -> Result<(), AttachError> {
    let subject = build.subject;
    let pod = build.enter().await?;
    let alias = alias(
        &subject.pod,
        &subject.sandbox,
        &attachment.ifname,
        &attachment.network,
        build.cni,
    );
    if attachment.ifindex == 0 {
        let pair = Pair {
            endpoint: attachment.endpoint,
            host_ifname: attachment.host_ifname.clone(),
            host_mac: attachment.host_mac,
            ifname: attachment.ifname.clone(),
            mac: attachment.mac,
            mtu: attachment.mtu,
            alias,
        };
        attachment.ifindex = make_pair(kernel, &pair, build.netns, Made::OnDemand, subject).await?;
    } else {
        fit_prewarmed(kernel, attachment, &pod, &alias, subject).await?;
    }
    pod.configure_pod(&pod_config(attachment, build))
        .await
        .map_err(subject.failed("configuring the pod interface"))?;
    if attachment.bandwidth.is_bounded() {
        bandwidth::limit(kernel, attachment, &pod, subject).await?;
    }
    if attachment.xdp {
        xdp::attach(kernel, attachment, build.netns, subject).await?;
    }
    kernel
        .netlink
        .wait_for_carrier(attachment.host_ifindex)
        .await
        .map_err(subject.failed("waiting for the carrier"))?;
    ensure_host_routes(kernel, attachment, subject).await?;
    kernel
        .dataplane
        .publish(&EndpointConfig::from(&*attachment))
        .map_err(subject.failed("writing the dataplane's rows"))
}

/// Makes a pair with both programs attached, the host end up. Returns the index of the pod end.
pub(crate) async fn make_pair(
    kernel: &Kernel,
    pair: &Pair,
    netns: &Netns,
    made: Made,
    subject: &Subject,
) -> Result<u32, AttachError> {
    let spec = VethSpec {
        host_name: pair.host_ifname.clone(),
        host_ifindex: Some(IFINDEX_BASE + pair.endpoint.0),
        host_mac: pair.host_mac,
        alias: pair.alias.clone(),
        pod_name: pair.ifname.clone(),
        pod_mac: pair.mac,
        mtu: pair.mtu,
    };
    let indexes = kernel
        .netlink
        .create_veth(&spec, netns)
        .await
        .map_err(subject.failed("creating the veth pair"))?;
    netlink::prepare_pod_interface(netns, &pair.ifname)
        .await
        .map_err(subject.failed("preparing the pod interface"))?;
    netlink::prepare_host_interface(&pair.host_ifname)
        .await
        .map_err(subject.failed("preparing the host interface"))?;
    // Before the link is up: no packet passes without a program (I1).
    attach_programs(kernel, pair.host_ifname.clone(), pair.endpoint, made)
        .await
        .map_err(subject.failed("attaching the programs"))?;
    kernel
        .netlink
        .set_up(indexes.host)
        .await
        .map_err(subject.failed("setting the host interface up"))?;
    Ok(indexes.pod)
}

/// Runs on a blocking thread: it waits inside the kernel, for rtnl or for RCU grace periods.
async fn attach_programs(
    kernel: &Kernel,
    ifname: IfName,
    endpoint: EndpointId,
    made: Made,
) -> Result<(), DataplaneError> {
    let dataplane = Arc::clone(&kernel.dataplane);
    tokio::task::spawn_blocking(move || match made {
        Made::Prewarmed => dataplane.attach(ifname.as_str(), endpoint),
        Made::OnDemand => dataplane.attach_provisionally(ifname.as_str(), endpoint),
    })
    .await
    .unwrap_or_else(|ended| Err(DataplaneError::Kernel(ended.to_string())))
}

/// Gives a prewarmed pair the settings of this attachment.
async fn fit_prewarmed(
    kernel: &Kernel,
    attachment: &Attachment,
    pod: &Netlink,
    alias: &str,
    subject: &Subject,
) -> Result<(), AttachError> {
    let failed = |step| subject.failed::<netlink::Error>(step);
    kernel
        .netlink
        .set_alias(attachment.host_ifindex, alias)
        .await
        .map_err(failed("naming the host interface"))?;
    if attachment.mtu != PREWARMED_MTU {
        kernel
            .netlink
            .set_mtu(attachment.host_ifindex, attachment.mtu)
            .await
            .map_err(failed("setting the MTU"))?;
    }
    // A requested MAC address; setting the current one again costs nothing.
    pod.set_mac(attachment.ifindex, attachment.mac)
        .await
        .map_err(failed("setting the MAC address"))
}

/// Routes the pod's addresses from the node to the host end, where the node has access to the pod. Idempotent.
pub(super) async fn ensure_host_routes(
    kernel: &Kernel,
    attachment: &Attachment,
    subject: &Subject,
) -> Result<(), AttachError> {
    let addresses = attachment.addresses().filter(|_| attachment.host_access);
    for address in addresses {
        kernel
            .netlink
            .add_pod_neighbour(attachment.host_ifindex, address, attachment.mac)
            .await
            .map_err(subject.failed("adding the host's neighbour entry"))?;
        kernel
            .netlink
            .add_pod_route(address, attachment.host_ifindex)
            .await
            .map_err(subject.failed("adding the host's route"))?;
    }
    Ok(())
}

/// Takes over the interface of an earlier agent: its row stays as it is and its links move to the new programs in place.
pub(super) async fn adopt(kernel: &Kernel, attachment: &Attachment, subject: &Subject) {
    let dataplane = &kernel.dataplane;
    // Rows first: with new, empty maps the programs would find no row.
    let adopted = dataplane
        .republish(&EndpointConfig::from(attachment))
        .and_then(|()| dataplane.adopt(attachment.host_ifname.as_str(), attachment.endpoint))
        .and_then(|()| xdp::adopt(kernel, attachment))
        .map_err(subject.failed("adopting the interface"));
    let opened = if adopted.is_err() {
        // The state of its programs is unknown.
        kernel.close(attachment).await;
        Ok(())
    } else {
        // An earlier agent may have closed it.
        let opened = kernel.open_again(attachment).await;
        opened.map_err(subject.failed("setting the host end up"))
    };
    let routed = ensure_host_routes(kernel, attachment, subject).await;
    for error in [adopted.err(), opened.err(), routed.err()].into_iter().flatten() {
        tracing::error!(%error, "cannot adopt an interface fully");
    }
}

/// Through this interface the pod reaches the network's own ranges and those of its Services.
fn pod_config(attachment: &Attachment, build: &Build<'_>) -> PodInterfaceConfig {
    let routes: Vec<IpNet> = [&build.link.subnets, &build.link.service_subnets]
        .into_iter()
        .flatten()
        .copied()
        .collect();
    PodInterfaceConfig {
        ifindex: attachment.ifindex,
        ipv4: attachment.ipv4,
        ipv6: attachment.ipv6,
        gateway_mac: attachment.host_mac,
        mtu: attachment.mtu,
        default_route: attachment.default_route,
        routes,
        route_metric: build.metric(),
    }
}
