//! Names the folders of the machine that a node replaces by its own, so that nothing in them is visible inside.

use std::path::Path;

/// File systems that each node mounts, and where.
pub(crate) const OWN: [(&str, &str); 4] = [
    ("sysfs", "/sys"),
    ("bpf", "/sys/fs/bpf"),
    ("tmpfs", "/run"),
    ("tmpfs", "/tmp"),
];
/// Those that a node with a container runtime mounts besides.
pub(crate) const OF_RUNTIME: [(&str, &str); 2] = [("tmpfs", "/var/lib"), ("tmpfs", "/var/log")];

/// The folder in which `path`, absolute and without symbolic links, is hidden from a node with a container runtime.
pub(crate) fn hides(path: &Path) -> Option<&'static str> {
    let mut all = OWN.iter().chain(&OF_RUNTIME).map(|(_, at)| *at);
    all.find(|folder| path.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_the_node_hide_what_is_in_them_and_nothing_else() {
        for (path, hidden) in [
            ("/tmp/kni/target", Some("/tmp")),
            ("/run/user/0/kni", Some("/run")),
            ("/var/lib/ci/kni", Some("/var/lib")),
            ("/var/log", Some("/var/log")),
            ("/sys/fs/bpf/kni", Some("/sys")),
            ("/tmpx/kni", None),
            ("/var/libexec/kni", None),
            ("/home/me/tmp/kni", None),
            ("/", None),
        ] {
            assert_eq!(hides(Path::new(path)), hidden, "{path}");
        }
    }
}
