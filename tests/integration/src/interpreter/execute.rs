//! Executes the instructions of one program for one packet.

#![expect(
    clippy::cast_possible_truncation,
    reason = "registers hold narrower numbers, as the instruction set defines"
)]

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    Instruction,
    alu::{self, operation},
    counts::Counts,
    memory::{DEPTH, Memory},
};

/// More instructions than any packet may cost: a loop without end.
const LIMIT: u64 = 1_000_000;

/// The lower three bits of an instruction: its class.
const LD: u8 = 0;
const LDX: u8 = 1;
const ST: u8 = 2;
const STX: u8 = 3;
const ALU: u8 = 4;
const JMP: u8 = 5;
const JMP32: u8 = 6;

/// Bit of ALU and JMP instructions: the second operand is a register.
const REGISTER: u8 = 0x08;
/// Mode of loads and stores, its upper three bits.
const MODE: u8 = 0xe0;
const MEM: u8 = 0x60;
const MEMSX: u8 = 0x80;
const ATOMIC: u8 = 0xc0;
/// A whole 64-bit constant, of two slots.
const LD_IMM64: u8 = 0x18;
const JA: u8 = 0x00;
const CALL: u8 = 0x80;
const EXIT: u8 = 0x90;

/// Kinds of constants (`BPF_PSEUDO_*`), in the source register.
const PSEUDO_MAP_FD: usize = 1;
const PSEUDO_MAP_VALUE: usize = 2;
/// The call is one of the object's own functions.
const PSEUDO_CALL: usize = 1;

/// The state to which a function returns.
#[derive(Debug)]
struct Caller {
    next: usize,
    saved: [u64; 4],
}

/// The execution of a program.
#[derive(Debug)]
pub(super) struct Execution<'a> {
    instructions: &'a [Instruction],
    pub(super) memory: Memory<'a>,
    pub(super) registers: [u64; 11],
    next: usize,
    callers: Vec<Caller>,
    pub(super) counts: Counts,
    pub(super) jiffies: u64,
    pub(super) nanoseconds: u64,
    pub(super) random: &'a mut fastrand::Rng,
    /// As in [`super::Arrival`].
    pub(super) tunnel: Option<(u32, Ipv4Addr)>,
}

impl<'a> Execution<'a> {
    pub(super) fn new(
        instructions: &'a [Instruction],
        memory: Memory<'a>,
        jiffies: u64,
        nanoseconds: u64,
        random: &'a mut fastrand::Rng,
    ) -> Self {
        let mut registers = [0; 11];
        registers[1] = Memory::context_pointer();
        registers[10] = Memory::frame_pointer(0);
        Self {
            instructions,
            memory,
            registers,
            next: 0,
            callers: Vec::new(),
            counts: Counts::default(),
            jiffies,
            nanoseconds,
            random,
            tunnel: None,
        }
    }

    /// Executes to the end; the return value.
    pub(super) fn run(&mut self) -> Result<u32> {
        while !self.step()? {
            ensure!(self.counts.instructions < LIMIT, "no end");
        }
        Ok(self.registers[0] as u32)
    }

    /// Where an error occurred.
    pub(super) fn place(&self, program: &str) -> String {
        let at = self.next.saturating_sub(1);
        format!("{program}, instruction {at}: {:?}", self.instructions.get(at))
    }

    /// The resulting frame and the counts.
    pub(super) fn finish(self) -> (Vec<u8>, Counts) {
        (self.memory.packet, self.counts)
    }

    /// Executes one instruction; true at the program's end.
    fn step(&mut self) -> Result<bool> {
        let instruction = *self.instructions.get(self.next).context("behind the program's end")?;
        self.next += 1;
        self.counts.instructions += 1;
        match instruction.code & 7 {
            LD => self.constant(instruction)?,
            LDX => self.load(instruction)?,
            ST | STX if instruction.code & MODE == ATOMIC => self.atomic(instruction)?,
            ST => self.store(instruction, i64::from(instruction.immediate).cast_unsigned())?,
            STX => self.store(instruction, self.registers[instruction.source])?,
            JMP | JMP32 => return self.jump(instruction),
            _ => self.compute(instruction)?,
        }
        Ok(false)
    }

    fn address(&self, register: usize, offset: i16) -> u64 {
        self.registers[register].wrapping_add_signed(offset.into())
    }

    fn constant(&mut self, first: Instruction) -> Result<()> {
        ensure!(first.code == LD_IMM64, "load {:#x}", first.code);
        let second = self.instructions.get(self.next).context("half a constant")?;
        self.next += 1;
        let (low, high) = (first.immediate.cast_unsigned(), second.immediate.cast_unsigned());
        self.registers[first.destination] = match first.source {
            0 => u64::from(high) << 32 | u64::from(low),
            PSEUDO_MAP_FD => Memory::map_pointer(low.into()),
            PSEUDO_MAP_VALUE => Memory::value_pointer(low as usize, high as usize),
            kind => bail!("a constant of kind {kind}"),
        };
        Ok(())
    }

    fn load(&mut self, instruction: Instruction) -> Result<()> {
        let size = size(instruction.code);
        let address = self.address(instruction.source, instruction.offset);
        let (value, kind) = self.memory.load(address, size)?;
        *self.counts.loads.entry(kind).or_default() += 1;
        self.registers[instruction.destination] = match (instruction.code & MODE, size) {
            (MEM, _) => value,
            (MEMSX, 1) => alu::wide(operation::MOV, 0, value, 8)?,
            (MEMSX, 2) => alu::wide(operation::MOV, 0, value, 16)?,
            (MEMSX, 4) => alu::wide(operation::MOV, 0, value, 32)?,
            (mode, _) => bail!("a load of mode {mode:#x}"),
        };
        Ok(())
    }

    fn store(&mut self, instruction: Instruction, value: u64) -> Result<()> {
        ensure!(
            instruction.code & MODE == MEM,
            "a store of mode {:#x}",
            instruction.code & MODE
        );
        let address = self.address(instruction.destination, instruction.offset);
        let kind = self.memory.store(address, size(instruction.code), value)?;
        *self.counts.stores.entry(kind).or_default() += 1;
        Ok(())
    }

    /// Read-modify-write operations, and loads and stores with an order.
    fn atomic(&mut self, instruction: Instruction) -> Result<()> {
        const FETCH: i32 = 1;
        const XCHG: i32 = 0xe1;
        const CMPXCHG: i32 = 0xf1;
        const LOAD_ACQUIRE: i32 = 0x100;
        const STORE_RELEASE: i32 = 0x110;
        let size = size(instruction.code);
        let Instruction {
            destination,
            source,
            offset,
            ..
        } = instruction;
        self.counts.atomics += 1;
        if instruction.immediate == LOAD_ACQUIRE {
            let (value, kind) = self.memory.load(self.address(source, offset), size)?;
            *self.counts.loads.entry(kind).or_default() += 1;
            self.registers[destination] = value;
            return Ok(());
        }
        let address = self.address(destination, offset);
        let operand = self.registers[source];
        let (before, kind) = self.memory.load(address, size)?;
        let limited = |value: u64| if size == 4 { u64::from(value as u32) } else { value };
        let after = match instruction.immediate {
            STORE_RELEASE | XCHG => operand,
            CMPXCHG if before == limited(self.registers[0]) => operand,
            CMPXCHG => before,
            code => match (code & !FETCH).to_le_bytes()[0] {
                code @ (operation::ADD | operation::OR | operation::AND | operation::XOR) => {
                    alu::wide(code, before, operand, 0)?
                }
                _ => bail!("atomic operation {code:#x}"),
            },
        };
        self.memory.store(address, size, after)?;
        *self.counts.stores.entry(kind).or_default() += 1;
        match instruction.immediate {
            STORE_RELEASE => return Ok(()),
            CMPXCHG => self.registers[0] = before,
            code if code & FETCH != 0 => self.registers[source] = before,
            _ => {}
        }
        *self.counts.loads.entry(kind).or_default() += 1;
        Ok(())
    }

    fn compute(&mut self, instruction: Instruction) -> Result<()> {
        let Instruction {
            code,
            destination,
            source,
            offset,
            immediate,
        } = instruction;
        let a = self.registers[destination];
        let wide = code & 7 != ALU;
        if code & 0xf0 == operation::END {
            // Of the class ALU64 it always swaps; of the class ALU the bit names the order, and ours is little-endian.
            let swaps = wide || code & REGISTER != 0;
            self.registers[destination] = if swaps {
                alu::reversed(a, immediate)?
            } else {
                alu::low(a, immediate)?
            };
            return Ok(());
        }
        let b = if code & REGISTER == 0 {
            i64::from(immediate).cast_unsigned()
        } else {
            self.registers[source]
        };
        self.registers[destination] = if wide {
            alu::wide(code, a, b, offset)?
        } else {
            alu::narrow(code, a as u32, b as u32, offset)?.into()
        };
        Ok(())
    }

    fn jump(&mut self, instruction: Instruction) -> Result<bool> {
        let Instruction {
            code,
            destination,
            source,
            offset,
            immediate,
        } = instruction;
        let narrow = code & 7 == JMP32;
        match code & 0xf0 {
            JA if narrow => self.go(immediate)?,
            JA => self.go(offset.into())?,
            CALL if source == PSEUDO_CALL => self.enter(immediate)?,
            CALL => {
                ensure!(source == 0, "a call of kind {source}");
                self.call_kernel(immediate)?;
            }
            EXIT => return Ok(self.leave()),
            _ => {
                self.counts.branches += 1;
                let a = self.registers[destination];
                let b = if code & REGISTER == 0 {
                    i64::from(immediate).cast_unsigned()
                } else {
                    self.registers[source]
                };
                let taken = if narrow {
                    let signed = (i64::from(a as i32), i64::from(b as i32));
                    alu::holds(code, (u64::from(a as u32), u64::from(b as u32)), signed)?
                } else {
                    alu::holds(code, (a, b), (a.cast_signed(), b.cast_signed()))?
                };
                if taken {
                    self.go(offset.into())?;
                }
            }
        }
        Ok(false)
    }

    fn go(&mut self, distance: i32) -> Result<()> {
        let target = self.next.checked_add_signed(distance as isize);
        self.next = target.context("a jump to before the program")?;
        Ok(())
    }

    /// Calls a function of the object.
    fn enter(&mut self, distance: i32) -> Result<()> {
        let saved = [6, 7, 8, 9].map(|register| self.registers[register]);
        self.callers.push(Caller { next: self.next, saved });
        ensure!(self.callers.len() < DEPTH, "more than {DEPTH} functions");
        self.counts.calls += 1;
        self.registers[10] = Memory::frame_pointer(self.callers.len());
        self.go(distance)
    }

    /// Returns from a function; true from the program itself.
    fn leave(&mut self) -> bool {
        let Some(caller) = self.callers.pop() else {
            return true;
        };
        self.next = caller.next;
        self.registers[6..10].copy_from_slice(&caller.saved);
        self.registers[10] = Memory::frame_pointer(self.callers.len());
        false
    }
}

/// The bytes that a load or store accesses.
fn size(code: u8) -> usize {
    match code & 0x18 {
        0x00 => 4,
        0x08 => 2,
        0x10 => 1,
        _ => 8,
    }
}
