//! Keeps the data and the keys of a control plane in a folder, so that others start with them.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use anyhow::{Context as _, Result};

use crate::{
    config::ETCD_DATA,
    namespaces::Namespaces,
    pki::{Pki, ROOTS},
};

/// The folder of the data below that of the control plane.
const DATA: &str = "etcd";

/// Writes the data of a stopped etcd and the keys into the new folder `saved`, which is visible inside the node.
pub(crate) fn save(inside: &Namespaces, pki: &Pki, saved: &Path) -> Result<()> {
    fs::create_dir_all(saved).with_context(|| format!("create {}", saved.display()))?;
    // It contains keys.
    fs::set_permissions(saved, Permissions::from_mode(0o700))?;
    for name in ROOTS {
        let text = pki.files().get(name).with_context(|| format!("no {name}"))?;
        fs::write(saved.join(name), text).with_context(|| format!("write {name} into {}", saved.display()))?;
    }
    copy(inside, Path::new(ETCD_DATA), &saved.join(DATA))
}

/// Writes the data into the node, whose etcd does not run, and returns the authority with the saved keys.
pub(crate) fn restore(inside: &Namespaces, saved: &Path) -> Result<Pki> {
    copy(inside, &saved.join(DATA), Path::new(ETCD_DATA))?;
    let mut texts = ROOTS.map(|_name| String::new());
    for (text, name) in texts.iter_mut().zip(ROOTS) {
        let file = saved.join(name);
        *text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    }
    Pki::with_roots(texts)
}

/// Copies a folder. etcd reserves space in advance, which becomes holes.
fn copy(inside: &Namespaces, from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (from.display().to_string(), to.display().to_string());
    inside.run("cp", &["-a", "--sparse=always", &from, &to]).map(drop)
}
