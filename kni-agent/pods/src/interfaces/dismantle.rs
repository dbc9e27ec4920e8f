//! Removes interfaces, with a running agent and without one.

use std::path::Path;

use kni_dataplane::DataplaneError;
use kni_model::{Attachment, IfName, InterfaceKind, MacAddr, Sandbox, error_chain, provider::MacvlanMode};
use kni_netlink::{self as netlink, Netlink, Netns};
use kni_plugins::CniError;

use super::{device, plugins};
use crate::kernel::Kernel;

/// Why an interface could not be removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DismantleError {
    #[error("{}", error_chain(.0))]
    Dataplane(#[from] DataplaneError),
    #[error("{}", error_chain(.0))]
    Netlink(#[from] netlink::Error),
    #[error("{}", error_chain(.0))]
    Plugins(#[from] CniError),
    #[error("device {device}: {error}")]
    Device { device: IfName, error: netlink::Error },
}

/// Removes an interface, as far as its addresses require it before they are free: all of it, except for a veth pair of
/// the agent, which the reaper deletes later. Idempotent.
pub(super) async fn dismantle(
    kernel: &Kernel,
    sandbox: &Sandbox,
    attachment: &Attachment,
) -> Result<(), DismantleError> {
    match attachment.kind {
        // The host's routes go with the device: removing them now would wait for rtnl, which the removal of other
        // devices may hold for long, and until then they lead to programs that drop. An address that is leased again
        // meanwhile replaces its route.
        InterfaceKind::Veth => kernel.dataplane.withdraw(attachment.endpoint)?,
        InterfaceKind::Cni(_) => {
            kernel.dataplane.withdraw(attachment.endpoint)?;
            remove_inside(&kernel.home, &kernel.teardown, sandbox, attachment).await?;
            // Even where the record names no host end: a killed agent may not have recorded it.
            kernel.dataplane.unpin(attachment.endpoint)?;
        }
        InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) => {
            remove_inside(&kernel.home, &kernel.teardown, sandbox, attachment).await?;
        }
    }
    Ok(())
}

/// The part of [`dismantle`] that needs no dataplane.
pub(crate) async fn remove_inside(
    home: &Netns,
    netlink: &Netlink,
    sandbox: &Sandbox,
    attachment: &Attachment,
) -> Result<(), DismantleError> {
    match &attachment.kind {
        InterfaceKind::Veth => Ok(()),
        InterfaceKind::Cni(interface) => {
            let netns = find_namespace(sandbox).await;
            Ok(plugins::take_away(interface, netns.as_ref()).await?)
        }
        InterfaceKind::HostDevice(moved) => {
            let netns = find_namespace(sandbox).await;
            let returned = device::take_back(home, netlink, moved, netns.as_ref()).await;
            returned.map_err(|error| DismantleError::Device {
                device: moved.device.clone(),
                error,
            })
        }
        InterfaceKind::Macvlan(macvlan) => {
            // An interface in mode passthru has the parent's address.
            let mac = (macvlan.mode != MacvlanMode::Passthru).then_some(attachment.mac);
            delete_inside(sandbox, attachment, "macvlan", mac).await
        }
        InterfaceKind::Tap(_) => delete_inside(sandbox, attachment, "tun", None).await,
    }
}

/// Without its namespace the interface is gone as well.
async fn delete_inside(
    sandbox: &Sandbox,
    attachment: &Attachment,
    kind: &str,
    mac: Option<MacAddr>,
) -> Result<(), DismantleError> {
    let Some(netns) = find_namespace(sandbox).await else {
        return Ok(());
    };
    let inside = Netlink::in_namespace(&netns).await?;
    inside.delete_if(attachment.ifname.as_str(), kind, mac).await?;
    Ok(())
}

/// The namespace of a sandbox, by its path or, where the path is gone, by a process in it.
async fn find_namespace(sandbox: &Sandbox) -> Option<Netns> {
    let (path, expected) = (sandbox.netns.clone(), sandbox.netns_identity);
    let found = tokio::task::spawn_blocking(move || {
        let open = |path: &Path| netlink::netns::open(path).ok().filter(|netns| netns.id() == expected);
        open(&path).or_else(|| {
            let processes = std::fs::read_dir("/proc").ok()?;
            let mut paths = processes
                .filter_map(Result::ok)
                .map(|entry| entry.path().join("ns/net"));
            paths.find_map(|path| open(&path))
        })
    });
    found.await.ok().flatten()
}
