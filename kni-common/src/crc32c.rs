//! Computes CRC-32C, the checksum of SCTP (RFC 9260 appendix A), and its change when the start of a packet changes.
//!
//! A CRC is linear: its change depends on the changed bytes and on the number of bytes that follow, not on their
//! content. "`n` bytes follow" is a multiplication by x^(8n) modulo the polynomial.

/// The polynomial 0x1EDC6F41, its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// x^8.
const BYTE: u32 = 1 << 23;

/// x^0.
const ONE: u32 = 1 << 31;

/// Longest packet: 16 bits of length.
const LENGTH_BITS: u32 = 16;

/// CRC-32C of `bytes`, bit by bit as the RFC describes it: for whole packets in user space.
#[must_use]
pub const fn checksum(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    let mut rest = bytes;
    while let [byte, tail @ ..] = rest {
        crc ^= *byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL & 0_u32.wrapping_sub(crc & 1));
            bit += 1;
        }
        rest = tail;
    }
    !crc
}

/// The product of two polynomials, without branches: each branch doubles the paths that the verifier walks.
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

/// The value to XOR into the checksum field when the first four bytes of a packet of `length` bytes change by
/// `difference` (XOR of old and new). Both are words as a little-endian machine reads them from the packet.
#[must_use]
#[inline(always)]
pub const fn delta(difference: u32, length: u32) -> u32 {
    let mut power = BYTE;
    let mut shift = ONE;
    let mut bit = 0;
    while bit < LENGTH_BITS {
        let mask = 0_u32.wrapping_sub((length >> bit) & 1);
        shift = (product(shift, power) & mask) | (shift & !mask);
        power = product(power, power);
        bit += 1;
    }
    product(difference, shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720 B.4, and the check value of CRC-32C.
    #[test]
    fn published_values() {
        let incrementing: Vec<u8> = (0..32).collect();
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
        assert_eq!(checksum(&[0; 32]), 0x8a91_36aa);
        assert_eq!(checksum(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(checksum(&incrementing), 0x46dd_794e);
    }

    #[test]
    fn a_changed_beginning_changes_the_checksum_as_predicted() {
        for length in [12_usize, 13, 16, 28, 100, 1480, 65_515] {
            let old: Vec<u8> = (0..length).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
            for difference in [1_u32, 0x8000_0000, 0x1234_5678, u32::MAX, 0x0050_0000] {
                let mut new = old.clone();
                for (byte, change) in new.iter_mut().zip(difference.to_le_bytes()) {
                    *byte ^= change;
                }
                let predicted = delta(difference, u32::try_from(length).unwrap());
                assert_eq!(checksum(&old) ^ predicted, checksum(&new), "length {length}");
            }
        }
    }
}
