//! Computes the Internet checksum and the `CRC32c` of SCTP.

use std::net::IpAddr;

/// RFC 1071 over the concatenated parts. Every part except the last has an even length.
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

/// RFC 9260 appendix A, bit by bit; SCTP stores it in little-endian order.
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

/// The pseudo-header of a transport checksum; `length` covers the transport header and its payload.
pub fn pseudo_header(ends: (IpAddr, IpAddr), protocol: u8, length: usize) -> Vec<u8> {
    let length = u32::try_from(length).expect("a packet fits 4 GiB").to_be_bytes();
    match ends {
        (IpAddr::V4(source), IpAddr::V4(destination)) => [
            &source.octets()[..],
            &destination.octets(),
            &[0, protocol],
            &length[2..],
        ]
        .concat(),
        (IpAddr::V6(source), IpAddr::V6(destination)) => [
            &source.octets()[..],
            &destination.octets(),
            &length,
            &[0, 0, 0, protocol],
        ]
        .concat(),
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => {
            panic!("{} and {} are of different families", ends.0, ends.1)
        }
    }
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
