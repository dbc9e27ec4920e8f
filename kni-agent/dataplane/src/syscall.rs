//! The map commands of bpf(2), over byte slices: the library has no batch commands. And the wait for running programs.

use std::{
    io,
    mem::size_of,
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::Duration,
};

use aya::{
    maps::{MapInfo, MapType},
    util::nr_cpus,
};

/// `enum bpf_cmd` (linux/bpf.h).
#[derive(Clone, Copy)]
#[repr(i32)]
enum Command {
    Lookup = 1,
    Update = 2,
    Delete = 3,
    NextKey = 4,
    LookupBatch = 24,
    UpdateBatch = 26,
    DeleteBatch = 27,
}

/// The kernel's internal ENOTSUPP, which it lets slip out for map kinds without batch commands.
const ENOTSUPP: i32 = 524;

/// `union bpf_attr`, the struct of the `BPF_MAP_*_ELEM` commands.
#[repr(C)]
struct ElementAttr {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr`, the struct of the `BPF_MAP_*_BATCH` commands.
#[repr(C)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// # Safety
/// `attr` must be what the kernel expects for the command, and every address in it must be valid for as many bytes as
/// the map's sizes and the attribute's count make the kernel read or write.
unsafe fn bpf<T>(command: Command, attr: &mut T) -> io::Result<()> {
    // SAFETY: the attribute is valid for its own size; its content is the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command as i32, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// What is waited instead where the kernel refuses: thousands of times what a program takes.
const LONGER_THAN_A_PROGRAM: Duration = Duration::from_millis(50);

/// Returns when every program that ran at the call has ended: `MEMBARRIER_CMD_GLOBAL` waits for a grace period of RCU
/// (`kernel/sched/membarrier.c`), and programs of the network run inside its read sections. 8 ms on two CPUs. A kernel
/// with `nohz_full` CPUs has no such command: there it is a fixed time.
pub(super) fn wait_for_programs() {
    // SAFETY: the call takes numbers alone.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result < 0 {
        thread::sleep(LONGER_THAN_A_PROGRAM);
    }
}

/// Where a walk stands: opaque, as large as a key, or a bucket's number.
#[derive(Debug, Default)]
pub(super) struct Cursor(Option<Vec<u8>>);

/// A map, as bytes. Every slice is checked against the sizes that the kernel tells, so that it never reads or writes
/// beyond one.
#[derive(Debug)]
pub(super) struct RawTable {
    fd: OwnedFd,
    key_size: usize,
    /// Bytes of a value as system calls exchange it: of all CPUs where each has its own.
    value_size: usize,
    /// How many values of a key there are, where each CPU has its own.
    cpus: Option<usize>,
    capacity: u32,
}

impl RawTable {
    /// The map behind a descriptor; `info` must be that map's.
    pub(super) fn new(fd: OwnedFd, info: &MapInfo) -> io::Result<Self> {
        let kind = info.map_type().map_err(io::Error::other)?;
        let per_cpu = matches!(
            kind,
            MapType::PerCpuArray | MapType::PerCpuHash | MapType::LruPerCpuHash
        );
        let one = info.value_size() as usize;
        let mut cpus = None;
        let value_size = if per_cpu {
            let possible = nr_cpus().map_err(|(_, error)| error)?;
            cpus = Some(possible);
            one.next_multiple_of(8) * possible
        } else if matches!(
            kind,
            MapType::Array | MapType::Hash | MapType::LruHash | MapType::LpmTrie
        ) {
            one
        } else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "not a map of keys and values",
            ));
        };
        Ok(Self {
            fd,
            key_size: info.key_size() as usize,
            value_size,
            cpus,
            capacity: info.max_entries(),
        })
    }

    pub(super) const fn key_size(&self) -> usize {
        self.key_size
    }

    pub(super) const fn value_size(&self) -> usize {
        self.value_size
    }

    pub(super) const fn cpus(&self) -> Option<usize> {
        self.cpus
    }

    pub(super) const fn capacity(&self) -> u32 {
        self.capacity
    }

    #[expect(clippy::cast_sign_loss, reason = "an open descriptor is not negative")]
    fn map_fd(&self) -> u32 {
        self.fd.as_raw_fd() as u32
    }

    fn element(&self, key: &[u8]) -> io::Result<ElementAttr> {
        check(key.len(), self.key_size)?;
        Ok(ElementAttr {
            map_fd: self.map_fd(),
            padding: 0,
            key: key.as_ptr() as u64,
            value: 0,
            flags: 0,
        })
    }

    /// Whether there is such a row; it is then in `value`.
    pub(super) fn lookup(&self, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
        check(value.len(), self.value_size)?;
        let mut attr = self.element(key)?;
        attr.value = value.as_mut_ptr() as u64;
        // SAFETY: both slices have the map's sizes, and `value` is ours to write.
        found(unsafe { bpf(Command::Lookup, &mut attr) })
    }

    /// Writes a row.
    pub(super) fn update(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        check(value.len(), self.value_size)?;
        let mut attr = self.element(key)?;
        attr.value = value.as_ptr() as u64;
        // SAFETY: both slices have the map's sizes; the kernel only reads them.
        unsafe { bpf(Command::Update, &mut attr) }
    }

    /// Removes a row; false when there was none.
    pub(super) fn delete(&self, key: &[u8]) -> io::Result<bool> {
        let mut attr = self.element(key)?;
        // SAFETY: the slice has the map's size of a key.
        found(unsafe { bpf(Command::Delete, &mut attr) })
    }

    /// The key behind `key`, or the first one; false at the end.
    fn next_key(&self, key: Option<&[u8]>, next: &mut [u8]) -> io::Result<bool> {
        check(next.len(), self.key_size)?;
        let mut attr = self.element(key.unwrap_or(next))?;
        if key.is_none() {
            attr.key = 0;
        }
        attr.value = next.as_mut_ptr() as u64;
        // SAFETY: both slices have the map's size of a key, and `next` is ours to write.
        found(unsafe { bpf(Command::NextKey, &mut attr) })
    }

    fn batch(&self, count: usize) -> io::Result<BatchAttr> {
        Ok(BatchAttr {
            in_batch: 0,
            out_batch: 0,
            keys: 0,
            values: 0,
            count: u32::try_from(count).map_err(io::Error::other)?,
            map_fd: self.map_fd(),
            elem_flags: 0,
            flags: 0,
        })
    }

    /// Writes rows in order; tells how many have been written, also when one could not be.
    pub(super) fn update_batch(&self, keys: &[u8], values: &[u8]) -> (usize, io::Result<()>) {
        let count = keys.len() / self.key_size;
        let prepared = check(keys.len(), count * self.key_size)
            .and_then(|()| check(values.len(), count * self.value_size))
            .and_then(|()| self.batch(count));
        let mut attr = match prepared {
            Ok(attr) => attr,
            Err(error) => return (0, Err(error)),
        };
        attr.keys = keys.as_ptr() as u64;
        attr.values = values.as_ptr() as u64;
        // SAFETY: both slices have `count` entries of the map's sizes; the kernel only reads them.
        let result = unsafe { bpf(Command::UpdateBatch, &mut attr) };
        (done(&attr, count, &result), result)
    }

    /// Removes rows in order up to the first one that is not there; tells how many have been removed.
    pub(super) fn delete_batch(&self, keys: &[u8]) -> (usize, io::Result<()>) {
        let count = keys.len() / self.key_size;
        let prepared = check(keys.len(), count * self.key_size).and_then(|()| self.batch(count));
        let mut attr = match prepared {
            Ok(attr) => attr,
            Err(error) => return (0, Err(error)),
        };
        attr.keys = keys.as_ptr() as u64;
        // SAFETY: the slice has `count` keys of the map's size; the kernel only reads them.
        let result = unsafe { bpf(Command::DeleteBatch, &mut attr) };
        (done(&attr, count, &result), result)
    }

    /// Reads the next rows behind the cursor; tells how many, and whether the walk has come to its end. ENOSPC means that
    /// the slices are too short for what lies together in one bucket.
    pub(super) fn lookup_batch(
        &self,
        cursor: &mut Cursor,
        keys: &mut [u8],
        values: &mut [u8],
    ) -> io::Result<(usize, bool)> {
        let count = keys.len() / self.key_size;
        check(keys.len(), count * self.key_size)?;
        check(values.len(), count * self.value_size)?;
        let mut attr = self.batch(count)?;
        // Hash maps write a bucket's number, four bytes; all others write a key.
        let mut next = vec![0_u8; self.key_size.max(size_of::<u32>())];
        attr.in_batch = cursor.0.as_ref().map_or(0, |at| at.as_ptr() as u64);
        attr.out_batch = next.as_mut_ptr() as u64;
        attr.keys = keys.as_mut_ptr() as u64;
        attr.values = values.as_mut_ptr() as u64;
        // SAFETY: the slices have `count` entries of the map's sizes and are ours to write, as is `next`, which is as large
        // as a key and no smaller than a bucket's number; the cursor comes from such a `next`.
        let result = unsafe { bpf(Command::LookupBatch, &mut attr) };
        let read = (attr.count as usize).min(count);
        match result {
            Ok(()) => {
                cursor.0 = Some(next);
                Ok((read, false))
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok((read, true)),
            Err(error) => Err(error),
        }
    }

    /// As [`Self::lookup_batch`] but one row at a time, for kernels that cannot do better with this kind of map.
    pub(super) fn lookup_next(
        &self,
        cursor: &mut Cursor,
        key: &mut [u8],
        value: &mut [u8],
    ) -> io::Result<(usize, bool)> {
        loop {
            if !self.next_key(cursor.0.as_deref(), key)? {
                return Ok((0, true));
            }
            cursor.0 = Some(key.to_vec());
            // A row may go between the two calls.
            if self.lookup(key, value)? {
                return Ok((1, false));
            }
        }
    }
}

/// Whether the kernel cannot do the batch command with this kind of map. A row that is refused for itself fails with
/// EINVAL too: doing it alone tells which.
pub(super) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(ENOTSUPP | libc::EINVAL | libc::EOPNOTSUPP))
}

fn check(found: usize, expected: usize) -> io::Result<()> {
    if found == expected {
        Ok(())
    } else {
        let text = format!("{found} bytes instead of the map's {expected}");
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }
}

fn found(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Older kernels leave the count alone when they refuse before the first row.
fn done(attr: &BatchAttr, count: usize, result: &io::Result<()>) -> usize {
    let written = (attr.count as usize).min(count);
    match result {
        Ok(()) => count,
        Err(_) if written == count => 0,
        Err(_) => written,
    }
}
