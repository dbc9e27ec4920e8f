//! Walks the fields of one header block (RFC 7541, section 6) and replaces the illegal authorities in it.

use crate::{
    authority,
    primitive::{HpackError, Reader, put_plain_text},
    table::{Name, Table},
};

/// The forms a field can take in a block, told apart by the high bits of its first octet.
enum Representation {
    Indexed,
    LiteralIndexed,
    /// Without indexing, or never indexed.
    LiteralNotIndexed,
    SizeUpdate,
}

impl Representation {
    fn of(first: u8) -> Self {
        match first.leading_zeros() {
            0 => Self::Indexed,
            1 => Self::LiteralIndexed,
            2 => Self::SizeUpdate,
            _ => Self::LiteralNotIndexed,
        }
    }
}

/// Returns the block with each illegal `:authority` replaced, or `None` when there is none; follows the block's
/// changes to the dynamic table in either case.
///
/// Everything but the replaced values, which are written without Huffman coding, is copied byte for byte. After an
/// error the table is of no further use.
pub(crate) fn rewrite(block: &[u8], table: &mut Table) -> Result<Option<Vec<u8>>, HpackError> {
    let mut walk = Walk {
        block,
        reader: Reader::new(block),
        table,
        rewritten: Vec::new(),
        copied: 0,
    };
    let mut before_fields = true;
    while let Some(first) = walk.reader.peek() {
        match Representation::of(first) {
            Representation::Indexed => {
                let index = walk.reader.integer(7)?;
                walk.table.name(index)?;
            }
            Representation::LiteralIndexed => {
                let (name, length) = walk.literal(6)?;
                walk.table.insert(name, length);
            }
            Representation::LiteralNotIndexed => {
                walk.literal(4)?;
            }
            Representation::SizeUpdate => {
                let capacity = walk.reader.integer(5)?;
                if !before_fields {
                    return Err(HpackError::BadSizeUpdate(capacity));
                }
                walk.table.resize(capacity)?;
                continue;
            }
        }
        before_fields = false;
    }
    Ok(walk.finish())
}

struct Walk<'a> {
    block: &'a [u8],
    reader: Reader<'a>,
    table: &'a mut Table,
    /// Empty until a value is replaced.
    rewritten: Vec<u8>,
    /// How much of `block` is in `rewritten`, as it was or replaced.
    copied: usize,
}

impl Walk<'_> {
    /// Reads a literal field; returns its name and the decoded length of its value, which a replacement keeps.
    fn literal(&mut self, prefix: u32) -> Result<(Name, usize), HpackError> {
        let name = match self.reader.integer(prefix)? {
            0 => Name::read(self.reader.text()?)?,
            index => self.table.name(index)?,
        };
        let start = self.reader.position();
        let value = self.reader.text()?;
        if name != Name::Authority {
            return Ok((name, value.decoded_len()?));
        }
        let value = value.decode()?;
        if let Some(legal) = authority::replacement(&value) {
            self.replace(start, &legal);
        }
        Ok((name, value.len()))
    }

    /// Puts `value` in the place of the string that began at `start` and was just read.
    fn replace(&mut self, start: usize, value: &[u8]) {
        self.rewritten
            .extend_from_slice(self.block.get(self.copied..start).unwrap_or_default());
        put_plain_text(&mut self.rewritten, value);
        self.copied = self.reader.position();
    }

    fn finish(mut self) -> Option<Vec<u8>> {
        if self.copied == 0 {
            return None;
        }
        self.rewritten
            .extend_from_slice(self.block.get(self.copied..).unwrap_or_default());
        Some(self.rewritten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ODD: &[u8] = b"/x.sock";
    const LEGAL: &[u8] = b"-x.sock";

    /// First octet of an indexed field.
    fn indexed(index: u8) -> u8 {
        0x80 + index
    }

    /// First octet of a literal with incremental indexing whose name has this index.
    fn named(index: u8) -> u8 {
        0x40 + index
    }

    fn plain(text: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        put_plain_text(&mut out, text);
        out
    }

    fn huffman(text: &[u8]) -> Vec<u8> {
        let mut coded = Vec::new();
        httlib_huffman::encode(text, &mut coded).unwrap();
        let mut out = vec![0x80 | u8::try_from(coded.len()).unwrap()];
        out.extend_from_slice(&coded);
        out
    }

    fn table() -> Table {
        Table::new(4096)
    }

    /// Rewrites one block with a new table.
    fn rewritten(parts: &[&[u8]]) -> Result<Option<Vec<u8>>, HpackError> {
        rewrite(&parts.concat(), &mut table())
    }

    #[test]
    fn static_name_in_each_literal_form() {
        for first in [0x41, 0x01, 0x11] {
            for value in [plain(ODD), huffman(ODD)] {
                let expected = [&[first][..], &plain(LEGAL)].concat();
                assert_eq!(rewritten(&[&[first], &value]), Ok(Some(expected)), "{first:#x}");
            }
        }
    }

    #[test]
    fn literal_name_in_each_literal_form() {
        for first in [0x40, 0x00, 0x10] {
            for name in [plain(b":authority"), huffman(b":authority")] {
                for value in [plain(ODD), huffman(ODD)] {
                    let expected = [&[first][..], &name, &plain(LEGAL)].concat();
                    assert_eq!(rewritten(&[&[first], &name, &value]), Ok(Some(expected)), "{first:#x}");
                }
            }
        }
    }

    #[test]
    fn names_that_only_look_alike_are_left() {
        for name in [&b":authorit"[..], b":authority2", b":Authority", b"authority", b""] {
            assert_eq!(rewritten(&[&[0x40], &plain(name), &plain(ODD)]), Ok(None));
            assert_eq!(rewritten(&[&[0x40], &huffman(name), &huffman(ODD)]), Ok(None));
        }
        assert_eq!(rewritten(&[&[0x44], &plain(ODD)]), Ok(None), ":path");
    }

    #[test]
    fn name_by_dynamic_index() {
        let mut table = table();
        // A legal one first, so that the table holds the name; then `x: y` before it.
        let first = [&[0x41][..], &plain(b"localhost"), &[0x40], &plain(b"x"), &plain(b"y")].concat();
        assert_eq!(rewrite(&first, &mut table), Ok(None));
        let second = [&[named(63)][..], &[0], &plain(ODD)].concat();
        let expected = [&[named(63)][..], &[0], &plain(LEGAL)].concat();
        assert_eq!(rewrite(&second, &mut table), Ok(Some(expected)));
        // Index 62 is the entry just made: four bits hold 15, then 62 - 15.
        for (first, never) in [(0x0f, 47), (0x1f, 47)] {
            let block = [&[first, never][..], &huffman(ODD)].concat();
            assert_eq!(
                rewrite(&block, &mut table),
                Ok(Some([&[first, never][..], &plain(LEGAL)].concat()))
            );
        }
        // Now `x` is index 63 and its odd value is nobody's business.
        assert_eq!(
            rewrite(&[&[named(63)][..], &[0], &plain(ODD)].concat(), &mut table),
            Ok(None)
        );
    }

    #[test]
    fn indexed_repeat_is_left() {
        let mut table = table();
        assert!(
            rewrite(&[&[0x41][..], &huffman(ODD)].concat(), &mut table)
                .unwrap()
                .is_some()
        );
        assert_eq!(rewrite(&[indexed(62)], &mut table), Ok(None));
        assert_eq!(rewrite(&[indexed(63)], &mut table), Err(HpackError::BadIndex(63)));
    }

    #[test]
    fn literals_that_are_not_indexed_make_no_entry() {
        for first in [0x01, 0x11] {
            let mut table = table();
            assert!(
                rewrite(&[&[first][..], &plain(ODD)].concat(), &mut table)
                    .unwrap()
                    .is_some()
            );
            assert_eq!(rewrite(&[indexed(62)], &mut table), Err(HpackError::BadIndex(62)));
        }
    }

    #[test]
    fn neighbours_are_copied_byte_for_byte() {
        let before = [&[0x83, 0x86, 0x44][..], &huffman(b"/kni.KNI/QueryNodeNetworks")].concat();
        let after = [
            &[0x10][..],
            &huffman(b"x-token"),
            &plain(b"\x00\xff"),
            &[0x5f],
            &huffman(b"text"),
        ]
        .concat();
        let block = [
            &before,
            &[0x41][..],
            &huffman(ODD),
            &after,
            &[0x01],
            &plain(b"%"),
            &[0x82],
        ]
        .concat();
        let expected = [
            &before,
            &[0x41][..],
            &plain(LEGAL),
            &after,
            &[0x01],
            &plain(b"-"),
            &[0x82],
        ]
        .concat();
        assert_eq!(rewrite(&block, &mut table()), Ok(Some(expected)));
    }

    #[test]
    fn entry_size_is_of_the_decoded_value() {
        // 10 + 20 + 32 bytes fit in 62, not in 61. Coded, the value has 14 bytes and one of length.
        let value = huffman(b"/run/0000000000.sock");
        assert_eq!(value.len(), 15);
        for (limit, result) in [(62, Ok(None)), (61, Err(HpackError::BadIndex(62)))] {
            let mut table = Table::new(limit);
            rewrite(&[&[0x41][..], &value].concat(), &mut table).unwrap();
            assert_eq!(rewrite(&[indexed(62)], &mut table), result);
        }
    }

    #[test]
    fn eviction_moves_the_authority_out() {
        let mut table = Table::new(100);
        rewrite(&[&[0x41][..], &plain(b"a")].concat(), &mut table).unwrap();
        rewrite(
            &[&[0x40][..], &plain(b"name"), &plain(&[b'v'; 30])].concat(),
            &mut table,
        )
        .unwrap();
        // 43 + 66 bytes exceed 100: index 62 is `name`, and 63 is gone.
        assert_eq!(rewrite(&[&[named(62)][..], &plain(ODD)].concat(), &mut table), Ok(None));
        assert_eq!(
            rewrite(&[&[named(63)][..], &[0], &plain(ODD)].concat(), &mut table),
            Err(HpackError::BadIndex(63))
        );
    }

    #[test]
    fn size_updates_come_first_and_within_the_limit() {
        let mut table = table();
        rewrite(&[&[0x41][..], &plain(ODD)].concat(), &mut table).unwrap();
        // To 0, which evicts, and back to 4096: 31 + 4065.
        let block = [&[0x20, 0x3f, 0xe1, 0x1f, 0x41][..], &plain(ODD), &[indexed(62)]].concat();
        assert!(rewrite(&block, &mut table).unwrap().is_some());
        assert_eq!(rewrite(&[indexed(63)], &mut table), Err(HpackError::BadIndex(63)));
        assert_eq!(rewritten(&[&[0x3f, 0xe2, 0x1f]]), Err(HpackError::BadSizeUpdate(4097)));
        assert_eq!(rewritten(&[&[0x82, 0x20]]), Err(HpackError::BadSizeUpdate(0)));
    }

    #[test]
    fn empty_authority_is_left() {
        assert_eq!(rewritten(&[&[0x81]]), Ok(None));
        assert_eq!(rewritten(&[&[0x41, 0x00]]), Ok(None));
        assert_eq!(rewritten(&[&[0x41, 0x80]]), Ok(None));
    }

    #[test]
    fn broken_blocks_are_errors() {
        assert_eq!(rewritten(&[&[0x80]]), Err(HpackError::BadIndex(0)));
        assert_eq!(
            rewritten(&[&[0xff, 0xff, 0xff, 0xff, 0xff, 0x00]]),
            Err(HpackError::IntegerTooLong)
        );
        assert_eq!(rewritten(&[&[0x41]]), Err(HpackError::Truncated));
        assert_eq!(rewritten(&[&[0x41, 0x05, b'a']]), Err(HpackError::Truncated));
        assert!(matches!(rewritten(&[&[0x41, 0x81, 0x00]]), Err(HpackError::Huffman(_))));
        assert!(matches!(
            rewritten(&[&[0x40, 0x81, 0x00, 0x00]]),
            Err(HpackError::Huffman(_))
        ));
    }
}
