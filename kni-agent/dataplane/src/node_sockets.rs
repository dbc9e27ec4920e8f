//! Attaches the programs of the node's own sockets to the root of cgroup2.

use std::{io, os::fd::AsFd as _, path::Path};

use aya::programs::{CgroupAttachMode, CgroupSockAddr, links::FdLink};

use super::{
    Dataplane, DataplaneError,
    bpf::link,
    cgroup::{self, Root},
    hook::{self, Target},
    lock, object,
    pin::Pins,
    program::NODE_SOCKETS,
};

impl Dataplane {
    /// Attaches the programs beside those of others, or moves the links of an earlier agent to this agent's.
    /// Idempotent.
    pub(super) fn attach_sockets(&self) -> Result<(), DataplaneError> {
        let root = cgroup::root()?;
        let mut programs = lock(&self.programs);
        for name in NODE_SOCKETS {
            let path = self.pins.socket_link(name);
            let place = root.path.display().to_string();
            let target = Target {
                program: name,
                ifname: &place,
            };
            let program = object::node_socket(&mut programs, name)?;
            if !take_over(program, &target, &root, &path)? {
                attach(program, &target, &root, &path)?;
            }
            self.held.hold(&path);
        }
        Ok(())
    }

    /// Detaches the programs, whichever agent attached them. Idempotent.
    pub(super) fn detach_sockets(&self) -> Result<(), DataplaneError> {
        NODE_SOCKETS.iter().try_for_each(|name| {
            let path = self.pins.socket_link(name);
            self.held.release(&path);
            link::detach(&path);
            Pins::remove_link(&path)
        })
    }
}

/// Whether a pinned link at the root runs the program now.
fn take_over(program: &CgroupSockAddr, target: &Target<'_>, root: &Root, path: &Path) -> Result<bool, DataplaneError> {
    let link = match link::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.map_err(target.failed("opening the pinned link"))?,
    };
    let info = link::info(&link).map_err(target.failed("reading the pinned link"))?;
    let Some(running) = info.program_at_cgroup(root.number) else {
        return Ok(false);
    };
    let id = program.info().map_err(target.failed("reading the program"))?.id();
    if running != id {
        let fd = program.fd().map_err(target.failed("reading the program"))?;
        link::update(&link, fd.as_fd()).map_err(target.failed("updating the link"))?;
    }
    Ok(true)
}

fn attach(program: &mut CgroupSockAddr, target: &Target<'_>, root: &Root, path: &Path) -> Result<(), DataplaneError> {
    // No flags: a link never excludes other programs, and the kernel refuses the flag that requests it.
    let id = program
        .attach(&root.folder, CgroupAttachMode::Single)
        .map_err(target.failed("creating the link"))?;
    let link = program.take_link(id).map_err(target.failed("taking the link"))?;
    let link = FdLink::try_from(link).map_err(target.failed("taking the link"))?;
    hook::pin(target, link, path)
}
