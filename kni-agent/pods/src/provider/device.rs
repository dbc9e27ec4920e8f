//! Devices of the node: lent to one pod at a time, and brought back as they were.
//!
//! A lent device carries an alias that says what it was. The alias is set before the device moves and goes last, so that
//! whoever finds the device, wherever the kernel has put it, knows what is left to do.

use std::time::{Duration, Instant};

use kni_model::{
    AttachRequest, Attachment, IfName, InterfaceKind,
    provider::{HostDevices, LentDevice},
};
use kni_netlink as netlink;
use kni_netlink::{Link, Netlink, Netns};

use super::{Offers, PlannedInterface, State, Subject, failed, refused};
use crate::{AttachError, Inner, error::chain};

/// How long the kernel may take to put a device back on the node after its namespace ended.
const RETURN_WAIT: Duration = Duration::from_secs(5);
const RETURN_PAUSE: Duration = Duration::from_millis(20);

/// Takes the first device of a network that nobody has.
pub(super) fn choose(
    state: &State,
    request: &AttachRequest,
    plan: &PlannedInterface,
    devices: &HostDevices,
    offers: &Offers,
) -> Result<InterfaceKind, AttachError> {
    let mut reasons = Vec::new();
    for device in &devices.devices {
        if let Some(holder) = holder(state, device) {
            reasons.push(format!("device {device} belongs to {holder}"));
            continue;
        }
        match offers.devices.get(device) {
            Some(Ok(lent)) => return Ok(InterfaceKind::HostDevice(lent.clone())),
            Some(Err(reason)) => reasons.push(format!("device {device} {reason}")),
            None => reasons.push(format!("device {device} was not looked at")),
        }
    }
    Err(refused(request, &plan.network.spec.name, reasons.join("; "), true))
}

fn holder(state: &State, device: &IfName) -> Option<String> {
    let has_it = |attachment: &Attachment| match &attachment.kind {
        InterfaceKind::HostDevice(lent) => lent.device == *device,
        InterfaceKind::Veth | InterfaceKind::Macvlan(_) | InterfaceKind::Tap(_) | InterfaceKind::Cni(_) => false,
    };
    let (sandbox, _) = state.attachments().find(|(_, attachment)| has_it(attachment))?;
    Some(format!("pod {} (sandbox {})", sandbox.pod, sandbox.id))
}

impl Inner {
    /// What a device is now, if it can be lent.
    pub(super) async fn lendable(&self, device: &IfName) -> Result<LentDevice, String> {
        let link = self.netlink.get_link(device).await.map_err(|error| chain(&error))?;
        let link = link.ok_or("does not exist on the node")?;
        self.refuse_used(&link).await?;
        Ok(LentDevice {
            device: device.clone(),
            mac: link.mac.ok_or("is no Ethernet device")?,
            mtu: link.mtu,
            up: link.up,
            alias: link.alias,
            physical: link.kind.is_none(),
        })
    }

    /// What the node or a pod uses stays where it is.
    async fn refuse_used(&self, link: &Link) -> Result<(), String> {
        if netlink::own::is_our_link(&link.name, link.alias.as_deref()) {
            return Err("is a pod's interface".to_owned());
        }
        if netlink::moved_device_from_alias(link).is_some() {
            return Err("is on its way back from a pod".to_owned());
        }
        if let Some(controller) = link.controller {
            return Err(format!("is part of another interface (#{controller})"));
        }
        let routes = self
            .netlink
            .list_default_routes()
            .await
            .map_err(|error| chain(&error))?;
        if routes.iter().any(|route| route.ifindex == link.ifindex) {
            return Err("has a default route of the node".to_owned());
        }
        let addresses = self.netlink.list_addresses().await.map_err(|error| chain(&error))?;
        let linklocal = |ip: std::net::IpAddr| match ip {
            std::net::IpAddr::V4(_) => false,
            std::net::IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        let own = addresses
            .iter()
            .find(|address| address.ifindex == link.ifindex && !linklocal(address.address));
        match own {
            Some(address) => Err(format!("has the node's address {}", address.address)),
            None => Ok(()),
        }
    }

    pub(super) async fn lend(
        &self,
        lent: &LentDevice,
        attachment: &mut Attachment,
        netns: &Netns,
        metric: u32,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let gone = || failed(subject, attachment, format!("device {} is gone", lent.device), true);
        let link = self
            .netlink
            .get_link(&lent.device)
            .await
            .map_err(subject.failed("looking for the device"))?
            .ok_or_else(gone)?;
        self.netlink
            .set_alias(link.ifindex, &netlink::moved_device_alias(lent))
            .await
            .map_err(subject.failed("marking the device"))?;
        self.netlink
            .move_link(link.ifindex, &attachment.ifname, netns)
            .await
            .map_err(subject.failed("moving the device into the pod"))?;
        let inside = self.enter(netns, subject).await?;
        let moved = inside
            .get_link(&attachment.ifname)
            .await
            .map_err(subject.failed("reading the device"))?
            .ok_or_else(gone)?;
        attachment.ifindex = moved.ifindex;
        inside
            .set_mac(moved.ifindex, attachment.mac)
            .await
            .map_err(subject.failed("setting the MAC address"))?;
        self.configure_plain(attachment, &inside, metric, subject).await
    }

    /// Brings devices back that fell back to the node and that no record has.
    pub(crate) async fn return_strays(&self) -> netlink::Result<()> {
        for (link, lent) in self.netlink.list_moved_devices().await? {
            if holder(&self.state(), &lent.device).is_some() {
                continue;
            }
            tracing::info!(device = %lent.device, found = %link.name, "bringing a device back that no pod has");
            settle(&self.netlink, &link, &lent).await?;
        }
        Ok(())
    }
}

/// Brings a device back from a pod, or from wherever the kernel has put it. Idempotent.
pub(super) async fn bring_back(
    home: &Netns,
    netlink: &Netlink,
    lent: &LentDevice,
    netns: Option<&Netns>,
) -> netlink::Result<()> {
    if let Some(netns) = netns {
        let inside = Netlink::in_namespace(netns).await?;
        let found = inside.list_moved_devices().await?.into_iter();
        for (link, _) in found.filter(|(_, found)| found.device == lent.device) {
            inside.move_link(link.ifindex, &lent.device, home).await?;
        }
    }
    let deadline = Instant::now() + RETURN_WAIT;
    loop {
        let found = netlink.list_moved_devices().await?.into_iter();
        if let Some((link, _)) = found.into_iter().find(|(_, found)| found.device == lent.device) {
            return settle(netlink, &link, lent).await;
        }
        // Back already, or never away.
        if netlink.get_link(&lent.device).await?.is_some() {
            return Ok(());
        }
        if !lent.physical || Instant::now() >= deadline {
            tracing::warn!(device = %lent.device, physical = lent.physical, "it did not come back from its pod; devices \
                that software made end with their namespace");
            return Ok(());
        }
        tokio::time::sleep(RETURN_PAUSE).await;
    }
}

/// Gives a device that is on the node its name and its settings.
async fn settle(netlink: &Netlink, link: &Link, lent: &LentDevice) -> netlink::Result<()> {
    if link.name != lent.device.as_str() {
        netlink.set_down(link.ifindex).await?;
        netlink.set_name(link.ifindex, &lent.device).await?;
    }
    netlink.restore_moved_device(link.ifindex, lent).await
}

/// Without an agent: brings back what carries the marks, whoever it was lent to.
pub(crate) async fn return_all(netlink: &Netlink) -> netlink::Result<()> {
    for (link, lent) in netlink.list_moved_devices().await? {
        settle(netlink, &link, &lent).await?;
    }
    Ok(())
}
