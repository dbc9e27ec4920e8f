//! Attaches the TC programs to interfaces: TCX links from Linux 6.6 on, clsact filters before.

use std::{
    io, mem,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    programs::{
        Link as _, LinkOrder, ProgramError, SchedClassifier, TcAttachType,
        links::{FdLink, LinkError, PinnedLink},
        tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcError, TcHandle, qdisc_add_clsact},
    },
    util::KernelVersion,
};
use kni_common::Direction;
use kni_model::{EndpointId, view::ProgramView};

use super::{
    DataplaneError,
    object::{self, ProgramIds},
    pin::Pins,
};

/// Which hook the operator selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HookChoice {
    /// TCX where the kernel has it.
    #[default]
    Auto,
    /// TCX, or an error.
    Tcx,
    /// clsact.
    Clsact,
}

/// The hook in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// TCX links, Linux 6.6 and newer (`BPF_TCX_INGRESS`, `BPF_TCX_EGRESS`).
    Tcx,
    /// Filters of the clsact qdisc, Linux 4.5 and newer.
    Clsact,
}

/// Priority of KNI's filters in clsact, by which a new process finds and replaces exactly them.
pub const FILTER_PRIORITY: u16 = 75;
const FILTER_HANDLE: TcHandle = TcHandle::new(0, 75);

impl Hook {
    /// Its name in options and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }

    pub(super) fn choose(choice: HookChoice) -> Result<Self, DataplaneError> {
        let version = KernelVersion::current().map_err(|error| DataplaneError::Kernel(error.to_string()))?;
        let has_tcx = version >= KernelVersion::new(6, 6, 0);
        match choice {
            HookChoice::Clsact => Ok(Self::Clsact),
            HookChoice::Auto if !has_tcx => Ok(Self::Clsact),
            HookChoice::Tcx if !has_tcx => Err(DataplaneError::Kernel("TCX requires Linux 6.6".to_owned())),
            HookChoice::Auto | HookChoice::Tcx => Ok(Self::Tcx),
        }
    }
}

fn program_of(direction: Direction) -> (&'static str, TcAttachType) {
    match direction {
        Direction::FromPod => ("from_pod", TcAttachType::Ingress),
        Direction::ToPod => ("to_pod", TcAttachType::Egress),
        Direction::FromUplink => ("from_uplink", TcAttachType::Ingress),
        Direction::ToUplink => ("to_uplink", TcAttachType::Egress),
        Direction::FromOverlay => ("from_overlay", TcAttachType::Ingress),
        Direction::ToOverlay => ("to_overlay", TcAttachType::Egress),
    }
}

/// The attach point of a TC program: interface and direction.
#[derive(Debug, Clone)]
pub(super) struct AttachPoint<'a> {
    /// The interface.
    pub(super) ifname: &'a str,
    /// The program.
    pub(super) direction: Direction,
    /// Pin of its link, where the hook has links.
    pub(super) path: PathBuf,
}

impl<'a> AttachPoint<'a> {
    /// The attach points of both programs at the host interface of an endpoint.
    pub(super) fn of_endpoint(pins: &Pins, ifname: &'a str, endpoint: EndpointId) -> [Self; 2] {
        [Direction::FromPod, Direction::ToPod].map(|direction| Self {
            ifname,
            direction,
            path: pins.link(endpoint, direction),
        })
    }

    /// The attach points of both programs at the tunnel device.
    pub(super) fn of_overlay(pins: &Pins, ifname: &'a str) -> [Self; 2] {
        [Direction::FromOverlay, Direction::ToOverlay].map(|direction| Self {
            ifname,
            direction,
            path: pins.link_of_device(direction.as_str()),
        })
    }

    /// The attach points of both programs at the uplink.
    pub(super) fn of_uplink(pins: &Pins, ifname: &'a str) -> [Self; 2] {
        [Direction::FromUplink, Direction::ToUplink].map(|direction| Self {
            ifname,
            direction,
            path: pins.uplink_link(direction.as_str()),
        })
    }
}

pub(super) struct Target<'a> {
    pub(super) program: &'static str,
    pub(super) ifname: &'a str,
}

impl Target<'_> {
    pub(super) fn failed<E>(&self, operation: &'static str) -> impl FnOnce(E) -> DataplaneError
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let (program, ifname) = (self.program, self.ifname.to_owned());
        move |source| DataplaneError::Attach {
            program,
            ifname,
            operation,
            source: Box::new(source),
        }
    }
}

/// Attaches one direction's program. A link takes the place of a filter that the uplink may have from an agent with the
/// other hook: of two `to_uplink` the second would drop what the first one lets through.
pub(super) fn attach(ebpf: &mut Ebpf, hook: Hook, point: &AttachPoint<'_>) -> Result<(), DataplaneError> {
    let ifname = point.ifname;
    let (program, attach_type) = program_of(point.direction);
    let target = Target { program, ifname };
    let classifier = object::classifier(ebpf, program)?;
    match hook {
        Hook::Tcx => {
            let options = TcAttachOptions::TcxOrder(LinkOrder::default());
            let id = classifier
                .attach_with_options(ifname, attach_type, options)
                .map_err(target.failed("creating the TCX link"))?;
            let link = classifier.take_link(id).map_err(target.failed("taking the link"))?;
            let link = FdLink::try_from(link).map_err(target.failed("taking the link"))?;
            pin(&target, link, &point.path)?;
            // The interface of a pod is new here, or is taken over.
            if !matches!(point.direction, Direction::FromPod | Direction::ToPod) {
                remove_filter(ifname, attach_type);
            }
        }
        Hook::Clsact => {
            add_clsact(&target)?;
            let options = NlOptions {
                priority: FILTER_PRIORITY,
                handle: FILTER_HANDLE,
                classid: None,
            };
            let id = classifier
                .attach_with_options(ifname, attach_type, TcAttachOptions::Netlink(options))
                .map_err(target.failed("adding the clsact filter"))?;
            let link = classifier.take_link(id).map_err(target.failed("taking the filter"))?;
            // Dropping the link would remove the filter, which must outlive the agent.
            mem::forget(link);
        }
    }
    Ok(())
}

/// Pins a link in place of another one, which is removed only when the new one works.
pub(super) fn pin(target: &Target<'_>, link: FdLink, path: &Path) -> Result<(), DataplaneError> {
    let fresh = Pins::fresh(path);
    if fresh.exists() {
        std::fs::remove_file(&fresh).map_err(DataplaneError::pin(&fresh, "removing an unfinished pin"))?;
    }
    link.pin(&fresh).map_err(target.failed("pinning the link"))?;
    std::fs::rename(&fresh, path).map_err(DataplaneError::pin(path, "putting the pin in place"))
}

fn add_clsact(target: &Target<'_>) -> Result<(), DataplaneError> {
    match qdisc_add_clsact(target.ifname) {
        Err(error) if !already_exists(&error) => Err(target.failed("adding the clsact qdisc")(error)),
        _ => Ok(()),
    }
}

fn already_exists(error: &TcError) -> bool {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = source {
        if let Some(io_error) = current.downcast_ref::<io::Error>() {
            return io_error.kind() == io::ErrorKind::AlreadyExists;
        }
        if let Some(netlink) = current.downcast_ref::<aya::sys::NetlinkError>() {
            return netlink.raw_os_error() == Some(libc::EEXIST);
        }
        source = current.source();
    }
    false
}

/// Moves one direction to this agent's program; attaches a missing one. The old program runs until the new one does. An
/// error changes nothing.
pub(super) fn adopt(ebpf: &mut Ebpf, hook: Hook, point: &AttachPoint<'_>) -> Result<(), DataplaneError> {
    let ifname = point.ifname;
    let (program, attach_type) = program_of(point.direction);
    let target = Target { program, ifname };
    let classifier = object::classifier(ebpf, program)?;
    match hook {
        Hook::Tcx => {
            if !update_tcx(classifier, &target, &point.path)? {
                attach(ebpf, hook, point)?;
            }
            remove_filter(ifname, attach_type);
            Ok(())
        }
        Hook::Clsact => {
            let filter = SchedClassifierLink::attached(ifname, attach_type, FILTER_PRIORITY, FILTER_HANDLE, None)
                .map_err(target.failed("finding the interface"))?;
            // Replacing a missing filter fails; adding one then reports any other problem.
            if update(classifier, filter).map(mem::forget).is_err() {
                attach(ebpf, hook, point)?;
            }
            Pins::remove_link(&point.path)
        }
    }
}

/// Whether a pinned link runs the new program now; false where there is none, or only one of an interface that is
/// gone.
fn update_tcx(classifier: &mut SchedClassifier, target: &Target<'_>, path: &Path) -> Result<bool, DataplaneError> {
    let pinned = match PinnedLink::from_pin(path) {
        Err(LinkError::SyscallError(error)) if error.io_error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.map_err(target.failed("opening the pinned link"))?,
    };
    let link = SchedClassifierLink::try_from(FdLink::from(pinned)).map_err(target.failed("reading the pinned link"))?;
    match update(classifier, link) {
        // The pin keeps the link; this descriptor is closed here.
        Ok(link) => {
            drop(link);
            Ok(true)
        }
        Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOLINK) => Ok(false),
        Err(error) => Err(target.failed("updating the link")(error)),
    }
}

/// Updates a link to another program and returns the handle of it.
fn update(classifier: &mut SchedClassifier, link: SchedClassifierLink) -> Result<SchedClassifierLink, ProgramError> {
    let id = classifier.attach_to_link(link)?;
    classifier.take_link(id)
}

/// Removes both of KNI's filters from an interface. Idempotent.
pub(super) fn remove_filters(ifname: &str) {
    for attach_type in [TcAttachType::Ingress, TcAttachType::Egress] {
        remove_filter(ifname, attach_type);
    }
}

/// Removes a filter that a TCX link has replaced. Most interfaces never had one.
fn remove_filter(ifname: &str, attach_type: TcAttachType) {
    let filter = SchedClassifierLink::attached(ifname, attach_type, FILTER_PRIORITY, FILTER_HANDLE, None);
    if let Ok(Err(error)) = filter.map(SchedClassifierLink::detach) {
        tracing::trace!(ifname, %error, "no filter to remove");
    }
}

/// The attached programs, and problems.
pub(super) fn inspect(ids: &ProgramIds, hook: Hook, points: &[AttachPoint<'_>]) -> (Vec<ProgramView>, Vec<String>) {
    let mut views = Vec::new();
    let mut problems = Vec::new();
    for point in points {
        let ifname = point.ifname;
        let (program, attach_type) = program_of(point.direction);
        let side = if attach_type == TcAttachType::Ingress {
            "ingress"
        } else {
            "egress"
        };
        let id = ids.get(program).copied();
        let link_id = match hook {
            Hook::Tcx => link_id(&point.path),
            Hook::Clsact => Some(0),
        };
        let attached = match hook {
            Hook::Tcx => SchedClassifier::query_tcx(ifname, attach_type)
                .is_ok_and(|(_, programs)| programs.iter().any(|info| Some(info.id()) == id)),
            Hook::Clsact => true,
        };
        match (id, link_id, attached) {
            (Some(id), Some(link_id), true) => views.push(ProgramView {
                name: program.to_owned(),
                id,
                hook: format!("{}/{side}", hook.as_str()),
                link_id,
            }),
            _ => problems.push(format!(
                "program {program} is not attached at {}/{side} of {ifname}",
                hook.as_str()
            )),
        }
    }
    (views, problems)
}

/// The kernel's id of a pinned link.
pub(super) fn link_id(path: &Path) -> Option<u32> {
    let pinned = PinnedLink::from_pin(path).ok()?;
    Some(FdLink::from(pinned).info().ok()?.id())
}
