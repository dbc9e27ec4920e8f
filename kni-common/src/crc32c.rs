//! SCTP's checksum (CRC32c, RFC 9260 appendix A) after a change at the packet's beginning, without reading the rest.
//!
//! A CRC is linear: what changes in it depends on what changed and on how many bytes follow, not on these bytes. "`n` bytes
//! follow" is a multiplication by x^(8n) modulo the polynomial.

/// The polynomial 0x1EDC6F41, its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// x^8.
const BYTE: u32 = 1 << 23;

/// x^0.
const ONE: u32 = 1 << 31;

/// Longest packet: 16 bits of length.
const LENGTH_BITS: u32 = 16;

/// The product of two polynomials, without branches: each doubles the paths that a verifier walks.
#[inline(always)]
const fn product(a: u32, mut b: u32) -> u32 {
    let mut result = 0;
    let mut bit = 0;
    while bit < 32 {
        result ^= b & 0_u32.wrapping_sub((a >> (31 - bit)) & 1);
        b = (b >> 1) ^ (POLYNOMIAL & 0_u32.wrapping_sub(b & 1));
        bit += 1;
    }
    result
}

/// What is to be added (XOR) to the checksum field, read as it lies in the packet by a little-endian machine, when the
/// first four bytes of a packet of `length` bytes change by `difference` (XOR of old and new, read likewise).
#[must_use]
#[inline(always)]
pub const fn change(difference: u32, length: u32) -> u32 {
    let mut power = BYTE;
    let mut shift = ONE;
    let mut bit = 0;
    while bit < LENGTH_BITS {
        let wanted = 0_u32.wrapping_sub((length >> bit) & 1);
        shift = (product(shift, power) & wanted) | (shift & !wanted);
        power = product(power, power);
        bit += 1;
    }
    product(difference, shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit, as the RFC describes it.
    fn checksum(packet: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for byte in packet {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 };
            }
        }
        !crc
    }

    #[test]
    fn the_reference_knows_the_check_value() {
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_changed_beginning_changes_the_checksum_as_told() {
        for length in [12_usize, 13, 16, 28, 100, 1480, 65_515] {
            let old: Vec<u8> = (0..length).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
            for difference in [1_u32, 0x8000_0000, 0x1234_5678, u32::MAX, 0x0050_0000] {
                let mut new = old.clone();
                for (byte, change) in new.iter_mut().zip(difference.to_le_bytes()) {
                    *byte ^= change;
                }
                let told = change(difference, u32::try_from(length).unwrap());
                assert_eq!(checksum(&old) ^ told, checksum(&new), "length {length}");
            }
        }
    }
}
