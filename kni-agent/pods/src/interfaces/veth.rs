//! Makes veth pairs with programs at their host ends, one step after the other, and adopts those of an earlier agent.

use std::sync::Arc;

use ipnet::IpNet;
use kni_common::IFINDEX_BASE;
use kni_dataplane::{Dataplane, EndpointConfig};
use kni_model::{Attachment, EndpointId, IfName, MacAddr};
use kni_netlink::{self as netlink, DirectNetlink, Entrance, HostEnd, Netns, PodInterfaceConfig, VethSpec};

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

/// Gives an attachment its interface, with programs that drop until [`publish`].
pub(super) async fn make(kernel: &Kernel, build: &Build<'_>, attachment: &mut Attachment) -> Result<(), AttachError> {
    let subject = build.subject;
    let alias = alias(
        &subject.pod,
        &subject.sandbox,
        &attachment.ifname,
        &attachment.network,
        build.cni,
    );
    let is_new = attachment.ifindex == 0;
    let end = HostEnd {
        ifindex: attachment.host_ifindex,
        alias: (!is_new).then(|| alias.clone()),
        mtu: (!is_new && attachment.mtu != PREWARMED_MTU).then_some(attachment.mtu),
        pod_mac: attachment.mac,
        addresses: attachment.addresses().filter(|_| attachment.host_access).collect(),
    };
    let pair = is_new.then(|| Pair {
        endpoint: attachment.endpoint,
        host_ifname: attachment.host_ifname.clone(),
        host_mac: attachment.host_mac,
        ifname: attachment.ifname.clone(),
        mac: attachment.mac,
        mtu: attachment.mtu,
        alias,
    });
    let work = Work {
        pair,
        end,
        config: pod_config(attachment, build),
        dataplane: Arc::clone(&kernel.dataplane),
        netns: build.netns.clone(),
        subject: subject.clone(),
    };
    let connection = kernel.take_connection(build.netns.id()).filter(|_| !is_new);
    let (ifindex, carrier) = if let Some(inside) = connection {
        let done = kni_tasks::in_place(|| work.configure(connect(subject)?, inside));
        done.map_err(|panicked| subject.ended(&panicked))??
    } else {
        let done = build.netns.visit(move |entrance| work.run(entrance)).await;
        done.map_err(subject.failed("configuring the pod interface"))??
    };
    attachment.ifindex = ifindex;
    if attachment.bandwidth.is_bounded() {
        bandwidth::limit(kernel, attachment, &build.enter().await?, subject).await?;
    }
    if attachment.xdp {
        xdp::attach(kernel, attachment, build.netns, subject).await?;
    }
    if !carrier || attachment.xdp {
        kernel
            .netlink
            .wait_for_carrier(attachment.host_ifindex)
            .await
            .map_err(subject.failed("waiting for the carrier"))?;
    }
    Ok(())
}

/// The steps on both sides of an interface, for one thread.
struct Work {
    /// The pair to be made, unless it is prewarmed.
    pair: Option<Pair>,
    end: HostEnd,
    /// Without the index of a pair that is to be made.
    config: PodInterfaceConfig,
    dataplane: Arc<Dataplane>,
    netns: Netns,
    subject: Subject,
}

impl Work {
    /// As [`Self::configure`], from outside of the namespace.
    fn run(mut self, entrance: &Entrance) -> Result<(u32, bool), AttachError> {
        let subject = &self.subject;
        let mut host = connect(subject)?;
        if let Some(pair) = &self.pair {
            self.config.ifindex = make_outside(&mut host, &self.dataplane, pair, &self.netns, subject)?;
        }
        let inside = entrance
            .enter()
            .map_err(subject.failed("entering the network namespace"))?;
        if let Some(pair) = &self.pair {
            prepare_inside(&pair.ifname, subject)?;
        }
        self.configure(host, inside)
    }

    /// Configures both ends of a pair. Returns the index of the pod end, and whether the host end has its carrier.
    fn configure(self, mut host: DirectNetlink, mut inside: DirectNetlink) -> Result<(u32, bool), AttachError> {
        let subject = &self.subject;
        inside
            .configure_pod(&self.config)
            .map_err(subject.failed("configuring the pod interface"))?;
        let carrier = host
            .configure_host_end(&self.end)
            .map_err(subject.failed("configuring the host interface"))?;
        Ok((self.config.ifindex, carrier))
    }
}

/// Writes the rows: from here on packets pass.
pub(super) fn publish(kernel: &Kernel, attachment: &Attachment, subject: &Subject) -> Result<(), AttachError> {
    kernel
        .dataplane
        .publish(&EndpointConfig::from(attachment))
        .map_err(subject.failed("writing the dataplane's rows"))
}

/// Makes a pair with both programs attached, provisionally, and the host end up. The pod end is down: it would send
/// multicast reports, which count as drops. Returns the index of the pod end and a connection inside the namespace.
pub(crate) async fn make_pair(
    kernel: &Kernel,
    pair: Pair,
    netns: &Netns,
    subject: &Subject,
) -> Result<(u32, DirectNetlink), AttachError> {
    let (dataplane, inner, about) = (Arc::clone(&kernel.dataplane), netns.clone(), subject.clone());
    let made = netns.visit(move |entrance| {
        let mut host = connect(&about)?;
        let ifindex = make_outside(&mut host, &dataplane, &pair, &inner, &about)?;
        let mut inside = entrance
            .enter()
            .map_err(about.failed("entering the network namespace"))?;
        prepare_inside(&pair.ifname, &about)?;
        inside
            .set_loopback_up()
            .map_err(about.failed("setting the loopback interface up"))?;
        Ok((ifindex, inside))
    });
    made.await.map_err(subject.failed("making the interface"))?
}

fn connect(subject: &Subject) -> Result<DirectNetlink, AttachError> {
    DirectNetlink::new().map_err(subject.failed("connecting to rtnetlink"))
}

/// Makes a pair, with both programs attached by the fastest hook before the host end is up: no packet passes without a
/// program (I1). The thread waits inside the kernel, for rtnl. Returns the index of the pod end.
fn make_outside(
    host: &mut DirectNetlink,
    dataplane: &Dataplane,
    pair: &Pair,
    netns: &Netns,
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
    let indexes = host
        .create_veth(&spec, netns)
        .map_err(subject.failed("creating the veth pair"))?;
    netlink::prepare_host_interface_here(&pair.host_ifname).map_err(subject.failed("preparing the host interface"))?;
    dataplane
        .attach_provisionally(pair.host_ifname.as_str(), pair.endpoint)
        .map_err(subject.failed("attaching the programs"))?;
    host.set_up(indexes.host)
        .map_err(subject.failed("setting the host interface up"))?;
    Ok(indexes.pod)
}

fn prepare_inside(ifname: &IfName, subject: &Subject) -> Result<(), AttachError> {
    netlink::prepare_pod_interface_here(ifname)
        .map(drop)
        .map_err(subject.failed("preparing the pod interface"))
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

/// Takes over the interface of an earlier agent: its row stays as it is and its links move to the new programs in
/// place.
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
