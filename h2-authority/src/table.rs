//! Mirrors the shape of HPACK's tables (RFC 7541, sections 2.3 and 4): which entry is an `:authority`, and the sizes
//! that decide what is evicted. Names and values themselves are not kept.

use std::collections::VecDeque;

use crate::primitive::{HpackError, Text};

/// What an entry is charged beyond its name and value.
const ENTRY_OVERHEAD: usize = 32;

const AUTHORITY: &str = ":authority";

/// RFC 7541, Appendix A. The first has index 1.
#[rustfmt::skip]
const STATIC_NAMES: [&str; 61] = [
    AUTHORITY, ":method", ":method", ":path", ":path", ":scheme", ":scheme",
    ":status", ":status", ":status", ":status", ":status", ":status", ":status",
    "accept-charset", "accept-encoding", "accept-language", "accept-ranges", "accept",
    "access-control-allow-origin", "age", "allow", "authorization", "cache-control",
    "content-disposition", "content-encoding", "content-language", "content-length", "content-location",
    "content-range", "content-type", "cookie", "date", "etag", "expect", "expires", "from", "host",
    "if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "last-modified",
    "link", "location", "max-forwards", "proxy-authenticate", "proxy-authorization", "range", "referer",
    "refresh", "retry-after", "server", "set-cookie", "strict-transport-security", "transfer-encoding",
    "user-agent", "vary", "via", "www-authenticate",
];

/// All that matters of a field's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    /// Exactly `:authority`.
    Authority,
    /// Any other, by its decoded length.
    Other(usize),
}

impl Name {
    /// Reads a name that stands in the block.
    pub(crate) fn read(text: Text<'_>) -> Result<Self, HpackError> {
        let mut expected = AUTHORITY.bytes();
        let mut length = 0;
        let mut equal = true;
        text.for_each(|octet| {
            equal &= expected.next() == Some(octet);
            length += 1;
        })?;
        Ok(if equal && length == AUTHORITY.len() {
            Self::Authority
        } else {
            Self::Other(length)
        })
    }

    fn of_static(name: &str) -> Self {
        if name == AUTHORITY {
            Self::Authority
        } else {
            Self::Other(name.len())
        }
    }

    fn len(self) -> usize {
        match self {
            Self::Authority => AUTHORITY.len(),
            Self::Other(length) => length,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    name: Name,
    size: usize,
}

/// The static table and the mirror of the client's dynamic table.
#[derive(Debug)]
pub(crate) struct Table {
    /// Newest first, as the indices count.
    entries: VecDeque<Entry>,
    size: usize,
    capacity: usize,
    limit: usize,
}

impl Table {
    /// `limit` is the server's `SETTINGS_HEADER_TABLE_SIZE` in bytes; also the capacity until the client lowers it.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            capacity: limit,
            limit,
        }
    }

    /// The name of the entry with this index, if there is one.
    pub(crate) fn name(&self, index: usize) -> Result<Name, HpackError> {
        let zero_based = index.checked_sub(1).ok_or(HpackError::BadIndex(index))?;
        let name = match STATIC_NAMES.get(zero_based) {
            Some(name) => Some(Name::of_static(name)),
            None => self
                .entries
                .get(zero_based - STATIC_NAMES.len())
                .map(|entry| entry.name),
        };
        name.ok_or(HpackError::BadIndex(index))
    }

    /// Adds an entry with a value of `value_length` decoded bytes. One that does not fit empties the table.
    pub(crate) fn insert(&mut self, name: Name, value_length: usize) {
        let size = name.len() + value_length + ENTRY_OVERHEAD;
        self.evict_down_to(self.capacity.saturating_sub(size));
        if size <= self.capacity {
            self.entries.push_front(Entry { name, size });
            self.size += size;
        }
    }

    /// Obeys a dynamic table size update.
    pub(crate) fn resize(&mut self, capacity: usize) -> Result<(), HpackError> {
        if capacity > self.limit {
            return Err(HpackError::BadSizeUpdate(capacity));
        }
        self.capacity = capacity;
        self.evict_down_to(capacity);
        Ok(())
    }

    fn evict_down_to(&mut self, size: usize) {
        while self.size > size
            && let Some(oldest) = self.entries.pop_back()
        {
            self.size -= oldest.size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_names_have_their_indices() {
        let table = Table::new(4096);
        assert_eq!(table.name(1), Ok(Name::Authority));
        for (index, name) in [
            (2, ":method"),
            (8, ":status"),
            (15, "accept-charset"),
            (38, "host"),
            (61, "www-authenticate"),
        ] {
            assert_eq!(STATIC_NAMES[index - 1], name);
            assert_eq!(table.name(index), Ok(Name::Other(name.len())));
        }
        assert_eq!(table.name(0), Err(HpackError::BadIndex(0)));
        assert_eq!(table.name(62), Err(HpackError::BadIndex(62)));
        assert_eq!(table.name(usize::MAX), Err(HpackError::BadIndex(usize::MAX)));
    }

    #[test]
    fn newest_entry_has_the_lowest_index() {
        let mut table = Table::new(4096);
        table.insert(Name::Authority, 1);
        table.insert(Name::Other(5), 1);
        assert_eq!(table.name(62), Ok(Name::Other(5)));
        assert_eq!(table.name(63), Ok(Name::Authority));
        assert_eq!(table.name(64), Err(HpackError::BadIndex(64)));
    }

    #[test]
    fn oldest_entries_make_room_to_the_byte() {
        // Entries of 10 + 8 + 32 = 50 bytes.
        let mut table = Table::new(100);
        table.insert(Name::Authority, 8);
        table.insert(Name::Other(10), 8);
        assert_eq!(table.name(63), Ok(Name::Authority), "100 bytes fit in 100");
        table.insert(Name::Other(3), 15);
        assert_eq!(table.name(62), Ok(Name::Other(3)));
        assert_eq!(table.name(63), Ok(Name::Other(10)));
        assert_eq!(table.name(64), Err(HpackError::BadIndex(64)));
        table.insert(Name::Other(4), 15);
        assert_eq!(
            table.name(63),
            Err(HpackError::BadIndex(63)),
            "51 bytes and 50 do not fit in 100"
        );
    }

    #[test]
    fn entry_larger_than_the_table_empties_it() {
        let mut table = Table::new(100);
        table.insert(Name::Authority, 8);
        table.insert(Name::Other(60), 9);
        assert_eq!(table.name(62), Err(HpackError::BadIndex(62)));
        assert_eq!(table.size, 0);
        table.insert(Name::Other(60), 8);
        assert_eq!(table.name(62), Ok(Name::Other(60)));
    }

    #[test]
    fn resize_evicts_and_is_limited() {
        let mut table = Table::new(100);
        table.insert(Name::Authority, 8);
        table.insert(Name::Other(10), 8);
        table.resize(99).unwrap();
        assert_eq!(table.name(62), Ok(Name::Other(10)));
        assert_eq!(table.name(63), Err(HpackError::BadIndex(63)));
        table.resize(0).unwrap();
        table.insert(Name::Authority, 0);
        assert_eq!(table.name(62), Err(HpackError::BadIndex(62)));
        table.resize(100).unwrap();
        table.insert(Name::Authority, 0);
        assert_eq!(table.name(62), Ok(Name::Authority));
        assert_eq!(table.resize(101), Err(HpackError::BadSizeUpdate(101)));
    }
}
