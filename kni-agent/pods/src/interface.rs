//! Makes one interface, step by step, and stops its traffic again.

use kni_common::IFINDEX_BASE;
use kni_dataplane::{DataplaneError, EndpointConfig};
use kni_model::{Attachment, EndpointId, IfName, MacAddr};
use kni_netlink as netlink;
use kni_netlink::{Netlink, Netns, PodInterfaceConfig, VethSpec};

use super::{
    AttachError, Inner,
    error::{Subject, chain},
};

/// MTU of interfaces made ahead; the network's own is set when it is known.
pub(super) const WARM_MTU: u32 = 1500;

/// A pair to be made, whoever it is for.
#[derive(Debug, Clone)]
pub(super) struct Pair {
    pub(super) endpoint: EndpointId,
    pub(super) host_ifname: IfName,
    pub(super) host_mac: MacAddr,
    pub(super) ifname: IfName,
    pub(super) mac: MacAddr,
    pub(super) mtu: u32,
    pub(super) alias: String,
}

/// Whether somebody waits for an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Made {
    /// Nobody does: with TCX links, which take some 30 ms.
    Ahead,
    /// An attach does: with whatever is fastest.
    Now,
}

impl Inner {
    /// Gives an attachment its interface; the dataplane row comes last (I1).
    pub(super) async fn build_interface(
        &self,
        attachment: &mut Attachment,
        netns: &Netns,
        alias: &str,
        position: usize,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let pod = Netlink::in_namespace(netns)
            .await
            .map_err(subject.failed("entering the network namespace"))?;
        if attachment.ifindex == 0 {
            let pair = Pair {
                endpoint: attachment.endpoint,
                host_ifname: attachment.host_ifname.clone(),
                host_mac: attachment.host_mac,
                ifname: attachment.ifname.clone(),
                mac: attachment.mac,
                mtu: attachment.mtu,
                alias: alias.to_owned(),
            };
            attachment.ifindex = self.make_pair(&pair, netns, Made::Now, subject).await?;
        } else {
            self.fit_warm(attachment, &pod, alias, subject).await?;
        }
        let metric = metric(position);
        pod.configure_pod(&pod_config(attachment, self.subnets(attachment), metric))
            .await
            .map_err(subject.failed("configuring the pod interface"))?;
        if attachment.bandwidth.is_bounded() {
            self.bound_rates(attachment, &pod, subject).await?;
        }
        if attachment.xdp {
            self.speed_up(attachment, netns, subject).await?;
        }
        self.netlink
            .wait_for_carrier(attachment.host_ifindex)
            .await
            .map_err(subject.failed("waiting for the carrier"))?;
        if attachment.host_access {
            self.route_to_pod(attachment, subject).await?;
        }
        self.dataplane
            .publish(&EndpointConfig::from(&*attachment))
            .map_err(subject.failed("writing the dataplane's rows"))
    }

    /// Makes a pair with both programs attached, the host end up. Returns the index of the pod end.
    pub(super) async fn make_pair(
        &self,
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
        let indexes = self
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
        self.attach_programs(pair.host_ifname.clone(), pair.endpoint, made)
            .await
            .map_err(subject.failed("attaching the programs"))?;
        self.netlink
            .set_up(indexes.host)
            .await
            .map_err(subject.failed("setting the host interface up"))?;
        Ok(indexes.pod)
    }

    /// Waits inside the kernel, for rtnl or for RCU grace periods: not on a worker thread.
    async fn attach_programs(&self, ifname: IfName, endpoint: EndpointId, made: Made) -> Result<(), DataplaneError> {
        let dataplane = std::sync::Arc::clone(&self.dataplane);
        tokio::task::spawn_blocking(move || match made {
            Made::Ahead => dataplane.attach(ifname.as_str(), endpoint),
            Made::Now => dataplane.attach_provisionally(ifname.as_str(), endpoint),
        })
        .await
        .unwrap_or_else(|ended| Err(DataplaneError::Kernel(ended.to_string())))
    }

    /// Makes a pair that was made ahead into this attachment's.
    async fn fit_warm(
        &self,
        attachment: &Attachment,
        pod: &Netlink,
        alias: &str,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let failed = |step| subject.failed::<netlink::Error>(step);
        self.netlink
            .set_alias(attachment.host_ifindex, alias)
            .await
            .map_err(failed("naming the host interface"))?;
        if attachment.mtu != WARM_MTU {
            self.netlink
                .set_mtu(attachment.host_ifindex, attachment.mtu)
                .await
                .map_err(failed("setting the MTU"))?;
        }
        // A MAC address that was asked for; setting the present one again costs nothing.
        pod.set_mac(attachment.ifindex, attachment.mac)
            .await
            .map_err(failed("setting the MAC address"))
    }

    async fn route_to_pod(&self, attachment: &Attachment, subject: &Subject) -> Result<(), AttachError> {
        for address in attachment.addresses() {
            self.netlink
                .add_pod_neighbour(attachment.host_ifindex, address, attachment.mac)
                .await
                .map_err(subject.failed("adding the host's neighbour entry"))?;
            self.netlink
                .add_pod_route(address, attachment.host_ifindex)
                .await
                .map_err(subject.failed("adding the host's route"))?;
        }
        Ok(())
    }

    /// Ensures, for an adopted attachment, what `route_to_pod` made.
    pub(super) async fn ensure_host_routes(
        &self,
        attachment: &Attachment,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        if attachment.host_access {
            self.route_to_pod(attachment, subject).await
        } else {
            Ok(())
        }
    }

    /// Stops an attachment's traffic. The host's routes go with the device: removing them now would wait for rtnl, which
    /// other devices' removal may hold for long, and until then they lead to programs that drop. An address that is
    /// leased again meanwhile replaces its route.
    pub(super) fn stop_traffic(&self, attachment: &Attachment) -> Result<(), String> {
        self.dataplane
            .withdraw(attachment.endpoint)
            .map_err(|error| chain(&error))
    }

    /// What the pod reaches through this interface: the network's own ranges and those of its Services.
    fn subnets(&self, attachment: &Attachment) -> Vec<ipnet::IpNet> {
        let state = self.state();
        let Some(known) = state.networks.get(&attachment.network) else {
            return Vec::new();
        };
        let spec = &known.network.spec;
        spec.subnets.iter().chain(&spec.service_subnets).copied().collect()
    }
}

fn pod_config(attachment: &Attachment, routes: Vec<ipnet::IpNet>, route_metric: u32) -> PodInterfaceConfig {
    PodInterfaceConfig {
        ifindex: attachment.ifindex,
        ipv4: attachment.ipv4,
        ipv6: attachment.ipv6,
        gateway_mac: attachment.host_mac,
        mtu: attachment.mtu,
        default_route: attachment.default_route,
        routes,
        route_metric,
    }
}

/// The metric of an interface's routes, by its place among the pod's.
pub(super) fn metric(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX).saturating_mul(100)
}

/// A random, locally administered unicast address.
pub(super) fn random_mac() -> MacAddr {
    let mut bytes = [0_u8; 6];
    fastrand::fill(&mut bytes);
    let [first, ..] = &mut bytes;
    *first = *first & 0xfc | 0x02;
    MacAddr(bytes)
}

/// Name of a host end. The endpoint number makes it unique on the node; the random part tells apart the owners that a
/// number has over time.
pub(super) fn host_ifname(endpoint: EndpointId) -> Option<IfName> {
    format!(
        "{}{}x{:04x}",
        netlink::own::HOST_IFNAME_PREFIX,
        endpoint.0,
        fastrand::u16(..)
    )
    .parse()
    .ok()
}
