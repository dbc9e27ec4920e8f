//! Explains decisions: runs a copy of the programs that decides and records the reasons without side effects.

use std::{io, net::IpAddr};

use aya::{
    Ebpf, TestRunOptions,
    programs::{ProgramError, TestRun as _},
};
use kni_common::{Direction, address::from_ip, event::Explanation, layout::MapSpec};
use kni_model::EndpointId;

use super::{DataplaneError, object, pin::Pins, table::Table};

/// A packet, and the program that would see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The endpoint of the host interface, which must be in the namespace of the calling thread.
    pub endpoint: EndpointId,
    /// The program.
    pub direction: Direction,
    /// The packet, from the Ethernet header on.
    pub frame: Vec<u8>,
    /// Index of the interface that the node would have received it from; 0 for none.
    pub ingress_ifindex: u32,
    /// The tunnel that it came through, for `from_overlay`; then `endpoint` is not used.
    pub tunnel: Option<SupposedTunnel>,
}

/// The metadata of a packet that came through the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SupposedTunnel {
    /// Number of the virtual network: that of a network in the cluster.
    pub number: u32,
    /// Outer source address.
    pub sender: IpAddr,
}

/// Length and offsets of `struct __sk_buff` (linux/bpf.h); later fields may be omitted.
const CONTEXT: usize = 68;
const INGRESS_IFINDEX: usize = 36;
const IFINDEX: usize = 40;
/// `cb`, of five words: the number of the virtual network, and the sender of the tunnel.
const CB: usize = 48;

/// The second copy of the programs. The first explanation loads it: the verifier takes half a second, which must not
/// delay the start. It uses the real maps, so that it decides as the programs do.
pub(super) struct DryRun {
    object: Vec<u8>,
    specs: Vec<MapSpec>,
    loaded: Option<Box<Ebpf>>,
    explanation: Table<u32, Explanation>,
}

impl DryRun {
    pub(super) fn new(object: Vec<u8>, specs: Vec<MapSpec>, pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            object,
            specs,
            loaded: None,
            explanation: Table::open("EXPLANATION", &pins.map("EXPLANATION"))?,
        })
    }

    /// The decision about the packet at the host interface `ifindex` of the probe's endpoint.
    pub(super) fn explain(&mut self, pins: &Pins, probe: &Probe, ifindex: u32) -> Result<Explanation, DataplaneError> {
        let mut context = [0; CONTEXT];
        let mut put = |offset: usize, bytes: &[u8]| {
            if let Some(field) = context.get_mut(offset..offset + bytes.len()) {
                field.copy_from_slice(bytes);
            }
        };
        put(INGRESS_IFINDEX, &probe.ingress_ifindex.to_ne_bytes());
        put(IFINDEX, &ifindex.to_ne_bytes());
        if let Some(tunnel) = probe.tunnel {
            put(CB, &tunnel.number.to_ne_bytes());
            put(CB + size_of::<u32>(), &from_ip(tunnel.sender));
        }
        let program = probe.direction.as_str();
        self.run(pins, program, &probe.frame, &context)?
            .map_err(|error| match errno(&error) {
                Some(libc::ENODEV) => DataplaneError::NoInterface {
                    endpoint: probe.endpoint.0,
                    ifindex,
                },
                _ => failed(program, &error),
            })
    }

    fn programs(&mut self, pins: &Pins) -> Result<&mut Ebpf, DataplaneError> {
        match &mut self.loaded {
            Some(ebpf) => Ok(ebpf),
            empty => {
                let begun = std::time::Instant::now();
                let ebpf = object::load(&self.object, pins, &self.specs, object::Purpose::DryRun)?;
                tracing::debug!(took = ?begun.elapsed(), "loaded the programs for dry runs");
                // Not needed again.
                self.object = Vec::new();
                Ok(empty.insert(Box::new(ebpf)))
            }
        }
    }

    fn run(
        &mut self,
        pins: &Pins,
        program: &'static str,
        frame: &[u8],
        context: &[u8],
    ) -> Result<Result<Explanation, ProgramError>, DataplaneError> {
        // The result of an earlier run must not be mistaken for this one's.
        self.explanation.put(&0, &Explanation::default())?;
        let ebpf = self.programs(pins)?;
        let classifier = object::classifier(ebpf, program)?;
        if classifier.fd().is_err() {
            classifier.load().map_err(object::rejected(program))?;
        }
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(context),
            ..TestRunOptions::new()
        };
        if let Err(error) = classifier.test_run(options) {
            return Ok(Err(error));
        }
        match self.explanation.get(&0)? {
            // Every run writes the clock, which is never zero.
            Some(found) if found.jiffies != 0 => Ok(Ok(found)),
            _ => Err(DataplaneError::NoExplanation { program }),
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

fn failed(program: &'static str, error: &ProgramError) -> DataplaneError {
    let reason = errno(error).map_or_else(
        || error.to_string(),
        |code| io::Error::from_raw_os_error(code).to_string(),
    );
    DataplaneError::Load {
        program,
        reason: format!("dry run: {reason}"),
    }
}
