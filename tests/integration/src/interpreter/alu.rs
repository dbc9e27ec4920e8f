//! Computes the arithmetic and the comparisons of both widths.

#![expect(
    clippy::cast_possible_truncation,
    reason = "registers hold narrower numbers, as the instruction set defines"
)]

use anyhow::{Result, bail};

/// The upper four bits of an arithmetic instruction.
pub(super) mod operation {
    pub(in super::super) const ADD: u8 = 0x00;
    pub(in super::super) const SUB: u8 = 0x10;
    pub(in super::super) const MUL: u8 = 0x20;
    pub(in super::super) const DIV: u8 = 0x30;
    pub(in super::super) const OR: u8 = 0x40;
    pub(in super::super) const AND: u8 = 0x50;
    pub(in super::super) const LSH: u8 = 0x60;
    pub(in super::super) const RSH: u8 = 0x70;
    pub(in super::super) const NEG: u8 = 0x80;
    pub(in super::super) const MOD: u8 = 0x90;
    pub(in super::super) const XOR: u8 = 0xa0;
    pub(in super::super) const MOV: u8 = 0xb0;
    pub(in super::super) const ARSH: u8 = 0xc0;
    pub(in super::super) const END: u8 = 0xd0;
}

/// The result of an operation on 64 bits. `offset` is the instruction's: it makes division signed, and a move extend
/// the sign of this many bits.
pub(super) fn wide(code: u8, a: u64, b: u64, offset: i16) -> Result<u64> {
    use operation::{ADD, AND, ARSH, DIV, LSH, MOD, MOV, MUL, NEG, OR, RSH, SUB, XOR};
    Ok(match (code & 0xf0, offset) {
        (ADD, 0) => a.wrapping_add(b),
        (SUB, 0) => a.wrapping_sub(b),
        (MUL, 0) => a.wrapping_mul(b),
        // Division by zero results in 0, its remainder in the dividend.
        (DIV, 0) => a.checked_div(b).unwrap_or(0),
        (DIV, 1) if b == 0 => 0,
        (DIV, 1) => a.cast_signed().wrapping_div(b.cast_signed()).cast_unsigned(),
        (MOD, 0) => a.checked_rem(b).unwrap_or(a),
        (MOD, 1) if b == 0 => a,
        (MOD, 1) => a.cast_signed().wrapping_rem(b.cast_signed()).cast_unsigned(),
        (OR, 0) => a | b,
        (AND, 0) => a & b,
        (XOR, 0) => a ^ b,
        (LSH, 0) => a.wrapping_shl(b as u32),
        (RSH, 0) => a.wrapping_shr(b as u32),
        (ARSH, 0) => a.cast_signed().wrapping_shr(b as u32).cast_unsigned(),
        (NEG, 0) => a.wrapping_neg(),
        (MOV, 0) => b,
        (MOV, 8) => i64::from(b as i8).cast_unsigned(),
        (MOV, 16) => i64::from(b as i16).cast_unsigned(),
        (MOV, 32) => i64::from(b as i32).cast_unsigned(),
        _ => bail!("arithmetic {code:#x} with offset {offset}"),
    })
}

/// The result of an operation on 32 bits.
pub(super) fn narrow(code: u8, a: u32, b: u32, offset: i16) -> Result<u32> {
    use operation::{ARSH, DIV, LSH, MOD, MOV, RSH};
    let (signed_a, signed_b) = (a.cast_signed(), b.cast_signed());
    Ok(match (code & 0xf0, offset) {
        (DIV, 1) if b == 0 => 0,
        (DIV, 1) => signed_a.wrapping_div(signed_b).cast_unsigned(),
        (MOD, 1) if b == 0 => a,
        (MOD, 1) => signed_a.wrapping_rem(signed_b).cast_unsigned(),
        (LSH, 0) => a.wrapping_shl(b),
        (RSH, 0) => a.wrapping_shr(b),
        (ARSH, 0) => signed_a.wrapping_shr(b).cast_unsigned(),
        (MOV, 32) => bail!("a move of 32 bits to 32 bits with sign"),
        // The low half of the others depends on the low halves only.
        (_, _) => wide(code, a.into(), b.into(), offset)? as u32,
    })
}

/// Bytes of the low `bits` reversed, the rest cleared.
pub(super) fn reversed(value: u64, bits: i32) -> Result<u64> {
    Ok(match bits {
        16 => (value as u16).swap_bytes().into(),
        32 => (value as u32).swap_bytes().into(),
        64 => value.swap_bytes(),
        _ => bail!("a byte swap of {bits} bits"),
    })
}

/// The low `bits`.
pub(super) fn low(value: u64, bits: i32) -> Result<u64> {
    Ok(match bits {
        16 => u64::from(value as u16),
        32 => u64::from(value as u32),
        64 => value,
        _ => bail!("a byte order of {bits} bits"),
    })
}

/// Whether a conditional jump is taken. Operands of 32 bits are extended by their sign to `signed`.
pub(super) fn holds(code: u8, (a, b): (u64, u64), signed: (i64, i64)) -> Result<bool> {
    Ok(match code & 0xf0 {
        0x10 => a == b,
        0x20 => a > b,
        0x30 => a >= b,
        0x40 => a & b != 0,
        0x50 => a != b,
        0x60 => signed.0 > signed.1,
        0x70 => signed.0 >= signed.1,
        0xa0 => a < b,
        0xb0 => a <= b,
        0xc0 => signed.0 < signed.1,
        0xd0 => signed.0 <= signed.1,
        _ => bail!("jump {code:#x}"),
    })
}

#[cfg(test)]
mod tests {
    use super::{operation::*, *};

    const MINUS: u64 = u64::MAX;

    #[test]
    fn arithmetic_follows_the_instruction_set() {
        for (code, a, b, offset, expected) in [
            (ADD, MINUS, 2, 0, 1),
            (SUB, 1, 2, 0, MINUS),
            (DIV, 7, 0, 0, 0),
            (MOD, 7, 0, 0, 7),
            (DIV, MINUS - 6, 2, 1, MINUS - 2),
            (MOD, MINUS - 6, 2, 1, MINUS),
            (DIV, 1 << 63, MINUS, 1, 1 << 63),
            (LSH, 1, 65, 0, 2),
            (ARSH, 1 << 63, 63, 0, MINUS),
            (RSH, 1 << 63, 63, 0, 1),
            (MOV, 5, 0x80, 8, MINUS - 0x7f),
            (NEG, 1, 0, 0, MINUS),
        ] {
            assert_eq!(
                wide(code, a, b, offset).unwrap(),
                expected,
                "{code:#x} {a} {b} {offset}"
            );
        }
        for (code, a, b, offset, expected) in [
            (ADD, u32::MAX, 2, 0, 1),
            (LSH, 1, 33, 0, 2),
            (RSH, 1 << 31, 31, 0, 1),
            (ARSH, 1 << 31, 31, 0, u32::MAX),
            (DIV, u32::MAX - 6, 2, 1, u32::MAX - 2),
            (MOD, 7, 0, 0, 7),
            (MOV, 5, 0x8000, 16, 0xffff_8000),
            (SUB, 0, 1, 0, u32::MAX),
        ] {
            assert_eq!(
                narrow(code, a, b, offset).unwrap(),
                expected,
                "{code:#x} {a} {b} {offset}"
            );
        }
        assert_eq!(reversed(0x1122_3344, 16).unwrap(), 0x4433);
        assert_eq!(low(0x1122_3344, 16).unwrap(), 0x3344);
    }

    #[test]
    fn comparisons_know_the_sign() {
        let holds = |code, a: u64, b: u64| holds(code, (a, b), (a.cast_signed(), b.cast_signed())).unwrap();
        assert!(holds(0x20, MINUS, 1) && !holds(0x60, MINUS, 1));
        assert!(holds(0xc0, MINUS, 1) && !holds(0xa0, MINUS, 1));
        assert!(holds(0x40, 6, 2) && !holds(0x40, 4, 2));
    }
}
