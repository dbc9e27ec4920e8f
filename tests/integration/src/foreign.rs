//! Loads a TCX program of another owner, which counts packets and passes them on.
//!
//! Uses direct calls of bpf(2), so that it shares no code with the agent.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result};

/// The position of a program in the chain of a hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// Before all others.
    First,
    /// After all others.
    Last,
}

/// A hook of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Received packets.
    Ingress,
    /// Sent packets.
    Egress,
}

/// An attached program; detached on drop.
#[derive(Debug)]
pub struct ForeignProgram {
    counter: OwnedFd,
    _link: OwnedFd,
}

const BPF_MAP_CREATE: i32 = 0;
const BPF_MAP_LOOKUP_ELEM: i32 = 1;
const BPF_PROG_LOAD: i32 = 5;
const BPF_LINK_CREATE: i32 = 28;

#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

#[repr(C)]
struct MapLookup {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgLoad {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    padding: u32,
    expected_revision: u64,
}

fn bpf<T>(command: i32, attributes: &T) -> io::Result<i64> {
    // SAFETY: the kernel reads the structure for its given size, and follows its pointers only to data that lives at
    // least as long as this call; the callers point to locals.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn open<T>(command: i32, attributes: &T) -> io::Result<OwnedFd> {
    let fd = i32::try_from(bpf(command, attributes)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just created the descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn address<T: ?Sized>(of: &T) -> u64 {
    std::ptr::from_ref(of).cast::<u8>().addr() as u64
}

/// One instruction: code, registers (destination in the low half), offset, immediate.
const fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> [u8; 8] {
    let (offset, immediate) = (offset.to_ne_bytes(), immediate.to_ne_bytes());
    let [first, second, third, fourth] = immediate;
    [code, registers, offset[0], offset[1], first, second, third, fourth]
}

/// `if (count = lookup(map, 0)) *count += 1; return TCX_NEXT;`
fn instructions(map: i32) -> [[u8; 8]; 11] {
    const NEXT: i32 = -1;
    [
        instruction(0x18, 0x11, 0, map),
        instruction(0x00, 0x00, 0, 0),
        instruction(0x62, 0x0a, -4, 0),
        instruction(0xbf, 0xa2, 0, 0),
        instruction(0x07, 0x02, 0, -4),
        instruction(0x85, 0x00, 0, 1),
        instruction(0x15, 0x00, 2, 0),
        instruction(0xb7, 0x01, 0, 1),
        instruction(0xdb, 0x10, 0, 0),
        instruction(0xb7, 0x00, 0, NEXT),
        instruction(0x95, 0x00, 0, 0),
    ]
}

impl ForeignProgram {
    /// Loads the program and attaches it to an interface of the calling thread's network namespace.
    pub fn attach(ifindex: u32, side: Side, position: Position) -> Result<Self> {
        const ARRAY: u32 = 2;
        const SCHED_CLS: u32 = 3;
        let counter = open(
            BPF_MAP_CREATE,
            &MapCreate {
                kind: ARRAY,
                key_size: 4,
                value_size: 8,
                max_entries: 1,
            },
        )
        .context("the foreign program's map")?;
        let (code, license) = (instructions(counter.as_raw_fd()), c"GPL");
        let program = ProgLoad {
            kind: SCHED_CLS,
            instruction_count: u32::try_from(code.len())?,
            instructions: address(&code),
            license: address(license),
            log_level: 0,
            log_size: 0,
            log: 0,
            kernel_version: 0,
            flags: 0,
            name: *b"foreign\0\0\0\0\0\0\0\0\0",
        };
        let program = open(BPF_PROG_LOAD, &program).context("the foreign program")?;
        let attach_type = match side {
            Side::Ingress => 46,
            Side::Egress => 47,
        };
        // BPF_F_BEFORE and BPF_F_AFTER without a relative program.
        let flags = match position {
            Position::First => 1 << 3,
            Position::Last => 1 << 4,
        };
        let link = LinkCreate {
            program: number(&program),
            ifindex,
            attach_type,
            flags,
            relative: 0,
            padding: 0,
            expected_revision: 0,
        };
        let link = open(BPF_LINK_CREATE, &link).context("the foreign program's link")?;
        Ok(Self { counter, _link: link })
    }

    /// The number of packets that it has seen.
    pub fn seen(&self) -> Result<u64> {
        let (key, mut value) = (0_u32, 0_u64);
        let lookup = MapLookup {
            map: number(&self.counter),
            padding: 0,
            key: address(&key),
            value: std::ptr::from_mut(&mut value).addr() as u64,
            flags: 0,
        };
        bpf(BPF_MAP_LOOKUP_ELEM, &lookup)?;
        // SAFETY: a plain read of a local; volatile, because the kernel has written it without the compiler's
        // knowledge.
        Ok(unsafe { std::ptr::from_ref(&value).read_volatile() })
    }
}
