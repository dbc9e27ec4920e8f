//! Moves devices of the node into pods, one pod at a time, and returns them as they were.
//!
//! A moved device carries an alias with its original settings. The alias is set before the device moves and removed
//! last, so that any agent that finds the device, in whichever namespace, can finish its return.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use kni_model::{
    AttachRequest, Attachment, IfName, InterfaceKind,
    provider::{HostDevices, MovedDevice},
};
use kni_netlink::{self as netlink, Link, Netlink, Netns};

use super::{
    context::Build,
    offers::{DeviceRefusal, Offers},
    plain,
};
use crate::{
    error::{AttachError, Subject},
    kernel::Kernel,
    plan::PlannedInterface,
    registry::{Registry, State},
};

/// How long the kernel may take to return a device to the node after its namespace ended.
const RETURN_WAIT: Duration = Duration::from_secs(5);
const RETURN_PAUSE: Duration = Duration::from_millis(20);

/// Takes the first free device of a network.
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
            Some(Ok(moved)) => return Ok(InterfaceKind::HostDevice(moved.clone())),
            Some(Err(refusal)) => reasons.push(format!("device {device} {refusal}")),
            None => reasons.push(format!("device {device} was not looked at")),
        }
    }
    Err(Subject::from(request).provider(&plan.network.spec.name, reasons.join("; "), true))
}

fn holder(state: &State, device: &IfName) -> Option<String> {
    let has_it = |attachment: &Attachment| match &attachment.kind {
        InterfaceKind::HostDevice(moved) => moved.device == *device,
        InterfaceKind::Veth | InterfaceKind::Macvlan(_) | InterfaceKind::Tap(_) | InterfaceKind::Cni(_) => false,
    };
    let (sandbox, _) = state.attachments().find(|(_, attachment)| has_it(attachment))?;
    Some(format!("pod {} (sandbox {})", sandbox.pod, sandbox.id))
}

/// The current settings of a device that may move into a pod.
pub(super) async fn offer(kernel: &Kernel, device: &IfName) -> Result<MovedDevice, DeviceRefusal> {
    let link = kernel.netlink.get_link(device).await?.ok_or(DeviceRefusal::Missing)?;
    refuse_used(kernel, &link).await?;
    Ok(MovedDevice {
        device: device.clone(),
        mac: link.mac.ok_or(DeviceRefusal::NoEthernet)?,
        mtu: link.mtu,
        up: link.up,
        alias: link.alias,
        physical: link.kind.is_none(),
    })
}

/// Refuses devices that the node or a pod uses.
async fn refuse_used(kernel: &Kernel, link: &Link) -> Result<(), DeviceRefusal> {
    if netlink::own::is_our_link(&link.name, link.alias.as_deref()) {
        return Err(DeviceRefusal::PodInterface);
    }
    if netlink::moved_device_from_alias(link).is_some() {
        return Err(DeviceRefusal::Returning);
    }
    if let Some(controller) = link.controller {
        return Err(DeviceRefusal::Controlled(controller));
    }
    refuse_uplink(kernel, link).await
}

/// Refuses interfaces through which the node itself communicates.
pub(super) async fn refuse_uplink(kernel: &Kernel, link: &Link) -> Result<(), DeviceRefusal> {
    let routes = kernel.netlink.list_default_routes().await?;
    if routes.iter().any(|route| route.ifindex == link.ifindex) {
        return Err(DeviceRefusal::DefaultRoute);
    }
    let addresses = kernel.netlink.list_addresses().await?;
    let linklocal = |ip: IpAddr| match ip {
        IpAddr::V4(_) => false,
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let own = addresses
        .iter()
        .find(|address| address.ifindex == link.ifindex && !linklocal(address.address));
    own.map_or(Ok(()), |own| Err(DeviceRefusal::Address(own.address)))
}

/// Moves a device into the pod and configures it there.
pub(super) async fn make(
    kernel: &Kernel,
    build: &Build<'_>,
    moved: &MovedDevice,
    attachment: &mut Attachment,
) -> Result<(), AttachError> {
    let subject = build.subject;
    let network = attachment.network.clone();
    let gone = || subject.provider(&network, format!("device {} is gone", moved.device), true);
    let link = kernel
        .netlink
        .get_link(&moved.device)
        .await
        .map_err(subject.failed("looking for the device"))?
        .ok_or_else(gone)?;
    kernel
        .netlink
        .set_alias(link.ifindex, &netlink::moved_device_alias(moved))
        .await
        .map_err(subject.failed("marking the device"))?;
    kernel
        .netlink
        .move_link(link.ifindex, &attachment.ifname, build.netns)
        .await
        .map_err(subject.failed("moving the device into the pod"))?;
    let inside = build.enter().await?;
    let found = inside
        .get_link(&attachment.ifname)
        .await
        .map_err(subject.failed("reading the device"))?
        .ok_or_else(gone)?;
    attachment.ifindex = found.ifindex;
    inside
        .set_mac(found.ifindex, attachment.mac)
        .await
        .map_err(subject.failed("setting the MAC address"))?;
    plain::configure(build, attachment, &inside).await
}

/// Returns a device from a pod, or from the namespace to which the kernel moved it. Idempotent.
pub(super) async fn take_back(
    home: &Netns,
    netlink: &Netlink,
    moved: &MovedDevice,
    netns: Option<&Netns>,
) -> netlink::Result<()> {
    if let Some(netns) = netns {
        let inside = Netlink::in_namespace(netns).await?;
        let found = inside.list_moved_devices().await?.into_iter();
        for (link, _) in found.filter(|(_, found)| found.device == moved.device) {
            inside.move_link(link.ifindex, &moved.device, home).await?;
        }
    }
    let deadline = Instant::now() + RETURN_WAIT;
    loop {
        let found = netlink.list_moved_devices().await?.into_iter();
        if let Some((link, _)) = found.into_iter().find(|(_, found)| found.device == moved.device) {
            return restore(netlink, &link, moved).await;
        }
        // Returned already, or never moved.
        if netlink.get_link(&moved.device).await?.is_some() {
            return Ok(());
        }
        if !moved.physical || Instant::now() >= deadline {
            tracing::warn!(device = %moved.device, physical = moved.physical, "it did not return from its pod; virtual \
                devices end with their namespace");
            return Ok(());
        }
        tokio::time::sleep(RETURN_PAUSE).await;
    }
}

/// Gives a device that is on the node its name and its settings.
async fn restore(netlink: &Netlink, link: &Link, moved: &MovedDevice) -> netlink::Result<()> {
    if link.name != moved.device.as_str() {
        netlink.set_down(link.ifindex).await?;
        netlink.set_name(link.ifindex, &moved.device).await?;
    }
    netlink.restore_moved_device(link.ifindex, moved).await
}

/// Restores devices that fell back to the node and are in no record.
pub(crate) async fn return_strays(kernel: &Kernel, registry: &Registry) -> netlink::Result<()> {
    for (link, moved) in kernel.netlink.list_moved_devices().await? {
        if holder(&registry.lock(), &moved.device).is_some() {
            continue;
        }
        tracing::info!(device = %moved.device, found = %link.name, "restoring a device that no pod has");
        restore(&kernel.netlink, &link, &moved).await?;
    }
    Ok(())
}

/// Without an agent: restores everything on the node that carries the mark of a moved device.
pub(crate) async fn return_all(netlink: &Netlink) -> netlink::Result<()> {
    for (link, moved) in netlink.list_moved_devices().await? {
        restore(netlink, &link, &moved).await?;
    }
    Ok(())
}
