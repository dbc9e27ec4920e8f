//! The two smallest programs there are, by bpf(2) itself: an empty one, and one that only redirects to a peer.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, Result};

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_FUNC_REDIRECT_PEER: u32 = 155;

/// One instruction (`struct bpf_insn`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: u32,
}

impl Instruction {
    const EXIT: Self = Self::new(0x95, 0, 0);

    const fn new(code: u8, registers: u8, immediate: u32) -> Self {
        Self {
            code,
            registers,
            offset: 0,
            immediate,
        }
    }

    /// Puts a constant into a register.
    const fn set(register: u8, value: u32) -> Self {
        Self::new(0xb7, register, value)
    }

    const fn call(helper: u32) -> Self {
        Self::new(0x85, 0, helper)
    }
}

/// The parts of `union bpf_attr` that the commands read; the kernel takes missing tail bytes as zero.
#[repr(C)]
struct LoadAttributes {
    program_type: u32,
    instructions: u32,
    first_instruction: u64,
    license: u64,
}

#[repr(C)]
struct LinkAttributes {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct RunAttributes {
    program: u32,
    return_value: u32,
    data_in_size: u32,
    data_out_size: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_in_size: u32,
    context_out_size: u32,
    context_in: u64,
    context_out: u64,
}

fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<libc::c_long> {
    let attributes: *mut T = attributes;
    // SAFETY: the attributes live through the call, and their size is given; what they point to is the callers' care.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn descriptor(number: libc::c_long) -> Result<OwnedFd> {
    let number = i32::try_from(number).context("descriptor out of range")?;
    // SAFETY: the kernel returned it just now, so it belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn raw(fd: &OwnedFd) -> Result<u32> {
    u32::try_from(fd.as_raw_fd()).context("negative descriptor")
}

/// A loaded classifier.
#[derive(Debug)]
pub(crate) struct Program(OwnedFd);

/// A program at an interface, until it is dropped.
#[derive(Debug)]
pub(crate) struct Attached(#[expect(dead_code, reason = "detaches when it is closed")] OwnedFd);

impl Program {
    /// Returns 0, nothing else: what a run costs without a program.
    pub(crate) fn empty() -> Result<Self> {
        Self::load(&[Instruction::set(0, 0), Instruction::EXIT])
    }

    /// Sends every packet to the peer of the interface: what a packet costs without a decision.
    pub(crate) fn redirect_peer(ifindex: u32) -> Result<Self> {
        Self::load(&[
            Instruction::set(1, ifindex),
            Instruction::set(2, 0),
            Instruction::call(BPF_FUNC_REDIRECT_PEER),
            Instruction::EXIT,
        ])
    }

    fn load(instructions: &[Instruction]) -> Result<Self> {
        let license = c"GPL";
        let mut attributes = LoadAttributes {
            program_type: BPF_PROG_TYPE_SCHED_CLS,
            instructions: u32::try_from(instructions.len())?,
            first_instruction: instructions.as_ptr() as u64,
            license: license.as_ptr() as u64,
        };
        let fd = bpf(BPF_PROG_LOAD, &mut attributes).context("load a bare program")?;
        Ok(Self(descriptor(fd)?))
    }

    /// Attaches by TCX at the ingress of an interface of the calling thread's network namespace.
    pub(crate) fn attach_ingress(&self, ifindex: u32) -> Result<Attached> {
        let mut attributes = LinkAttributes {
            program: raw(&self.0)?,
            ifindex,
            attach_type: BPF_TCX_INGRESS,
            flags: 0,
        };
        let fd = bpf(BPF_LINK_CREATE, &mut attributes).context("attach a bare program")?;
        Ok(Attached(descriptor(fd)?))
    }

    /// Runs it `repeat` times on a packet; the mean duration in whole nanoseconds.
    pub(crate) fn test_run(&self, packet: &[u8], context: &[u8], repeat: u32) -> Result<Duration> {
        let mut attributes = RunAttributes {
            program: raw(&self.0)?,
            data_in_size: u32::try_from(packet.len())?,
            data_in: packet.as_ptr() as u64,
            context_in_size: u32::try_from(context.len())?,
            context_in: context.as_ptr() as u64,
            repeat,
            ..RunAttributes::default()
        };
        bpf(BPF_PROG_TEST_RUN, &mut attributes).context("run the empty program")?;
        Ok(Duration::from_nanos(attributes.duration.into()))
    }
}
