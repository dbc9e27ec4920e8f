//! Attaches the XDP programs: the uplink's in the driver where it supports XDP, otherwise in generic mode; a pod's in
//! the driver only.

use std::path::{Path, PathBuf};

use aya::{
    Ebpf,
    programs::{
        Xdp,
        links::{FdLink, PinnedLink},
        xdp::{XdpLink, XdpMode as Flags},
    },
};
use kni_model::{EndpointId, view::ProgramView};

use super::{
    DataplaneError,
    bpf::link,
    hook::{self, Target},
    object::{self, ProgramIds},
    pin::Pins,
    program::{XDP_POD, XDP_UPLINK},
};

/// Whether the uplink runs an XDP program, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum XdpChoice {
    /// None.
    #[default]
    Off,
    /// In the driver where it supports XDP, otherwise in generic mode.
    Auto,
    /// In the driver, or an error.
    Native,
    /// In generic mode, in front of the stack.
    Generic,
}

/// Where an XDP program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver, before the kernel spends time on the packet.
    Native,
    /// In generic mode, in front of the stack, with any driver.
    Generic,
}

/// A program that should be at an interface is not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("program {program} is not attached at {hook} of {ifname}")]
pub struct NotAttached {
    /// Name of the program.
    pub program: &'static str,
    /// The hook.
    pub hook: &'static str,
    /// The interface.
    pub ifname: String,
}

const MODES: [XdpMode; 2] = [XdpMode::Native, XdpMode::Generic];

impl XdpMode {
    /// Its name in options and status.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }

    const fn flags(self) -> Flags {
        match self {
            Self::Native => Flags::Driver,
            Self::Generic => Flags::Skb,
        }
    }
}

impl XdpChoice {
    /// Acceptable modes, the best one first.
    const fn modes(self) -> &'static [XdpMode] {
        match self {
            Self::Off => &[],
            Self::Auto => &MODES,
            Self::Native => &[XdpMode::Native],
            Self::Generic => &[XdpMode::Generic],
        }
    }
}

/// The kernel does not report a link's mode, so the name of the pin records it.
fn path(pins: &Pins, mode: XdpMode) -> PathBuf {
    pins.uplink_link(&format!("{XDP_UPLINK}-{}", mode.as_str()))
}

/// Makes the interface run this agent's program, or none. A link of an earlier agent is taken over in place where its
/// mode is acceptable.
pub(super) fn set(
    ebpf: &mut Ebpf,
    pins: &Pins,
    ifname: &str,
    ifindex: u32,
    choice: XdpChoice,
) -> Result<(), DataplaneError> {
    let target = Target {
        program: XDP_UPLINK,
        ifname,
    };
    let modes = choice.modes();
    let mut kept = false;
    for mode in MODES {
        let path = path(pins, mode);
        let here = link::ifindex(&path).map_err(target.failed("reading the interface of the pinned link"))?;
        if here == Some(ifindex) && modes.contains(&mode) && !kept {
            take_over(object::xdp(ebpf, XDP_UPLINK)?, &target, &path)?;
            kept = true;
        } else {
            // An interface accepts one program in one mode.
            link::detach(&path);
            Pins::remove_link(&path)?;
        }
    }
    if kept {
        Ok(())
    } else {
        attach(ebpf, pins, &target, ifindex, modes)
    }
}

fn attach(
    ebpf: &mut Ebpf,
    pins: &Pins,
    target: &Target<'_>,
    ifindex: u32,
    modes: &[XdpMode],
) -> Result<(), DataplaneError> {
    let mut failed = None;
    for mode in modes {
        match attach_as(
            object::xdp(ebpf, XDP_UPLINK)?,
            target,
            ifindex,
            *mode,
            &path(pins, *mode),
        ) {
            Ok(()) => return Ok(()),
            Err(error) => {
                tracing::info!(ifname = target.ifname, mode = mode.as_str(), %error, "XDP cannot run in this mode");
                failed = Some(error);
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Moves a pinned link to this agent's program.
fn take_over(program: &mut Xdp, target: &Target<'_>, path: &Path) -> Result<(), DataplaneError> {
    let pinned = PinnedLink::from_pin(path).map_err(target.failed("opening the pinned link"))?;
    let link = XdpLink::try_from(FdLink::from(pinned)).map_err(target.failed("reading the pinned link"))?;
    let id = program
        .attach_to_link(link)
        .map_err(target.failed("updating the link"))?;
    // The pin keeps the link; this descriptor is closed here.
    drop(program.take_link(id).map_err(target.failed("taking the link"))?);
    Ok(())
}

fn attach_as(
    program: &mut Xdp,
    target: &Target<'_>,
    ifindex: u32,
    mode: XdpMode,
    path: &Path,
) -> Result<(), DataplaneError> {
    let id = program
        .attach_to_if_index(ifindex, mode.flags())
        .map_err(target.failed("creating the XDP link"))?;
    let link = program.take_link(id).map_err(target.failed("taking the link"))?;
    let link = FdLink::try_from(link).map_err(target.failed("taking the link"))?;
    hook::pin(target, link, path)
}

/// The program at the interface, and its mode.
pub(super) fn inspect(ids: &ProgramIds, pins: &Pins, ifindex: u32) -> Option<(ProgramView, XdpMode)> {
    let id = *ids.get(XDP_UPLINK)?;
    let mode = MODES
        .into_iter()
        .find(|mode| link::ifindex(&path(pins, *mode)).ok().flatten() == Some(ifindex))?;
    let link_id = hook::link_id(&path(pins, mode))?;
    let view = ProgramView {
        name: XDP_UPLINK.to_owned(),
        id,
        hook: format!("xdp/{}", mode.as_str()),
        link_id,
    };
    Some((view, mode))
}

/// Attaches the program to a pod's host interface, in the driver. A link of an earlier agent is taken over in place.
pub(super) fn set_pod(
    ebpf: &mut Ebpf,
    pins: &Pins,
    ifname: &str,
    ifindex: u32,
    endpoint: EndpointId,
) -> Result<(), DataplaneError> {
    let target = Target {
        program: XDP_POD,
        ifname,
    };
    let path = pins.xdp_link(endpoint);
    let here = link::ifindex(&path).map_err(target.failed("reading the interface of the pinned link"))?;
    let program = object::xdp(ebpf, XDP_POD)?;
    if here == Some(ifindex) {
        take_over(program, &target, &path)
    } else {
        attach_as(program, &target, ifindex, XdpMode::Native, &path)
    }
}

/// The program at a pod's host interface.
pub(super) fn inspect_pod(
    ids: &ProgramIds,
    pins: &Pins,
    ifname: &str,
    ifindex: u32,
    endpoint: EndpointId,
) -> Result<ProgramView, NotAttached> {
    let path = pins.xdp_link(endpoint);
    let attached = link::ifindex(&path).ok().flatten() == Some(ifindex);
    let found = hook::link_id(&path)
        .filter(|_link| attached)
        .zip(ids.get(XDP_POD).copied());
    let (link_id, id) = found.ok_or_else(|| NotAttached {
        program: XDP_POD,
        hook: "xdp/native",
        ifname: ifname.to_owned(),
    })?;
    Ok(ProgramView {
        name: XDP_POD.to_owned(),
        id,
        hook: format!("xdp/{}", XdpMode::Native.as_str()),
        link_id,
    })
}
