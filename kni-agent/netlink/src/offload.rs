//! Switches offloads of single interfaces by `SIOCETHTOOL`.
//!
//! rtnetlink can show offloads, not change them. Generic netlink can (`ETHTOOL_MSG_FEATURES_SET`, Linux 5.6), but crate
//! `ethtool` 0.2 only reads features, and a custom request would need a second connection inside the pod's namespace.

use std::{
    ffi::CStr,
    io,
    mem::{offset_of, size_of},
    os::fd::{AsRawFd as _, OwnedFd},
};

use kni_model::IfName;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::{
    Netns, Result,
    error::{Error, Place},
};

/// Offloads of a pod end whose host end runs an XDP program that redirects.
///
/// - A frame that is redirected loses the mark that its checksum is unfinished: the pod's stack finishes it.
/// - The program does not see a VLAN tag in the metadata of the frame: the pod's stack writes it into the frame.
/// - A veth accepts redirected frames only where its other end polls (NAPI). Receive offload makes it poll; the kernel
///   announces it to the host end (`NETDEV_XDP_ACT_NDO_XMIT`) only if it is switched on while the pod end is up.
///
/// The kernel switches segmentation off as soon as the program is attached.
const XDP_POD_END: [(&CStr, bool); 5] = [
    (c"tx-checksum-ip-generic", false),
    (c"tx-checksum-sctp", false),
    (c"tx-vlan-hw-insert", false),
    (c"tx-vlan-stag-hw-insert", false),
    (c"rx-gro", true),
];

const GET_STRINGS: u32 = 0x1b;
const GET_STRING_COUNT: u32 = 0x37;
const SET_FEATURES: u32 = 0x3b;
/// `ETH_SS_FEATURES`: the string set that names the features.
const FEATURE_NAMES: u32 = 4;
/// `ETH_GSTRING_LEN`
const NAME_LEN: usize = 32;
/// `ETHTOOL_F_WISH`: the kernel recorded the setting of a feature without applying it.
const RECORDED_ONLY: i32 = 1;
/// More features than any kernel has.
const MAX_FEATURES: usize = 256;

/// `struct ethtool_sset_info` with room for one set.
#[repr(C)]
struct StringCount {
    command: u32,
    reserved: u32,
    sets: u64,
    count: u32,
}

/// `struct ethtool_gstrings`
#[repr(C)]
struct Strings {
    command: u32,
    set: u32,
    count: u32,
    names: [[u8; NAME_LEN]; MAX_FEATURES],
}

/// `struct ethtool_sfeatures`
#[repr(C)]
struct Features {
    command: u32,
    count: u32,
    blocks: [Block; MAX_FEATURES / 32],
}

/// `struct ethtool_set_features_block`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Block {
    valid: u32,
    requested: u32,
}

/// Prepares the pod end of a pair for an XDP program at its host end. The interface is one of `netns`, and up.
/// Idempotent.
pub async fn prepare_xdp_pod_interface(netns: &Netns, ifname: &IfName) -> Result<()> {
    let place = Place::new("set offloads").interface(ifname.as_str()).path(netns.path());
    let ifname = ifname.clone();
    netns.run(move || set_features(&ifname, &XDP_POD_END, &place)).await?
}

fn set_features(ifname: &IfName, settings: &[(&CStr, bool)], place: &Place) -> Result<()> {
    let refused = |error: io::Error| place.clone().refused(error);
    let device = Device::open(ifname).map_err(refused)?;
    let names = device.feature_names().map_err(refused)?;
    let mut blocks = [Block::default(); MAX_FEATURES / 32];
    for (name, on) in settings {
        // A feature that this kernel does not have needs no switching.
        let Some(bit) = names.iter().position(|known| known.as_slice() == name.to_bytes()) else {
            continue;
        };
        if let Some(block) = blocks.get_mut(bit / 32) {
            let mask = 1 << (bit % 32);
            block.valid |= mask;
            block.requested |= if *on { mask } else { 0 };
        }
    }
    let mut request = Features {
        command: SET_FEATURES,
        count: u32::try_from(names.len().div_ceil(32)).unwrap_or(0),
        blocks,
    };
    if device.request(&mut request).map_err(refused)? & RECORDED_ONLY != 0 {
        return Err(Error::Unexpected {
            place: place.clone(),
            missing: "a requested offload",
        });
    }
    Ok(())
}

/// An interface of the calling thread's namespace, and a socket for its requests.
struct Device {
    socket: OwnedFd,
    name: [libc::c_char; libc::IFNAMSIZ],
}

impl Device {
    fn open(ifname: &IfName) -> io::Result<Self> {
        let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        let mut name = [0; libc::IFNAMSIZ];
        let bytes = ifname.as_str().bytes().take(libc::IFNAMSIZ - 1);
        for (to, from) in name.iter_mut().zip(bytes) {
            // Signed on x86-64, unsigned on arm64.
            *to = libc::c_char::from_ne_bytes([from]);
        }
        Ok(Self { socket, name })
    }

    /// The names of all features, in the order of their bits.
    fn feature_names(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut count = StringCount {
            command: GET_STRING_COUNT,
            reserved: 0,
            sets: 1 << FEATURE_NAMES,
            count: 0,
        };
        self.request(&mut count)?;
        let count = usize::try_from(count.count).unwrap_or(usize::MAX);
        if count == 0 || count > MAX_FEATURES {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let mut strings = Box::new(Strings {
            command: GET_STRINGS,
            set: FEATURE_NAMES,
            count: 0,
            names: [[0; NAME_LEN]; MAX_FEATURES],
        });
        self.request(&mut *strings)?;
        let name = |raw: &[u8; NAME_LEN]| raw.iter().copied().take_while(|byte| *byte != 0).collect();
        Ok(strings.names.iter().take(count).map(name).collect())
    }

    /// Sends a request to the kernel, which overwrites it with the answer. `T` begins with the command's number and has
    /// the maximum length of that command.
    fn request<T>(&self, request: &mut T) -> io::Result<i32> {
        let mut envelope = libc::ifreq {
            ifr_name: self.name,
            ifr_ifru: libc::__c_anonymous_ifr_ifru {
                ifru_data: std::ptr::from_mut(request).cast(),
            },
        };
        // SAFETY: the envelope and the request live during the call, and the request is as long as its command needs.
        let answer = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut envelope) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(answer)
    }
}

// The kernel writes the count after the head of the answer, at the offset that its header file defines.
const _: () = assert!(offset_of!(StringCount, count) == 16 && size_of::<Block>() == 8);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_error_names_a_missing_interface() {
        let netns = Netns::current().unwrap();
        let error = prepare_xdp_pod_interface(&netns, &"nothere0".parse().unwrap())
            .await
            .unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV), "{error}");
        assert!(error.to_string().contains("nothere0"), "{error}");
    }
}
