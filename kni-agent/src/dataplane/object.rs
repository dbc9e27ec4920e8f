//! The ELF: where it comes from and how it is loaded.

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    programs::{ProgramError, SchedClassifier},
};
use kni_common::layout::MapSpec;

use super::{DataplaneError, pin::Pins};

/// The object that the build embedded, empty when it was built without.
static EMBEDDED: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kni-ebpf.o"));

/// Every program of the object.
pub(super) const PROGRAMS: [&str; 2] = ["from_pod", "to_pod"];

/// The embedded object.
pub fn embedded() -> Result<Vec<u8>, DataplaneError> {
    if EMBEDDED.is_empty() {
        Err(DataplaneError::NoObject)
    } else {
        Ok(EMBEDDED.to_vec())
    }
}

/// Loads all programs, with the maps of the pins.
pub(super) fn load(object: &[u8], pins: &Pins, specs: &[MapSpec]) -> Result<Ebpf, DataplaneError> {
    let mut loader = EbpfLoader::new();
    // The full log costs time on every load; the statistics still bring the line that says what was refused.
    loader.verifier_log_level(VerifierLogLevel::STATS);
    for spec in specs {
        loader
            .map_max_entries(spec.name, spec.max_entries)
            .map_pin_path(spec.name, pins.map(spec.name));
    }
    let mut ebpf = loader
        .load(object)
        .map_err(|error| DataplaneError::Object(Box::new(error)))?;
    for name in PROGRAMS {
        classifier(&mut ebpf, name)?
            .load()
            .map_err(|error| DataplaneError::Load {
                program: name,
                reason: explain(&error),
            })?;
    }
    Ok(ebpf)
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

/// The last lines of the verifier's log say what it refused.
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
