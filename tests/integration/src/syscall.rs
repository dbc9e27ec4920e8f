//! Calls bpf(2), for what aya has no function for.

use std::io;

/// Carries out a command, whose attributes are the beginning of `union bpf_attr`; the kernel may write to them.
/// Pointers in them must be valid for the command. Returns the kernel's result, a descriptor for some commands.
pub fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<libc::c_long> {
    let attributes: *mut T = attributes;
    // SAFETY: the attributes live through the call, and their size is given; callers ensure that their pointers are
    // valid.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
