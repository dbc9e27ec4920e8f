//! Drops root's capabilities that the agent does not need, before any thread starts.
//! Layer: root.

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};

/// Capabilities of the agent itself, with their reasons.
const KEPT: [Capability; 6] = [
    // Namespaces: setns, unshare, mount; bpffs.
    Capability::CAP_SYS_ADMIN,
    // Links, addresses, routes, rules; attaching programs.
    Capability::CAP_NET_ADMIN,
    // Packet sockets: looking on the link for another host with an egress address. CNI plugins use them as well.
    Capability::CAP_NET_RAW,
    // Programs and maps.
    Capability::CAP_BPF,
    // Verifier features that need it: pointer comparisons, no speculation barriers.
    Capability::CAP_PERFMON,
    // Opening /proc/PID/ns/net of a pod's process that runs as another user.
    Capability::CAP_SYS_PTRACE,
];

/// Additional capabilities of CNI plugins. They run as root, but under `no_new_privs` they get no more capabilities
/// than the agent has.
const FOR_PLUGINS: [Capability; 1] = [
    // Files of plugins in folders of other users, such as those of daemons that write their configuration.
    Capability::CAP_DAC_OVERRIDE,
];

/// Drops all other capabilities permanently, and forbids regaining any by executing a file. Capabilities belong to
/// threads, so this must run before the first one is spawned. With `plugins`, the capabilities of CNI plugins stay.
pub fn drop_unneeded(plugins: bool) -> Result<(), CapsError> {
    let held = caps::read(None, CapSet::Permitted)?;
    let for_plugins = FOR_PLUGINS.into_iter().filter(|_| plugins);
    let kept: CapsHashSet = KEPT
        .into_iter()
        .chain(for_plugins)
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
