//! Decides whether a Kubernetes node can run from the folder of this checkout's programs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

use crate::hidden;

/// Fails if a node cannot see `folder`, with the reason and what to do. The folder need not exist.
pub(crate) fn usable(folder: &Path) -> Result<()> {
    let real = real(folder);
    if let Some(above) = hidden::hides(&real) {
        bail!(
            "a node has its own {above} and cannot see the programs in {}; move the checkout out of {above}, or set \
             CARGO_TARGET_DIR to a folder elsewhere",
            real.display()
        );
    }
    Ok(())
}

/// The path without symbolic links, as far as it exists.
fn real(folder: &Path) -> PathBuf {
    let mut missing = Vec::new();
    let mut existing = folder;
    loop {
        if let Ok(real) = fs::canonicalize(existing) {
            return missing.iter().rev().fold(real, |path, name| path.join(name));
        }
        let (Some(above), Some(name)) = (existing.parent(), existing.file_name()) else {
            return folder.to_owned();
        };
        missing.push(name);
        existing = above;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_the_node_hides_is_named_with_what_to_do() {
        let error = usable(Path::new("/tmp/no-such-checkout/target"))
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "a node has its own /tmp and cannot see the programs in /tmp/no-such-checkout/target; move the checkout out \
             of /tmp, or set CARGO_TARGET_DIR to a folder elsewhere"
        );
        assert!(usable(Path::new("/var/lib/no-such-checkout/target")).is_err());
        assert!(usable(Path::new("/srv/no-such-checkout/target")).is_ok());
    }

    #[test]
    fn a_symbolic_link_does_not_hide_the_place() {
        let folder = std::env::temp_dir().join(format!("xtask-place-{}", std::process::id()));
        fs::create_dir_all(folder.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("/run", folder.join("link")).unwrap();
        assert_eq!(real(&folder.join("link/new/target")), Path::new("/run/new/target"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
