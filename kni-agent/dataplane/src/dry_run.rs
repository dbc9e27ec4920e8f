//! Asks the programs what they would do with a packet: a copy of them that decides, writes down why, and does nothing.

use std::io;

use aya::{
    Ebpf, TestRunOptions,
    programs::{ProgramError, TestRun as _},
};
use kni_common::{Direction, event::Explanation, layout::MapSpec};
use kni_model::EndpointId;

use super::{DataplaneError, batch::Table, object, pin::Pins};

/// A packet, and where it would be met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// At whose host interface; that interface must be in the namespace of the calling thread.
    pub endpoint: EndpointId,
    /// Which program would see it.
    pub direction: Direction,
    /// The packet, from the Ethernet header on.
    pub frame: Vec<u8>,
    /// Index of the interface that the node would have received it from; 0 for none.
    pub ingress_ifindex: u32,
}

/// A frame that says nothing: for a run of which only the clock matters.
const EMPTY_FRAME: [u8; 64] = [0; 64];

/// Offsets in `struct __sk_buff` (linux/bpf.h); what lies behind may be left out.
const CONTEXT: usize = 44;
const INGRESS_IFINDEX: usize = 36;
const IFINDEX: usize = 40;

/// The second copy of the programs. It is loaded when it is asked for first: the verifier takes tens of milliseconds,
/// which a start should not wait for. It has the real maps, so that it decides as the programs do.
pub(super) struct DryRun {
    programs: Programs,
    explanation: Table<u32, Explanation>,
}

enum Programs {
    Unloaded { object: Vec<u8>, specs: Vec<MapSpec> },
    Loaded(Box<Ebpf>),
}

impl DryRun {
    pub(super) fn new(object: Vec<u8>, specs: Vec<MapSpec>, pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            programs: Programs::Unloaded { object, specs },
            explanation: Table::open("EXPLANATION", &pins.map("EXPLANATION"))?,
        })
    }

    /// What would become of the packet at the host interface `ifindex`, which is that of the probe's endpoint.
    pub(super) fn explain(&mut self, pins: &Pins, probe: &Probe, ifindex: u32) -> Result<Explanation, DataplaneError> {
        let mut context = [0; CONTEXT];
        for (offset, word) in [(INGRESS_IFINDEX, probe.ingress_ifindex), (IFINDEX, ifindex)] {
            if let Some(field) = context.get_mut(offset..offset + size_of::<u32>()) {
                field.copy_from_slice(&word.to_ne_bytes());
            }
        }
        let program = match probe.direction {
            Direction::FromPod => "from_pod",
            Direction::ToPod => "to_pod",
            Direction::FromUplink => "from_uplink",
            Direction::ToUplink => "to_uplink",
        };
        self.run(pins, program, &probe.frame, Some(&context))?
            .map_err(|error| match errno(&error) {
                Some(libc::ENODEV) => DataplaneError::NoInterface {
                    endpoint: probe.endpoint.0,
                    ifindex,
                },
                _ => refused(program, &error),
            })
    }

    /// The kernel's clock in ticks. By one run at the loopback device, where the program finds no endpoint.
    pub(super) fn jiffies(&mut self, pins: &Pins) -> Result<u64, DataplaneError> {
        self.run(pins, "from_pod", &EMPTY_FRAME, None)?
            .map(|explanation| explanation.jiffies)
            .map_err(|error| refused("from_pod", &error))
    }

    fn run(
        &mut self,
        pins: &Pins,
        program: &'static str,
        frame: &[u8],
        context: Option<&[u8]>,
    ) -> Result<Result<Explanation, ProgramError>, DataplaneError> {
        // An answer to an earlier question must not be taken for this one's.
        self.explanation.put(&0, &Explanation::default())?;
        let ebpf = self.programs.loaded(pins)?;
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: context,
            ..TestRunOptions::new()
        };
        if let Err(error) = object::classifier(ebpf, program)?.test_run(options) {
            return Ok(Err(error));
        }
        match self.explanation.get(&0)? {
            // Every run writes the clock, which is never at zero.
            Some(found) if found.jiffies != 0 => Ok(Ok(found)),
            _ => Err(DataplaneError::NoExplanation { program }),
        }
    }
}

impl Programs {
    fn loaded(&mut self, pins: &Pins) -> Result<&mut Ebpf, DataplaneError> {
        if let Self::Unloaded { object, specs } = self {
            let begun = std::time::Instant::now();
            let ebpf = object::load(object, pins, specs, object::Purpose::DryRun)?;
            tracing::debug!(took = ?begun.elapsed(), "loaded the programs for dry runs");
            *self = Self::Loaded(Box::new(ebpf));
        }
        match self {
            Self::Loaded(ebpf) => Ok(ebpf),
            Self::Unloaded { .. } => Err(DataplaneError::NoObject),
        }
    }
}

fn errno(error: &ProgramError) -> Option<i32> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = source {
        if let Some(io_error) = current.downcast_ref::<io::Error>() {
            return io_error.raw_os_error();
        }
        source = current.source();
    }
    None
}

fn refused(program: &'static str, error: &ProgramError) -> DataplaneError {
    let reason = errno(error).map_or_else(
        || error.to_string(),
        |code| io::Error::from_raw_os_error(code).to_string(),
    );
    DataplaneError::Load {
        program,
        reason: format!("dry run: {reason}"),
    }
}
