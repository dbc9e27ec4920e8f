//! Loads a program that runs for milliseconds and records its progress, for tests of waits for running programs.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use super::{Command, element::ElementAttr, nested, sys_bpf};

/// `BPF_PROG_TYPE_SCHED_CLS` (linux/bpf.h).
const SCHED_CLS: u32 = 3;
/// The shortest frame that the kernel accepts.
const FRAME: [u8; 14] = [0; 14];
/// Calls of a function of 20 ns or more. The verifier follows each one, within its million of instructions.
const CALLS: i32 = 100_000;

/// `union bpf_attr`, the beginning of the struct of `BPF_PROG_LOAD`.
#[repr(C)]
struct LoadAttr {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
}

/// `union bpf_attr`, the beginning of the struct of `BPF_PROG_TEST_RUN`.
#[repr(C)]
struct RunAttr {
    program_fd: u32,
    result: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

/// The row that the program writes at its begin and at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    NotBegun,
    Runs,
    Ended,
}

/// The program and its map.
pub(crate) struct SlowProgram {
    map: OwnedFd,
    program: OwnedFd,
}

impl SlowProgram {
    /// Loads the program (Linux 5.3: loops).
    pub(crate) fn load() -> io::Result<Self> {
        let map = nested::create(nested::ARRAY, 0)?;
        let instructions = instructions(map.as_raw_fd());
        let license = c"GPL";
        let mut attr = LoadAttr {
            kind: SCHED_CLS,
            instruction_count: u32::try_from(instructions.len()).map_err(io::Error::other)?,
            instructions: instructions.as_ptr().addr() as u64,
            license: license.as_ptr().addr() as u64,
        };
        // SAFETY: the instructions and the license outlive the call, which only reads them.
        let fd = unsafe { sys_bpf(Command::ProgLoad, &mut attr) }?;
        // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
        let program = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { map, program })
    }

    /// Runs the program once; returns at its end.
    pub(crate) fn run(&self) -> io::Result<()> {
        let mut attr = RunAttr {
            program_fd: self.program.as_raw_fd().cast_unsigned(),
            result: 0,
            data_size_in: 14,
            data_size_out: 0,
            data_in: FRAME.as_ptr().addr() as u64,
            data_out: 0,
            repeat: 1,
            duration: 0,
        };
        // SAFETY: the kernel reads the frame, whose length the attribute gives, and writes no frame.
        unsafe { sys_bpf(Command::ProgTestRun, &mut attr) }.map(drop)
    }

    /// Makes the row as it is before a run.
    pub(crate) fn reset(&self) -> io::Result<()> {
        nested::update(&self.map, 0)
    }

    /// Reads the row.
    pub(crate) fn progress(&self) -> io::Result<Progress> {
        let (key, mut value) = (0_u32, [0_u32]);
        let mut attr = ElementAttr {
            map_fd: self.map.as_raw_fd().cast_unsigned(),
            padding: 0,
            key: std::ptr::from_ref(&key).addr() as u64,
            value: value.as_mut_ptr().expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: key and value have the four bytes that the map was made with.
        unsafe { sys_bpf(Command::MapLookupElem, &mut attr) }?;
        Ok(match std::hint::black_box(value)[0] {
            0 => Progress::NotBegun,
            1 => Progress::Runs,
            _ => Progress::Ended,
        })
    }
}

/// `struct bpf_insn` (linux/bpf.h).
fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> [u8; 8] {
    let (offset, immediate) = (offset.to_ne_bytes(), immediate.to_ne_bytes());
    let mut bytes = [code, registers, 0, 0, 0, 0, 0, 0];
    bytes[2..4].copy_from_slice(&offset);
    bytes[4..].copy_from_slice(&immediate);
    bytes
}

fn instructions(map: i32) -> [[u8; 8]; 9] {
    /// `bpf_ktime_get_ns`.
    const CLOCK: i32 = 5;
    [
        // r7: the row (`BPF_PSEUDO_MAP_VALUE`).
        instruction(0x18, 0x27, 0, map),
        instruction(0, 0, 0, 0),
        instruction(0x62, 0x07, 0, 1),
        instruction(0xb7, 0x06, 0, 0),
        instruction(0x85, 0, 0, CLOCK),
        instruction(0x07, 0x06, 0, 1),
        // The call, until r6 has counted all of them.
        instruction(0xa5, 0x06, -3, CALLS),
        instruction(0x62, 0x07, 0, 2),
        instruction(0x95, 0, 0, 0),
    ]
}
