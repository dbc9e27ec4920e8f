//! Loads TCX programs of another owner, which count packets or verify the sums of a device, and pass packets on.
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

/// An attached program that counts packets; detached on drop.
#[derive(Debug)]
pub struct ForeignProgram(Attached);

/// An attached program that compares the sum of a device over a whole packet (`CHECKSUM_COMPLETE`) with the packet;
/// detached on drop.
///
/// If the two differ, the kernel computes the checksum itself: it accepts the packet, and logs a checksum failure only
/// once per boot.
#[derive(Debug)]
pub struct DeviceSums(Attached);

/// A program at a hook, with its array of counters.
#[derive(Debug)]
struct Attached {
    counters: OwnedFd,
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

/// The offset of the key on the stack of a program.
const KEY: i16 = -4;

/// Increments the only counter.
fn counting(map: i32) -> Vec<[u8; 8]> {
    [&[instruction(0x62, 0x0a, KEY, 0)][..], &increment(map)].concat()
}

/// `if (count = lookup(map, key)) *count += 1; return TCX_NEXT;`
fn increment(map: i32) -> [[u8; 8]; 10] {
    const NEXT: i32 = -1;
    const LOOKUP: i32 = 1;
    [
        instruction(0x18, 0x11, 0, map),
        instruction(0x00, 0x00, 0, 0),
        instruction(0xbf, 0xa2, 0, 0),
        instruction(0x07, 0x02, 0, i32::from(KEY)),
        instruction(0x85, 0x00, 0, LOOKUP),
        instruction(0x15, 0x00, 2, 0),
        instruction(0xb7, 0x01, 0, 1),
        instruction(0xdb, 0x10, 0, 0),
        instruction(0xb7, 0x00, 0, NEXT),
        instruction(0x95, 0x00, 0, 0),
    ]
}

/// Bytes of the stack for the packets that [`DeviceSums`] compares, without their Ethernet headers: whole words of 8.
const COMPARED: i16 = 448;

/// Bytes of an Ethernet header.
const ETHERNET: i32 = 14;
/// As the offset of a jump: to the last two instructions.
const END: i16 = i16::MAX;

/// Increments counter 0 if `skb->csum` equals the sum of the packet, else counter 1. Skips packets without
/// `CHECKSUM_COMPLETE`, and those longer than [`COMPARED`].
fn comparison(map: i32) -> Vec<[u8; 8]> {
    let mut code = [load_packet(), add_sums(), count(map)].concat();
    let end = code.len() - 2;
    for (at, instruction) in code.iter_mut().enumerate() {
        if instruction[2..4] == END.to_ne_bytes() {
            let distance = i16::try_from(end - at - 1).unwrap_or(END);
            instruction[2..4].copy_from_slice(&distance.to_ne_bytes());
        }
    }
    code
}

/// The sum of the device in `r7`, the packet on the stack, its length in `r8`.
fn load_packet() -> Vec<[u8; 8]> {
    const CSUM_UPDATE: i32 = 40;
    const LOAD_BYTES: i32 = 26;
    let mut code = vec![
        instruction(0xbf, 0x16, 0, 0), // r6 = skb
        instruction(0xb7, 0x02, 0, 0),
        instruction(0x85, 0x00, 0, CSUM_UPDATE), // r0 = skb->csum, or -ENOTSUPP
        instruction(0xc5, 0x00, END, 0),
        instruction(0xbf, 0x07, 0, 0), // r7 = skb->csum
        instruction(0x61, 0x68, 0, 0), // r8 = skb->len
        instruction(0x07, 0x08, 0, -ETHERNET),
        instruction(0xb5, 0x08, END, 0),
        // VERIFIER: three bytes less, as the length is rounded up below.
        instruction(0x25, 0x08, END, i32::from(COMPARED) - 4),
    ];
    // The sum is over whole words: zeros behind the packet do not change it.
    code.extend((1..=COMPARED / 8).map(|word| instruction(0x7a, 0x0a, -8 * word, 0)));
    code.extend([
        instruction(0xbf, 0x61, 0, 0), // load(skb, 14, stack, r8)
        instruction(0xb7, 0x02, 0, ETHERNET),
        instruction(0xbf, 0xa3, 0, 0),
        instruction(0x07, 0x03, 0, -i32::from(COMPARED)),
        instruction(0xbf, 0x84, 0, 0),
        instruction(0x85, 0x00, 0, LOAD_BYTES),
        instruction(0x55, 0x00, END, 0),
    ]);
    code
}

/// The sum of the packet and the inverted one of the device in `r0`, folded to 16 bits.
fn add_sums() -> Vec<[u8; 8]> {
    const CSUM_DIFF: i32 = 28;
    let mut code = vec![
        instruction(0x07, 0x08, 0, 3), // whole words
        instruction(0x57, 0x08, 0, 0x1fc),
        instruction(0xa7, 0x07, 0, -1),
        instruction(0x67, 0x07, 0, 32),
        instruction(0x77, 0x07, 0, 32),
        instruction(0xb7, 0x01, 0, 0),
        instruction(0xb7, 0x02, 0, 0),
        instruction(0xbf, 0xa3, 0, 0),
        instruction(0x07, 0x03, 0, -i32::from(COMPARED)),
        instruction(0xbf, 0x84, 0, 0),
        instruction(0xbf, 0x75, 0, 0),
        instruction(0x85, 0x00, 0, CSUM_DIFF),
        instruction(0x67, 0x00, 0, 32),
        instruction(0x77, 0x00, 0, 32),
    ];
    for _ in 0..2 {
        code.extend([
            instruction(0xbf, 0x01, 0, 0),
            instruction(0x57, 0x01, 0, 0xffff),
            instruction(0x77, 0x00, 0, 16),
            instruction(0x0f, 0x10, 0, 0),
        ]);
    }
    code
}

/// Increments a counter by `r0`: equal sums give 0xffff, which is 0 as well.
fn count(map: i32) -> Vec<[u8; 8]> {
    let choose = [
        instruction(0x62, 0x0a, KEY, 1),
        instruction(0x15, 0x00, 1, 0),
        instruction(0x55, 0x00, 1, 0xffff),
        instruction(0x62, 0x0a, KEY, 0),
    ];
    [&choose[..], &increment(map)].concat()
}

impl Attached {
    /// Loads a program with `counters` counters and attaches it to an interface of the calling thread's network
    /// namespace.
    fn new(
        counters: u32,
        code: impl FnOnce(i32) -> Vec<[u8; 8]>,
        ifindex: u32,
        side: Side,
        position: Position,
    ) -> Result<Self> {
        const ARRAY: u32 = 2;
        const SCHED_CLS: u32 = 3;
        let counters = open(
            BPF_MAP_CREATE,
            &MapCreate {
                kind: ARRAY,
                key_size: 4,
                value_size: 8,
                max_entries: counters,
            },
        )
        .context("the foreign program's map")?;
        let (code, license) = (code(counters.as_raw_fd()), c"GPL");
        let program = ProgLoad {
            kind: SCHED_CLS,
            instruction_count: u32::try_from(code.len())?,
            instructions: address(code.as_slice()),
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
        Ok(Self { counters, _link: link })
    }

    fn counter(&self, index: u32) -> Result<u64> {
        let mut value = 0_u64;
        let lookup = MapLookup {
            map: number(&self.counters),
            padding: 0,
            key: address(&index),
            value: std::ptr::from_mut(&mut value).addr() as u64,
            flags: 0,
        };
        bpf(BPF_MAP_LOOKUP_ELEM, &lookup)?;
        // SAFETY: a plain read of a local; volatile, because the kernel has written it without the compiler's
        // knowledge.
        Ok(unsafe { std::ptr::from_ref(&value).read_volatile() })
    }
}

impl ForeignProgram {
    /// Loads the program and attaches it to an interface of the calling thread's network namespace.
    pub fn attach(ifindex: u32, side: Side, position: Position) -> Result<Self> {
        Attached::new(1, counting, ifindex, side, position).map(Self)
    }

    /// The number of packets that it has seen.
    pub fn seen(&self) -> Result<u64> {
        self.0.counter(0)
    }
}

impl DeviceSums {
    /// Loads the program and attaches it, for received packets, to an interface of the calling thread's network
    /// namespace.
    pub fn attach(ifindex: u32) -> Result<Self> {
        Attached::new(2, comparison, ifindex, Side::Ingress, Position::First).map(Self)
    }

    /// How many packets had a right sum, and how many a wrong one.
    pub fn right_and_wrong(&self) -> Result<(u64, u64)> {
        Ok((self.0.counter(0)?, self.0.counter(1)?))
    }
}
