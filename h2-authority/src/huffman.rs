//! Reads the Huffman code of HPACK (RFC 7541, Appendix B).
//!
//! The code is canonical: codes of one length are consecutive, in the order of their symbols. So the lengths alone
//! define it, and a code is found by comparing with the first one of each length.

/// A string that is not Huffman-coded as RFC 7541, section 5.2, asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bad Huffman code: it holds the end-of-string symbol, or its padding is not the start of that symbol")]
pub(crate) struct BadHuffman;

/// The octets by the length of their code in bits. The end-of-string symbol follows the last one, with 30 bits.
const LENGTHS: [(u32, &[u8]); 21] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b"!\"()?"),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\0$@[]~"),
    (14, b"^}"),
    (15, b"<`{"),
    (19, b"\\\xc3\xd0"),
    (20, b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2"),
    (21, b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6"),
    (
        22,
        b"\x81\x84\x85\x86\x88\x92\x9a\x9c\xa0\xa3\xa4\xa9\xaa\xad\xb2\xb5\xb9\xba\xbb\xbd\xbe\xc4\xc6\xe4\
          \xe8\xe9",
    ),
    (
        23,
        b"\x01\x87\x89\x8a\x8b\x8c\x8d\x8f\x93\x95\x96\x97\x98\x9b\x9d\x9e\xa5\xa6\xa8\xae\xaf\xb4\xb6\xb7\
          \xbc\xbf\xc5\xe7\xef",
    ),
    (24, b"\t\x8e\x90\x91\x94\x9f\xab\xce\xd7\xe1\xec\xed"),
    (25, b"\xc7\xcf\xea\xeb"),
    (26, b"\xc0\xc1\xc8\xc9\xca\xcd\xd2\xd5\xda\xdb\xee\xf0\xf2\xf3\xff"),
    (
        27,
        b"\xcb\xcc\xd3\xd4\xd6\xdd\xde\xdf\xf1\xf4\xf5\xf6\xf7\xf8\xfa\xfb\xfc\xfd\xfe",
    ),
    (
        28,
        b"\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x0f\x10\x11\x12\x13\x14\x15\x17\x18\x19\x1a\x1b\x1c\x1d\
          \x1e\x1f\x7f\xdc\xf9",
    ),
    (30, b"\n\r\x16"),
];

/// The codes of one length.
#[derive(Clone, Copy)]
struct Group {
    /// Bits of each code.
    length: u32,
    /// The first code, as a number of `length` bits.
    first: u64,
    /// The first number after the last code, as a number of 32 bits: the code is this long if it is below.
    end: u64,
    symbols: &'static [u8],
}

const GROUPS: [Group; 21] = groups();

#[expect(
    clippy::indexing_slicing,
    reason = "runs in the compiler, which refuses an index out of bounds"
)]
const fn groups() -> [Group; 21] {
    let mut groups = [Group {
        length: 0,
        first: 0,
        end: 0,
        symbols: &[],
    }; 21];
    let mut end: u64 = 0;
    let mut at = 0;
    while at < LENGTHS.len() {
        let (length, symbols) = LENGTHS[at];
        let first = end >> (32 - length);
        end = (first + symbols.len() as u64) << (32 - length);
        groups[at] = Group {
            length,
            first,
            end,
            symbols,
        };
        at += 1;
    }
    groups
}

/// Hands each decoded octet of `source` to `sink`: at most eight for every five octets.
///
/// On an error some octets may have been handed over.
pub(crate) fn decode(source: &[u8], mut sink: impl FnMut(u8)) -> Result<(), BadHuffman> {
    // The `bits` next bits of the source, left-aligned; zeros behind them.
    let mut window: u64 = 0;
    let mut bits: u32 = 0;
    let mut source = source.iter();
    loop {
        while bits <= 56
            && let Some(octet) = source.next()
        {
            window |= u64::from(*octet) << (56 - bits);
            bits += 8;
        }
        let next = window >> 32;
        // Nothing found is the end-of-string symbol, which must not occur.
        let group = GROUPS.iter().find(|group| next < group.end).ok_or(BadHuffman)?;
        if group.length > bits {
            return if is_padding(window, bits) {
                Ok(())
            } else {
                Err(BadHuffman)
            };
        }
        // The codes of one length are consecutive, so the difference is a position in a slice of at most 256.
        let position = usize::try_from((next >> (32 - group.length)) - group.first).unwrap_or(usize::MAX);
        sink(*group.symbols.get(position).ok_or(BadHuffman)?);
        window <<= group.length;
        bits -= group.length;
    }
}

/// Whether what is left is less than one octet of ones.
fn is_padding(window: u64, bits: u32) -> bool {
    bits < 8 && window.leading_ones() == bits
}

#[cfg(test)]
mod tests {
    use httlib_huffman::encode;
    use proptest::prelude::*;

    use super::*;

    fn decoded(source: &[u8]) -> Result<Vec<u8>, BadHuffman> {
        let mut octets = Vec::new();
        decode(source, |octet| octets.push(octet)).map(|()| octets)
    }

    #[test]
    fn examples_of_the_rfc() {
        let www = [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff];
        assert_eq!(decoded(&www).unwrap(), b"www.example.com");
        assert_eq!(decoded(&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]).unwrap(), b"no-cache");
        assert_eq!(decoded(&[0x64, 0x02]).unwrap(), b"302");
        assert_eq!(decoded(&[]).unwrap(), b"");
    }

    #[test]
    fn every_octet_has_a_code() {
        let all: Vec<u8> = (0..=u8::MAX).collect();
        assert_eq!(LENGTHS.iter().map(|(_, symbols)| symbols.len()).sum::<usize>(), 256);
        let mut coded = Vec::new();
        encode(&all, &mut coded).unwrap();
        assert_eq!(decoded(&coded).unwrap(), all);
    }

    #[test]
    fn end_of_string_symbol_is_refused() {
        assert_eq!(decoded(&[0xff, 0xff, 0xff, 0xff]), Err(BadHuffman));
        assert_eq!(decoded(&[0x1f, 0xff, 0xff, 0xff, 0xff]), Err(BadHuffman));
    }

    #[test]
    fn padding_is_short_and_all_ones() {
        // '0' is 00000, so three bits are left.
        assert_eq!(decoded(&[0b0000_0111]).unwrap(), b"0");
        for bad in [0b0000_0000, 0b0000_0110, 0b0000_0011] {
            assert_eq!(decoded(&[bad]), Err(BadHuffman), "{bad:#010b}");
        }
        assert_eq!(decoded(&[0b0000_0111, 0xff]), Err(BadHuffman), "eleven bits of padding");
        assert_eq!(decoded(&[0xff]), Err(BadHuffman), "eight bits of padding");
        // A code of 30 bits cut after 24.
        assert_eq!(decoded(&[0xff, 0xff, 0xff]), Err(BadHuffman));
    }

    proptest! {
        #[test]
        fn agrees_with_another_encoder(text in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut coded = Vec::new();
            encode(&text, &mut coded).unwrap();
            prop_assert_eq!(decoded(&coded), Ok(text));
        }

        #[test]
        fn any_octets_end_and_stay_bounded(source in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut count = 0;
            let result = decode(&source, |_| count += 1);
            prop_assert!(count <= source.len() * 8 / 5, "{result:?}");
        }
    }
}
