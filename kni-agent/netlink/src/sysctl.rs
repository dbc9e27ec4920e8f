//! Writes the settings of single interfaces below `/proc/sys/net`; never those of `all`, `default` or other interfaces.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use kni_model::IfName;

use super::{
    Netns, Result,
    error::{Error, Place},
};

/// No duplicate address detection (addresses are usable at once), no router advertisements, IPv6 on.
const POD: &[(&str, &str)] = &[
    ("ipv6/accept_dad", "0"),
    ("ipv6/accept_ra", "0"),
    ("ipv6/disable_ipv6", "0"),
];

/// Forwarding of packets from the pod.
///
/// `ipv6/forwarding` is omitted on purpose: it does not control forwarding (`all/forwarding`, which belongs to the
/// node, and `force_forwarding` do), but writing 1 to it for any interface, even over a 1, makes the kernel drop the
/// default routes that the whole node learned from router advertisements.
const HOST: &[(&str, &str)] = &[
    ("ipv4/forwarding", "1"),
    ("ipv6/accept_dad", "0"),
    ("ipv6/accept_ra", "0"),
    ("ipv6/disable_ipv6", "0"),
    ("ipv6/force_forwarding", "1"),
];

/// Prepares the interface inside a pod so that an IPv6 address is usable at once. Returns the settings that this kernel
/// does not have (`ipv6/accept_dad`), which is not an error: IPv6 may be disabled. Idempotent.
pub async fn prepare_pod_interface(netns: &Netns, ifname: &IfName) -> Result<Vec<&'static str>> {
    let place = Place::new("prepare interface")
        .interface(ifname.as_str())
        .path(netns.path());
    let ifname = ifname.clone();
    netns.run(move || apply(&ifname, POD, &place)).await?
}

/// As [`prepare_pod_interface`], in the network namespace of the calling thread.
pub fn prepare_pod_interface_here(ifname: &IfName) -> Result<Vec<&'static str>> {
    apply(ifname, POD, &Place::new("prepare interface").interface(ifname.as_str()))
}

/// As [`prepare_host_interface`], on the calling thread.
pub fn prepare_host_interface_here(ifname: &IfName) -> Result<Vec<&'static str>> {
    apply(
        ifname,
        HOST,
        &Place::new("prepare interface").interface(ifname.as_str()),
    )
}

/// Prepares the host end of a pod's interface: forwards packets from the pod, ignores router advertisements. The
/// interface is in the caller's namespace. Returns the settings that this kernel does not have (`ipv6/force_forwarding`
/// before Linux 6.17), which is not an error. Idempotent.
pub async fn prepare_host_interface(ifname: &IfName) -> Result<Vec<&'static str>> {
    let place = Place::new("prepare interface").interface(ifname.as_str());
    let (ifname, ended) = (ifname.clone(), place.clone());
    tokio::task::spawn_blocking(move || apply(&ifname, HOST, &place))
        .await
        .map_err(|_ended| Error::Ended {
            place: ended,
            what: "the thread",
        })?
}

fn apply(ifname: &IfName, settings: &[(&'static str, &str)], place: &Place) -> Result<Vec<&'static str>> {
    if !interface_directory("ipv4", ifname).exists() {
        return Err(place.clone().refused(nix::errno::Errno::ENODEV));
    }
    let mut unsupported = Vec::new();
    for (setting, value) in settings {
        let (family, file) = setting.split_once('/').unwrap_or((setting, ""));
        match set(&interface_directory(family, ifname).join(file), value) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => unsupported.push(*setting),
            Err(error) => {
                let place = Place {
                    operation: format!("set {setting} to {value}").into(),
                    ..place.clone()
                };
                return Err(place.refused(error));
            }
        }
    }
    Ok(unsupported)
}

fn interface_directory(family: &str, ifname: &IfName) -> PathBuf {
    Path::new("/proc/sys/net")
        .join(family)
        .join("conf")
        .join(ifname.as_str())
}

/// Writes only if the value differs: a write takes the kernel's network lock.
fn set(file: &Path, value: &str) -> io::Result<()> {
    if fs::read_to_string(file)?.trim() == value {
        return Ok(());
    }
    fs::write(file, value)
}
