//! Executes the programs of the object instruction by instruction, and counts what they do: the measure of a packet's
//! cost that does not depend on the machine.
//!
//! Memory is modelled, not shared: a pointer is the number of a region and an offset in it, so that every access is
//! checked and belongs to a known kind of memory. Fields of `__sk_buff` are loaded by their offset, as the verifier
//! rewrites them. The programs are assumed to be verified: what the verifier refuses is an error here or undefined, but
//! never undefined behaviour of this process.

mod alu;
mod counts;
mod execute;
mod kernel;
mod map;
mod memory;
mod pinned;

use std::{collections::BTreeMap, net::Ipv4Addr};

use anyhow::{Context as _, Result, ensure};
use aya_obj::{Object, generated::bpf_insn};

pub use self::counts::{Counts, Memory as MemoryKind};
use self::{
    execute::Execution,
    map::Map,
    memory::{CONTEXT_LENGTH, Memory},
};

/// One instruction (`struct bpf_insn`).
#[derive(Debug, Clone, Copy)]
struct Instruction {
    code: u8,
    destination: usize,
    source: usize,
    offset: i16,
    immediate: i32,
}

impl From<&bpf_insn> for Instruction {
    fn from(raw: &bpf_insn) -> Self {
        Self {
            code: raw.code,
            destination: raw.dst_reg().into(),
            source: raw.src_reg().into(),
            offset: raw.off,
            immediate: raw.imm,
        }
    }
}

/// The fields of `__sk_buff` that differ between packets; the others are 0.
#[derive(Debug, Clone, Copy, Default)]
pub struct Arrival {
    /// Index of the interface whose hook runs.
    pub ifindex: u32,
    /// Index of the interface through which the packet entered the node, 0 for none.
    pub ingress_ifindex: u32,
    /// The number of the virtual network and the sender, where the packet came through a tunnel over IPv4.
    pub tunnel: Option<(u32, Ipv4Addr)>,
}

/// The result of a program for a packet.
#[derive(Debug, Clone)]
pub struct Executed {
    /// Its return value.
    pub action: u32,
    /// The resulting frame.
    pub frame: Vec<u8>,
    /// What it executed.
    pub counts: Counts,
}

/// The programs of an object with maps of their own, which keep their contents between packets.
#[derive(Debug)]
pub struct Interpreter {
    /// Every program, with the functions that it calls behind it.
    programs: BTreeMap<String, Vec<Instruction>>,
    maps: Vec<Map>,
    /// jiffies, constant until it is changed.
    pub jiffies: u64,
    /// Nanoseconds since boot.
    pub nanoseconds: u64,
    random: fastrand::Rng,
}

impl Interpreter {
    /// Links the programs of an ELF object, with empty maps of the sizes that it declares.
    pub fn new(object: &[u8]) -> Result<Self> {
        let mut object = Object::parse(object).context("the object")?;
        let maps: Vec<Map> = object.maps.iter().map(|(name, map)| Map::new(name, map)).collect();
        let declared = object.maps.clone();
        let numbered = maps.iter().enumerate().filter_map(|(number, map)| {
            let (name, declared) = declared.get_key_value(&map.name)?;
            Some((name.as_str(), i32::try_from(number).ok()?, declared))
        });
        let text = object.functions.keys().map(|(section, _)| *section).collect();
        object.relocate_maps(numbered, &text).context("references to maps")?;
        object.relocate_calls(&text).context("calls of functions")?;
        let program = |(name, program): (&String, &aya_obj::Program)| {
            let function = object.functions.get(&program.function_key())?;
            let instructions = function.instructions.iter().map(Instruction::from).collect();
            Some((name.clone(), instructions))
        };
        Ok(Self {
            programs: object.programs.iter().filter_map(program).collect(),
            maps,
            jiffies: 5_000_000_000,
            nanoseconds: 20_000_000_000_000,
            random: fastrand::Rng::with_seed(1),
        })
    }

    /// Copies the contents of the pinned maps of a folder on bpffs: those that the agent writes, and that have the same
    /// contents on every CPU.
    pub fn copy_pinned(&mut self, folder: &std::path::Path) -> Result<()> {
        for map in self.maps.iter_mut().filter(|map| map.is_shared()) {
            let path = folder.join(&map.name);
            if path.exists() {
                pinned::copy(&path, map).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }

    /// Executes a TC program on a frame.
    pub fn run(&mut self, program: &str, arrival: Arrival, frame: &[u8]) -> Result<Executed> {
        let instructions = self.programs.get(program);
        let instructions = instructions.with_context(|| format!("no program {program}"))?.clone();
        ensure!(frame.len() >= 14, "a frame of {} bytes", frame.len());
        let mut context = [0; CONTEXT_LENGTH];
        for (offset, value) in [
            (memory::LENGTH, u32::try_from(frame.len())?),
            (memory::INGRESS_IFINDEX, arrival.ingress_ifindex),
            (memory::IFINDEX, arrival.ifindex),
            (memory::PROTOCOL, u16::from_ne_bytes([frame[12], frame[13]]).into()),
        ] {
            context[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
        }
        let memory = Memory::new(context, frame.to_vec(), &mut self.maps);
        let mut execution = Execution::new(&instructions, memory, self.jiffies, self.nanoseconds, &mut self.random);
        execution.tunnel = arrival.tunnel;
        let action = execution.run().with_context(|| execution.place(program))?;
        let (frame, counts) = execution.finish();
        Ok(Executed { action, frame, counts })
    }
}
