//! Creates persistent tap devices inside a pod's namespace.

use std::{
    fs::File,
    os::fd::{AsRawFd as _, RawFd},
};

use kni_model::{IfName, provider::Tap};
use nix::errno::Errno;

use super::{
    Netns, Result,
    error::{Error, Existing, Place},
};

const TUN: &str = "/dev/net/tun";

/// Creates a tap device, down, inside `netns`. It is persistent when this returns, and is gone if the process is killed
/// earlier: until the last step it lives as long as the descriptor. [`Error::Exists`] if the name is taken.
pub async fn create_tap(netns: &Netns, name: &IfName, tap: &Tap) -> Result<()> {
    let place = Place::new("create tap device")
        .interface(name.as_str())
        .path(netns.path());
    let (name, tap) = (name.clone(), tap.clone());
    netns.run(move || create_here(&name, &tap, &place)).await?
}

/// In the calling thread's namespace.
fn create_here(name: &IfName, tap: &Tap, place: &Place) -> Result<()> {
    let refused = |operation: &'static str| {
        let place = Place {
            operation: format!("create tap device: {operation}").into(),
            ..place.clone()
        };
        move |errno: Errno| place.refused(errno)
    };
    let file = File::options().read(true).write(true).open(TUN).map_err(|error| {
        let place = Place {
            operation: format!("create tap device: open {TUN}").into(),
            ..place.clone()
        };
        place.refused(error)
    })?;
    let fd = file.as_raw_fd();
    make(fd, name, tap.multi_queue).map_err(|errno| {
        if matches!(errno, Errno::EEXIST | Errno::EBUSY) {
            let what = Existing::PodName(name.to_string());
            return Error::Exists {
                place: place.clone(),
                what,
            };
        }
        place.clone().refused(errno)
    })?;
    if let Some(owner) = tap.owner {
        set(fd, libc::TUNSETOWNER, owner).map_err(refused("set its owner"))?;
    }
    if let Some(group) = tap.group {
        set(fd, libc::TUNSETGROUP, group).map_err(refused("set its group"))?;
    }
    set(fd, libc::TUNSETPERSIST, 1).map_err(refused("make it persistent"))
}

fn make(fd: RawFd, name: &IfName, multi_queue: bool) -> nix::Result<()> {
    let queues = if multi_queue { libc::IFF_MULTI_QUEUE } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_TUN_EXCL | queues;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            // The kernel reads these sixteen bits.
            ifru_flags: i16::from_ne_bytes(u16::try_from(flags).unwrap_or(0).to_ne_bytes()),
        },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_str().bytes()) {
        // Signed on x86-64, unsigned on arm64.
        *to = libc::c_char::from_ne_bytes([from]);
    }
    // SAFETY: TUNSETIFF reads and writes one ifreq, which outlives the call; the name ends with a zero, as names have
    // at most 15 bytes.
    let answer = unsafe { libc::ioctl(fd, libc::TUNSETIFF, &raw mut request) };
    Errno::result(answer).map(drop)
}

/// Calls of the tun driver whose argument is a number.
fn set(fd: RawFd, call: libc::Ioctl, value: u32) -> nix::Result<()> {
    // SAFETY: the argument is a number, not a pointer; the descriptor is open for the duration of the call.
    let answer = unsafe { libc::ioctl(fd, call, libc::c_ulong::from(value)) };
    Errno::result(answer).map(drop)
}
