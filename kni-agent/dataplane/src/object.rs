//! Loads the programs from the ELF object.

use std::collections::BTreeMap;

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    programs::{CgroupSockAddr, Program, ProgramError, SchedClassifier, Xdp},
};
use kni_common::layout::MapSpec;

use super::{DataplaneError, cgroup, pin::Pins, program};

/// The purpose of a copy of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Processes packets.
    Traffic,
    /// Explains packets without side effects.
    DryRun,
}

/// Name and value of the constant that disables side effects in a copy. The verifier removes the branches it excludes.
const DRY_RUN: &str = "DRY_RUN";
static YES: u8 = 1;
/// Name of the constant that is the cookie of the node's network namespace.
const NODE_NAMESPACE: &str = "NODE_NAMESPACE";

/// Loads the programs that the purpose needs, with the pinned maps.
pub(super) fn load(object: &[u8], pins: &Pins, specs: &[MapSpec], purpose: Purpose) -> Result<Ebpf, DataplaneError> {
    let namespace = cgroup::namespace_cookie()?;
    let mut loader = EbpfLoader::new();
    loader.override_global(NODE_NAMESPACE, &namespace, true);
    // The full log costs time on every load; the statistics level still contains the line of a rejection.
    loader.verifier_log_level(VerifierLogLevel::STATS);
    if purpose == Purpose::DryRun {
        // A copy that would process the frame of an explanation as traffic must not load.
        loader.override_global(DRY_RUN, &YES, true);
    }
    for spec in specs {
        loader
            .map_max_entries(spec.name, spec.max_entries)
            .map_pin_path(spec.name, pins.map(spec.name));
    }
    let mut ebpf = loader
        .load(object)
        .map_err(|error| DataplaneError::Object(Box::new(error)))?;
    for name in program::POD {
        classifier(&mut ebpf, name)?.load().map_err(rejected(name))?;
    }
    if purpose == Purpose::Traffic {
        for name in program::UPLINK {
            classifier(&mut ebpf, name)?.load().map_err(rejected(name))?;
        }
        for name in [program::XDP_UPLINK, program::XDP_POD] {
            xdp(&mut ebpf, name)?.load().map_err(rejected(name))?;
        }
    }
    Ok(ebpf)
}

pub(super) fn rejected(program: &'static str) -> impl FnOnce(ProgramError) -> DataplaneError {
    move |error| DataplaneError::Load {
        program,
        reason: explain(&error),
    }
}

/// The kernel's ids of the loaded programs. They never change, so that an inspection does not wait for attachments.
pub(super) type ProgramIds = BTreeMap<String, u32>;

/// See [`ProgramIds`].
pub(super) fn ids(ebpf: &Ebpf) -> ProgramIds {
    let id = |program: &Program| {
        let info = if let Program::SchedClassifier(program) = program {
            program.info()
        } else if let Program::Xdp(program) = program {
            program.info()
        } else {
            return None;
        };
        Some(info.ok()?.id())
    };
    let programs = ebpf.programs();
    programs
        .filter_map(|(name, program)| Some((name.to_owned(), id(program)?)))
        .collect()
}

/// A program of the object.
pub(super) fn classifier<'a>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut SchedClassifier, DataplaneError> {
    let missing = || DataplaneError::Missing { what: "program", name };
    ebpf.program_mut(name)
        .ok_or_else(missing)?
        .try_into()
        .map_err(|_other_kind: ProgramError| missing())
}

/// An XDP program of the object.
pub(super) fn xdp<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut Xdp, DataplaneError> {
    let missing = || DataplaneError::Missing { what: "program", name };
    ebpf.program_mut(name)
        .ok_or_else(missing)?
        .try_into()
        .map_err(|_other_kind: ProgramError| missing())
}

/// A program of the node's own sockets, loaded: the first call loads it, which takes less than a millisecond.
pub(super) fn node_socket<'a>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut CgroupSockAddr, DataplaneError> {
    let missing = || DataplaneError::Missing { what: "program", name };
    let program: &mut CgroupSockAddr = ebpf
        .program_mut(name)
        .ok_or_else(missing)?
        .try_into()
        .map_err(|_other_kind: ProgramError| missing())?;
    if program.fd().is_err() {
        program.load().map_err(rejected(name))?;
    }
    Ok(program)
}

/// The last lines of the verifier's log name the rejected instruction.
fn explain(error: &ProgramError) -> String {
    if let ProgramError::LoadError { io_error, verifier_log } = error {
        let log = verifier_log.to_string();
        let mut last: Vec<&str> = log.lines().rev().filter(|line| !line.is_empty()).take(6).collect();
        last.reverse();
        format!("{io_error}: {}", last.join(" | "))
    } else {
        error.to_string()
    }
}
