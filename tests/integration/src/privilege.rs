//! Checks the requirements of a test: a missing one skips the test with a message, or fails it if `KNI_REQUIRE`
//! contains it.

use std::{env, io, path::Path};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::geteuid,
};

use crate::{
    Namespaces,
    exclusive::{Permit, Share},
};

/// The words for how a test runs beside others.
const SHARES: [(&str, Share); 3] = [
    ("exclusive", Share::Exclusive),
    ("steady", Share::Steady),
    ("waiting", Share::Waiting),
];

/// Debian's folder of CNI plugins.
pub const CNI_PLUGINS: &str = "/usr/lib/cni";

/// Skips the calling test, by returning from it, if the machine lacks one of the named requirements: `root`, `netns`,
/// `bpf`, `cni_plugins` (of Debian), `machine` (the build tools and the runtime environment of a whole node),
/// `api_server` (`machine`, unless `KUBEBUILDER_ASSETS` names the programs), `legacy_tables` (iptables before nftables,
/// for both families) or the name of a program that must be in `PATH`. The test may return `()` or a `Result<(), _>`.
///
/// A test with `exclusive` runs while no other test of the machine with a `require!` is running, and fewer of those
/// with `steady`, and more of those with `waiting`, run at once; see [`exclusive`](crate::exclusive). A test has at
/// most one `require!`, which applies until it returns.
///
/// Prints `SKIP <test>: <why>`. Panics instead if the environment variable `KNI_REQUIRE` (comma-separated list, or
/// `all`) contains the requirement.
#[macro_export]
macro_rules! require {
    ($($need:ident),+ $(,)?) => {
        let permit = $crate::privilege::require(
            {
                fn here() {}
                $crate::privilege::test_name(&here)
            },
            &[$(stringify!($need)),+],
        );
        let Some(_permit) = permit else {
            return $crate::privilege::Skipped::skipped();
        };
    };
}

/// The return value of a skipped test.
pub trait Skipped {
    /// The value of success.
    fn skipped() -> Self;
}

impl Skipped for () {
    fn skipped() -> Self {}
}

impl<E> Skipped for Result<(), E> {
    fn skipped() -> Self {
        Ok(())
    }
}

/// The permit to run if the machine meets all requirements; see [`require!`].
pub fn require(test: &'static str, needs: &[&str]) -> Option<Permit> {
    for need in needs {
        let need = match *need {
            need if share_of(need).is_some() => continue,
            "api_server" if env::var_os("KUBEBUILDER_ASSETS").is_some() => continue,
            "api_server" => "machine",
            need => need,
        };
        if let Err(why) = check(need) {
            assert!(!demanded(need), "{test}: KNI_REQUIRE names {need}, but {why}");
            println!("SKIP {test}: {why}");
            return None;
        }
    }
    let share = needs.iter().find_map(|need| share_of(need));
    Some(Permit::acquire(share.unwrap_or(Share::Busy), test))
}

fn share_of(word: &str) -> Option<Share> {
    SHARES
        .into_iter()
        .find_map(|(name, share)| (name == word).then_some(share))
}

/// The path of the function around `here`, without the name of the crate.
pub fn test_name<F>(_here: &F) -> &'static str {
    let full = std::any::type_name::<F>();
    let test = full
        .strip_suffix("::here")
        .unwrap_or(full)
        .trim_end_matches("::{{closure}}");
    test.split_once("::").map_or(test, |(_, rest)| rest)
}

fn demanded(need: &str) -> bool {
    env::var("KNI_REQUIRE").is_ok_and(|list| list.split(',').any(|n| n.trim() == need || n.trim() == "all"))
}

fn check(need: &str) -> Result<(), String> {
    match need {
        "root" => {
            if geteuid().is_root() {
                Ok(())
            } else {
                Err("not root".into())
            }
        }
        "netns" => std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS))
            .join()
            .expect("unshare does not panic")
            .map_err(|e| format!("cannot make network and mount namespaces: {e}")),
        "bpf" => create_map().map_err(|e| format!("cannot create eBPF maps: {e}")),
        "cni_plugins" => ["bridge", "host-local", "portmap"].into_iter().try_for_each(|plugin| {
            let there = Path::new(CNI_PLUGINS).join(plugin).is_file();
            there
                .then_some(())
                .ok_or(format!("no plugin {plugin} in {CNI_PLUGINS}"))
        }),
        "machine" => ["go", "gcc", "pkg-config", "nft"].into_iter().try_for_each(check),
        "legacy_tables" => ["iptables-legacy", "ip6tables-legacy"]
            .into_iter()
            .try_for_each(list_legacy_table),
        program => {
            let path = env::var_os("PATH").unwrap_or_default();
            let found = env::split_paths(&path).any(|dir| dir.join(program).is_file());
            if found || Path::new("/usr/sbin").join(program).is_file() {
                Ok(())
            } else {
                Err(format!("no program {program} in PATH"))
            }
        }
    }
}

/// Lists the table `nat` in a network namespace of its own: not every kernel has this table.
fn list_legacy_table(program: &str) -> Result<(), String> {
    check(program)?;
    let failed = |e: &dyn std::fmt::Display| format!("{program} does not list the table nat: {e}");
    let fresh = Namespaces::fresh_net("legacy-tables").map_err(|e| failed(&e))?;
    fresh.run(program, &["-t", "nat", "-S"]).map_err(|e| failed(&e))?;
    Ok(())
}

/// The start of `union bpf_attr` that `BPF_MAP_CREATE` reads.
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

fn create_map() -> io::Result<()> {
    const BPF_MAP_CREATE: libc::c_long = 0;
    const BPF_MAP_TYPE_ARRAY: u32 = 2;
    let attr = MapCreate {
        map_type: BPF_MAP_TYPE_ARRAY,
        key_size: 4,
        value_size: 8,
        max_entries: 1,
    };
    // SAFETY: `attr` lives through the call and its size is given; the kernel treats missing trailing bytes as zero.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_CREATE, &raw const attr, size_of::<MapCreate>()) };
    let Ok(fd) = i32::try_from(fd) else {
        return Err(io::Error::other("descriptor out of range"));
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned the descriptor, so it has no other owner.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) });
    Ok(())
}
