//! Installs the CNI plugin and its configuration where runtimes look for files, and removes exactly these files.
//! Layer: root.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::cli::{CniInstallArgs, ServeArgs};

/// Name of the plugin, the value of `type` in configurations.
const PLUGIN: &str = "kni-cni";
/// Text that every build of the plugin contains.
const ABOUT: &[u8] = b"kni-cni: the CNI plugin of KNI";
/// Marks a configuration that this program wrote. One without the mark belongs to another writer, even if it names
/// KNI's plugin.
const MARK: &str = "kni.dev/installed-by";
const INSTALLER: &str = "kni-agent";
/// Capabilities that the plugin uses.
const CAPABILITIES: [&str; 6] = [
    "portMappings",
    "bandwidth",
    "dns",
    "ips",
    "mac",
    "io.kubernetes.cri.pod-annotations",
];

/// Copies the plugin, then writes the configuration: a runtime that finds the latter finds the former. Idempotent.
pub fn install(args: &CniInstallArgs) -> Result<()> {
    let shim = match &args.shim {
        Some(path) => path.clone(),
        None => beside_this_program()?,
    };
    let program = fs::read(&shim).with_context(|| format!("reading the plugin {}", shim.display()))?;
    if !is_plugin(&program) {
        bail!("{} is not the CNI plugin of KNI", shim.display());
    }
    let (to, conflist) = (args.bin_dir.join(PLUGIN), args.conf_dir.join(&args.conf_name));
    if let Some(there) = read_if_there(&to)?
        && !is_plugin(&there)
    {
        bail!("{} does not belong to KNI: it is left unchanged", to.display());
    }
    if let Some(there) = read_if_there(&conflist)?
        && !is_ours(&there)
    {
        bail!("{} does not belong to KNI: it is left unchanged", conflist.display());
    }
    put(&to, &program, 0o755)?;
    put(&conflist, &configuration(args)?, 0o644)
}

/// [`install`] at the start of an agent with that option, with the plugin beside this program and the socket and folder
/// that the agent itself uses. Until the agent serves, the plugin reports to runtimes that it is not ready.
pub fn ensure(args: &ServeArgs) -> Result<()> {
    if !args.install.install_cni {
        return Ok(());
    }
    let socket = args.paths.sockets.first();
    install(&CniInstallArgs {
        config: None,
        bin_dir: args.install.install_cni_bin_dir.clone(),
        conf_dir: args.install.install_cni_conf_dir.clone(),
        conf_name: args.install.install_cni_conf_name.clone(),
        shim: None,
        socket: socket.context("--install-cni without a --socket")?.clone(),
        network_name: "kni".to_owned(),
        cni_state_dir: args.paths.cni_state_dir.clone(),
        log: String::new(),
    })
    .context("putting the CNI plugin in place")
}

/// Removes the configuration, then the plugin; missing files and files of other writers are ignored.
pub fn uninstall(args: &CniInstallArgs) -> Result<()> {
    let (program, conflist) = (args.bin_dir.join(PLUGIN), args.conf_dir.join(&args.conf_name));
    remove_if(&conflist, is_ours)?;
    remove_if(&program, is_plugin)
}

fn configuration(args: &CniInstallArgs) -> Result<Vec<u8>> {
    let capabilities: serde_json::Map<String, Value> = CAPABILITIES
        .iter()
        .map(|name| ((*name).to_owned(), true.into()))
        .collect();
    let conflist = json!({
        "cniVersion": "1.1.0",
        "name": args.network_name,
        MARK: INSTALLER,
        "plugins": [{
            "type": PLUGIN,
            "socket": args.socket,
            "stateDir": args.cni_state_dir,
            "capabilities": capabilities,
        }],
    });
    let mut bytes = serde_json::to_vec_pretty(&conflist)?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn beside_this_program() -> Result<PathBuf> {
    let own = std::env::current_exe().context("where this program is")?;
    Ok(own.with_file_name(PLUGIN))
}

fn is_plugin(program: &[u8]) -> bool {
    program.windows(ABOUT.len()).any(|window| window == ABOUT)
}

fn is_ours(conflist: &[u8]) -> bool {
    let read: Option<Value> = serde_json::from_slice(conflist).ok();
    read.is_some_and(|conflist| conflist.get(MARK).is_some_and(|by| by == INSTALLER))
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

/// Replaces a file atomically: a reader sees the old or the new file, and a running plugin continues.
fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let as_wanted = read_if_there(path)?.is_some_and(|there| there == bytes)
        && fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o7777 == mode);
    if as_wanted {
        tracing::info!(path = %path.display(), "in place already");
        return Ok(());
    }
    let folder = path.parent().context("the file has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    // Runtimes read every file of the folder with the extension of a configuration; this name has another one.
    let name = path.file_name().context("the file has no name")?.to_string_lossy();
    let unfinished = folder.join(format!(".{name}.{}", std::process::id()));
    let written = write_whole(&unfinished, bytes, mode).and_then(|()| fs::rename(&unfinished, path));
    if let Err(error) = written {
        fs::remove_file(&unfinished).ok();
        return Err(error).with_context(|| format!("writing {}", path.display()));
    }
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .with_context(|| format!("writing {}", folder.display()))?;
    tracing::info!(path = %path.display(), "installed");
    Ok(())
}

fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)?;
    // Regardless of the umask.
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn remove_if(path: &Path, ours: fn(&[u8]) -> bool) -> Result<()> {
    let Some(there) = read_if_there(path)? else {
        return Ok(());
    };
    if !ours(&there) {
        tracing::warn!(path = %path.display(), "left in place: it does not belong to KNI");
        return Ok(());
    }
    fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    tracing::info!(path = %path.display(), "removed");
    Ok(())
}

#[cfg(test)]
mod tests;
