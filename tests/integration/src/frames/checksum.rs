//! The Internet checksum and the `CRC32c` of SCTP.

/// RFC 1071 over the parts as if they were one. Every part but the last has an even length.
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u64 = words
        .map(|w| u64::from(w[0]) << 8 | w.get(1).map_or(0, |low| u64::from(*low)))
        .sum();
    let mut folded = sum;
    while folded > 0xffff {
        folded = (folded & 0xffff) + (folded >> 16);
    }
    !u16::try_from(folded).expect("folded to 16 bits")
}

/// RFC 9260 appendix A, bit by bit; SCTP writes it in little-endian order.
pub fn crc32c(bytes: &[u8]) -> u32 {
    const REVERSED_POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (REVERSED_POLYNOMIAL & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_has_the_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn checksum_is_that_of_rfc_1071() {
        // Section 3 of the RFC sums these to ddf2.
        assert_eq!(
            checksum(&[&[0x00, 0x01, 0xf2, 0x03], &[0xf4, 0xf5, 0xf6, 0xf7]]),
            !0xddf2
        );
        assert_eq!(checksum(&[&[0xff]]), !0xff00);
    }
}
