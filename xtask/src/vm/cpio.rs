//! Writes a cpio archive in the format that the kernel unpacks as its initial root (newc).

use std::collections::BTreeSet;

use anyhow::{Context, Result};

const DIRECTORY: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const REGULAR: u32 = 0o100_000;
const END: &str = "TRAILER!!!";

/// An archive under construction.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder and its parents; idempotent.
    pub(super) fn folder(&mut self, path: &str) -> Result<()> {
        let mut above = String::new();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            if !above.is_empty() {
                above.push('/');
            }
            above.push_str(name);
            if self.folders.insert(above.clone()) {
                self.entry(&above, DIRECTORY | 0o755, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    /// Adds a file and its parent folders.
    pub(super) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> Result<()> {
        self.folder_of(path)?;
        self.entry(path, REGULAR | permissions, (0, 0), content)
    }

    /// Adds a character device with its major and minor number, and its parent folders.
    pub(super) fn character_device(&mut self, path: &str, number: (u32, u32)) -> Result<()> {
        self.folder_of(path)?;
        self.entry(path, CHARACTER_DEVICE | 0o600, number, &[])
    }

    /// The finished archive.
    pub(super) fn finish(mut self) -> Result<Vec<u8>> {
        self.entry(END, 0, (0, 0), &[])?;
        Ok(self.bytes)
    }

    fn folder_of(&mut self, path: &str) -> Result<()> {
        path.rsplit_once('/').map_or(Ok(()), |(folder, _)| self.folder(folder))
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> Result<()> {
        let name = path.trim_start_matches('/');
        let size = u32::try_from(content.len()).with_context(|| format!("{path} is too large for an archive"))?;
        let name_size = u32::try_from(name.len() + 1).with_context(|| format!("the name {path} is too long"))?;
        // Two entries with the same number would be hard links to each other.
        self.entries += 1;
        let links = if mode & DIRECTORY != 0 { 2 } else { 1 };
        let (major, minor) = device;
        self.bytes.extend_from_slice(b"070701");
        for field in [
            self.entries,
            mode,
            0,
            0,
            links,
            0,
            size,
            0,
            0,
            major,
            minor,
            name_size,
            0,
        ] {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
        Ok(())
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, mode, device number and content.
    type Entry = (String, u32, (u32, u32), Vec<u8>);

    /// All entries, parsed according to the specification of the format.
    fn entries(mut bytes: &[u8]) -> Vec<Entry> {
        let mut found = Vec::new();
        let start = bytes.len();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            assert_eq!((start - bytes.len()) % 4, 0, "each header is aligned");
            let field = |index: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * index..14 + 8 * index]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (size, name_size) = (field(6) as usize, field(11) as usize);
            let data = (110 + name_size).next_multiple_of(4);
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            assert_eq!(bytes[110 + name_size - 1], 0);
            let entry = (name, field(1), (field(9), field(10)), bytes[data..data + size].to_vec());
            bytes = &bytes[(data + size).next_multiple_of(4)..];
            if entry.0 == END {
                assert!(bytes.is_empty());
                return found;
            }
            found.push(entry);
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        let mut archive = Archive::default();
        archive.file("/lib/a/one", 0o755, b"12345").unwrap();
        archive.file("lib/two", 0o644, b"").unwrap();
        archive.character_device("dev/console", (5, 1)).unwrap();
        archive.folder("/lib/a").unwrap();
        let entries = entries(&archive.finish().unwrap());
        let names: Vec<_> = entries.iter().map(|entry| entry.0.as_str()).collect();
        assert_eq!(names, ["lib", "lib/a", "lib/a/one", "lib/two", "dev", "dev/console"]);
        assert_eq!(entries[0].1, 0o040_755);
        assert_eq!(
            (entries[2].1, entries[2].3.as_slice()),
            (0o100_755, b"12345".as_slice())
        );
        assert_eq!((entries[5].1, entries[5].2), (0o020_600, (5, 1)));
    }
}
