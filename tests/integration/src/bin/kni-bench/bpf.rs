//! Loads minimal programs by direct calls of bpf(2): an empty one, one that only redirects to a peer, and XDP programs
//! that only send or only drop frames.

use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::{
    maps::MapInfo,
    programs::{ProgramInfo, loaded_programs},
};
use kni_integration::syscall::bpf;

const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_FUNC_REDIRECT: u32 = 23;
/// Frames are really transmitted, instead of only returning the result.
const BPF_F_TEST_XDP_LIVE_FRAMES: u32 = 1 << 1;
const XDP_DROP: u32 = 1;
/// `XDP_FLAGS_DRV_MODE`
const IN_THE_DRIVER: u32 = 1 << 2;
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

    const fn at(self, offset: i16) -> Self {
        Self { offset, ..self }
    }

    /// Puts a constant into a register.
    const fn set(register: u8, value: u32) -> Self {
        Self::new(0xb7, register, value)
    }

    const fn call(helper: u32) -> Self {
        Self::new(0x85, 0, helper)
    }
}

/// The parts of `union bpf_attr` that the commands read; the kernel treats missing trailing bytes as zero.
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
    flags: u32,
    cpu: u32,
    batch_size: u32,
    padding: u32,
}

fn descriptor(number: libc::c_long) -> Result<OwnedFd> {
    let number = i32::try_from(number).context("descriptor out of range")?;
    // SAFETY: the kernel has just returned the descriptor, so it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn raw(fd: &OwnedFd) -> Result<u32> {
    u32::try_from(fd.as_raw_fd()).context("negative descriptor")
}

#[repr(C)]
struct ElementAttributes {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

fn loaded(id: u32) -> Result<ProgramInfo> {
    let mut loaded = loaded_programs().filter_map(Result::ok);
    loaded.find(|info| info.id() == id).context("the program is not loaded")
}

/// Replaces these bytes wherever they occur in the arrays that a program uses: whatever the layout of its rows, an
/// address has the same bytes everywhere.
pub(crate) fn replace_in_arrays(program: u32, from: [u8; 6], to: [u8; 6]) -> Result<()> {
    const BPF_MAP_TYPE_ARRAY: u32 = 2;
    let mut replaced = 0;
    for id in loaded(program)?.map_ids()?.context("the kernel names no maps")? {
        let map = MapInfo::from_id(id)?;
        let map = map.fd()?.as_fd().try_clone_to_owned()?;
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_raw_fd()))?;
        let field = |name: &str| -> Result<u32> {
            let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            Ok(value.context("the description of a map")?.trim().parse()?)
        };
        if field("map_type")? != BPF_MAP_TYPE_ARRAY || info.contains("frozen:\t1") {
            continue;
        }
        let mut value = vec![0; usize::try_from(field("value_size")?)?];
        for index in 0..field("max_entries")? {
            let mut element = ElementAttributes {
                map: raw(&map)?,
                padding: 0,
                key: (&raw const index) as u64,
                value: value.as_mut_ptr() as u64,
                flags: 0,
            };
            bpf(BPF_MAP_LOOKUP_ELEM, &mut element).context("read a row")?;
            let places = (0..value.len().saturating_sub(5)).filter(|at| value[*at..at + 6] == from);
            let places: Vec<usize> = places.collect();
            for at in &places {
                value[*at..at + 6].copy_from_slice(&to);
            }
            if !places.is_empty() {
                element.value = value.as_ptr() as u64;
                bpf(BPF_MAP_UPDATE_ELEM, &mut element).context("write a row")?;
                replaced += places.len();
            }
        }
    }
    ensure!(replaced > 0, "no row has the address {from:02x?}");
    Ok(())
}

/// A loaded program.
#[derive(Debug)]
pub(crate) struct Program(OwnedFd);

/// A program attached to an interface until it is dropped.
#[derive(Debug)]
pub(crate) struct Attached(#[expect(dead_code, reason = "detaches when it is closed")] OwnedFd);

impl Program {
    /// Only returns 0: the cost of a run without a program.
    pub(crate) fn empty() -> Result<Self> {
        Self::load(BPF_PROG_TYPE_SCHED_CLS, &[Instruction::set(0, 0), Instruction::EXIT])
    }

    /// Redirects every packet to the peer of the interface: the cost of a packet without a decision.
    pub(crate) fn redirect_peer(ifindex: u32) -> Result<Self> {
        Self::load(
            BPF_PROG_TYPE_SCHED_CLS,
            &[
                Instruction::set(1, ifindex),
                Instruction::set(2, 0),
                Instruction::call(BPF_FUNC_REDIRECT_PEER),
                Instruction::EXIT,
            ],
        )
    }

    /// Drops every frame: a pod that processes frames in XDP.
    pub(crate) fn xdp_drop() -> Result<Self> {
        Self::load(BPF_PROG_TYPE_XDP, &[Instruction::set(0, XDP_DROP), Instruction::EXIT])
    }

    /// Sends every frame out of the interface, with these MAC addresses: a pod that generates frames in XDP. The
    /// addresses are written into each frame, because memory of arrived frames, with rewritten addresses, is reused.
    pub(crate) fn xdp_redirect(ifindex: u32, addresses: [[u8; 4]; 3]) -> Result<Self> {
        const WORD_FROM: u8 = 0x61;
        const MOVE: u8 = 0xbf;
        const ADD: u8 = 0x07;
        const JUMP_IF_GREATER: u8 = 0x2d;
        const PUT_WORD: u8 = 0x62;
        let [first, second, third] = addresses;
        let put = |offset, word| Instruction::new(PUT_WORD, 2, u32::from_ne_bytes(word)).at(offset);
        Self::load(
            BPF_PROG_TYPE_XDP,
            &[
                // From `data` to `data_end`: at least the addresses.
                Instruction::new(WORD_FROM, 0x12, 0),
                Instruction::new(WORD_FROM, 0x13, 0).at(4),
                Instruction::new(MOVE, 0x24, 0),
                Instruction::new(ADD, 0x04, 12),
                Instruction::new(JUMP_IF_GREATER, 0x34, 0).at(7),
                put(0, first),
                put(4, second),
                put(8, third),
                Instruction::set(1, ifindex),
                Instruction::set(2, 0),
                Instruction::call(BPF_FUNC_REDIRECT),
                Instruction::EXIT,
                Instruction::set(0, XDP_DROP),
                Instruction::EXIT,
            ],
        )
    }

    fn load(program_type: u32, instructions: &[Instruction]) -> Result<Self> {
        let license = c"GPL";
        let mut attributes = LoadAttributes {
            program_type,
            instructions: u32::try_from(instructions.len())?,
            first_instruction: instructions.as_ptr() as u64,
            license: license.as_ptr() as u64,
        };
        let fd = bpf(BPF_PROG_LOAD, &mut attributes).context("load a bare program")?;
        Ok(Self(descriptor(fd)?))
    }

    /// Attaches by TCX at the ingress of an interface of the calling thread's network namespace.
    pub(crate) fn attach_ingress(&self, ifindex: u32) -> Result<Attached> {
        self.attach(ifindex, BPF_TCX_INGRESS, 0)
    }

    /// Attaches as native XDP to an interface of the calling thread's network namespace.
    pub(crate) fn attach_xdp(&self, ifindex: u32) -> Result<Attached> {
        self.attach(ifindex, BPF_XDP, IN_THE_DRIVER)
    }

    fn attach(&self, ifindex: u32, attach_type: u32, flags: u32) -> Result<Attached> {
        let mut attributes = LinkAttributes {
            program: raw(&self.0)?,
            ifindex,
            attach_type,
            flags,
        };
        let fd = bpf(BPF_LINK_CREATE, &mut attributes).context("attach a bare program")?;
        Ok(Attached(descriptor(fd)?))
    }

    /// The program with this id of the kernel.
    pub(crate) fn of(id: u32) -> Result<Self> {
        let info = loaded(id)?;
        Ok(Self(info.fd()?.as_fd().try_clone_to_owned()?))
    }

    /// Times it ran, and nanoseconds of all runs together, while the kernel counted them.
    pub(crate) fn statistics(&self) -> Result<(u64, u64)> {
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()))?;
        let field = |name: &str| -> Result<u64> {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            Ok(value.context("the statistics of a program")?.trim().parse()?)
        };
        Ok((field("run_cnt")?, field("run_time_ns")?))
    }

    /// Runs it `repeat` times on a packet; returns the mean duration in whole nanoseconds.
    pub(crate) fn test_run(&self, packet: &[u8], context: &[u8], repeat: u32) -> Result<Duration> {
        Ok(self.run(packet, context, repeat)?.1)
    }

    /// [`Self::test_run`], also with the return value of the last run.
    pub(crate) fn run(&self, packet: &[u8], context: &[u8], repeat: u32) -> Result<(u32, Duration)> {
        let mut attributes = RunAttributes {
            program: raw(&self.0)?,
            data_in_size: u32::try_from(packet.len())?,
            data_in: packet.as_ptr() as u64,
            context_in_size: u32::try_from(context.len())?,
            context_in: context.as_ptr() as u64,
            repeat,
            ..RunAttributes::default()
        };
        bpf(BPF_PROG_TEST_RUN, &mut attributes).context("run a program")?;
        Ok((
            attributes.return_value,
            Duration::from_nanos(attributes.duration.into()),
        ))
    }

    /// Transmits `count` copies of a frame as the program decides.
    pub(crate) fn run_live(&self, frame: &[u8], count: u32) -> Result<()> {
        let mut attributes = RunAttributes {
            program: raw(&self.0)?,
            data_in_size: u32::try_from(frame.len())?,
            data_in: frame.as_ptr() as u64,
            repeat: count,
            flags: BPF_F_TEST_XDP_LIVE_FRAMES,
            ..RunAttributes::default()
        };
        bpf(BPF_PROG_TEST_RUN, &mut attributes).context("send frames")?;
        Ok(())
    }
}
