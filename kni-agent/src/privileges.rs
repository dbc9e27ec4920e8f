//! Gives up what the agent does not need of root's power, before any thread starts.
//! Layer: root.

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};

/// What the agent keeps, and why.
const KEPT: [Capability; 5] = [
    // Namespaces: setns, unshare, mount; bpffs.
    Capability::CAP_SYS_ADMIN,
    // Links, addresses, routes, rules; attaching programs.
    Capability::CAP_NET_ADMIN,
    // Programs and maps.
    Capability::CAP_BPF,
    // Verifier features that need it: pointer comparisons, no speculation barriers.
    Capability::CAP_PERFMON,
    // Opening /proc/PID/ns/net of a pod's process that runs as another user.
    Capability::CAP_SYS_PTRACE,
];

/// Drops all other capabilities for good, and forbids regaining any by executing a file. Capabilities belong to
/// threads, so this must run before the first one is spawned.
pub fn drop_unneeded() -> Result<(), CapsError> {
    let held = caps::read(None, CapSet::Permitted)?;
    let kept: CapsHashSet = KEPT
        .into_iter()
        .filter(|capability| held.contains(capability))
        .collect();
    for capability in caps::read(None, CapSet::Bounding)?.difference(&kept) {
        // Without CAP_SETPCAP the bounding set cannot shrink; no_new_privs below still holds.
        if held.contains(&Capability::CAP_SETPCAP) {
            caps::drop(None, CapSet::Bounding, *capability)?;
        }
    }
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new())?;
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)?;
    nix::sys::prctl::set_no_new_privs().map_err(|errno| CapsError::from(errno.to_string()))
}
