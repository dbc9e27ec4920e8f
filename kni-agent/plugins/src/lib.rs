//! The only place that executes programs: CNI plugins, run as their configuration says, remembered until they are undone.
//! Layer: driver.
//!
//! ```text
//! add:  write the entry (configuration, arguments) -> ADD of each plugin in order -> write the result into the entry
//! del:  read the entry -> DEL of each plugin in reverse -> remove the entry
//! ```
//!
//! The entry is on disk before the first plugin runs and holds all that undoing needs: a configuration that was changed
//! or deleted meanwhile does not matter, nor does a killed agent. Plugins of a killed agent that still run hold the
//! entry's lock, which whoever undoes their work waits for.

mod cache;
mod call;
mod configuration;
mod error;
mod execute;
mod result;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use kni_model::{IfName, NetworkName, SandboxId, provider::CniSource};
use serde_json::Value;

use self::{
    cache::{Entry, Lock},
    execute::{Invocation, Verb},
};
pub use self::{
    call::Call,
    configuration::Configuration,
    error::CniError,
    result::{Outcome, PluginAddress},
};

/// How long an answer to [`Plugins::readiness`] is good for.
const FRESH: Duration = Duration::from_secs(1);
/// How long the plugins of one call may take together. A DHCP exchange takes some ten seconds where it must be repeated.
const TIMEOUT: Duration = Duration::from_mins(1);

/// Where plugins and their configurations are.
#[derive(Debug, Clone)]
pub struct PluginOptions {
    /// Folders of plugins, the first that has one wins.
    pub bin_dirs: Vec<PathBuf>,
    /// Folder of configurations.
    pub conf_dir: PathBuf,
    /// Folder of the entries; durable, because so is what plugins keep.
    pub cache_dir: PathBuf,
}

/// The plugins of the node. Clones share it.
#[derive(Debug, Clone)]
pub struct Plugins {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: PluginOptions,
    looked: Mutex<HashMap<String, Looked>>,
}

/// What was found when, by source.
type Looked = (Instant, Result<BTreeSet<String>, String>);

impl Plugins {
    /// Plugins by these options; nothing is read yet.
    pub fn new(options: PluginOptions) -> Self {
        let looked = Mutex::default();
        Self {
            inner: Arc::new(Inner { options, looked }),
        }
    }

    /// The configuration that a source names, with all its plugins there. Reads files.
    pub fn find(&self, source: &CniSource) -> Result<Configuration, CniError> {
        let PluginOptions { bin_dirs, conf_dir, .. } = &self.inner.options;
        let configuration = configuration::find(conf_dir, source)?;
        for plugin in configuration.plugins() {
            execute::locate(bin_dirs, &configuration, plugin.kind())?;
        }
        Ok(configuration)
    }

    /// What the plugins of a source declare that they can do; the error says why pods cannot be attached. At most a
    /// second old, so that it can be asked for often.
    pub fn readiness(&self, source: &CniSource) -> Result<BTreeSet<String>, String> {
        let key = source.to_string();
        let mut looked = self.inner.looked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, answer)) = looked.get(&key)
            && when.elapsed() < FRESH
        {
            return answer.clone();
        }
        let answer = self
            .find(source)
            .map(|configuration| configuration.capabilities())
            .map_err(|error| error.to_string());
        looked.insert(key, (Instant::now(), answer.clone()));
        answer
    }

    /// Where the entry of an attachment is, or will be.
    pub fn entry_path(&self, network: &NetworkName, sandbox: &SandboxId, ifname: &IfName) -> PathBuf {
        self.inner
            .options
            .cache_dir
            .join(cache::file_name(network, sandbox, ifname))
    }

    /// All entries, also those of attachments that nobody remembers.
    pub fn entries(&self) -> Result<Vec<PathBuf>, CniError> {
        cache::list(&self.inner.options.cache_dir)
    }

    /// Runs ADD of each plugin. On error some of them may have done their part: [`delete`] undoes it.
    pub async fn add(&self, path: &Path, configuration: &Configuration, call: &Call) -> Result<Outcome, CniError> {
        let mut entry = Entry::new(configuration, &self.inner.options.bin_dirs, call);
        let lock = Lock::take(path).await?;
        entry.write(path).await?;
        let deadline = Instant::now() + TIMEOUT;
        let mut result = Value::Null;
        for plugin in configuration.plugins() {
            let invocation = Invocation::new(&entry, plugin, Verb::Add, Some(&call.netns));
            result = invocation.run(&result, &lock, deadline).await?;
        }
        let outcome = Outcome::read(configuration, &result, call.ifname.as_str())?;
        entry.set_result(result);
        entry.write(path).await?;
        Ok(outcome)
    }
}

/// Runs CHECK of each plugin; plugins of versions that know none are well.
pub async fn check(path: &Path, netns: &Path) -> Result<(), CniError> {
    let lock = Lock::take(path).await?;
    let Some(entry) = Entry::read(path).await? else {
        return Err(CniError::Forgotten(path.to_owned()));
    };
    let configuration = entry.configuration()?;
    let Some(result) = entry.result().filter(|_| configuration.can_check()) else {
        return Ok(());
    };
    let deadline = Instant::now() + TIMEOUT;
    for plugin in configuration.plugins() {
        let invocation = Invocation::new(&entry, plugin, Verb::Check, Some(netns));
        invocation.run(result, &lock, deadline).await?;
    }
    Ok(())
}

/// Runs DEL of each plugin, the last one first, and forgets the entry. `netns` is `None` when the namespace is gone. Goes
/// on after errors, tells all of them and keeps the entry then. Without an entry nothing was ever begun, or all is
/// undone. Needs nothing but the entry.
pub async fn delete(path: &Path, netns: Option<&Path>) -> Result<(), CniError> {
    let lock = Lock::take(path).await?;
    let Some(entry) = Entry::read(path).await? else {
        lock.remove();
        return Ok(());
    };
    let configuration = entry.configuration()?;
    let none = Value::Null;
    let result = entry.result().filter(|_| configuration.tells_result_to_del());
    let deadline = Instant::now() + TIMEOUT;
    let mut errors = Vec::new();
    for plugin in configuration.plugins().iter().rev() {
        let invocation = Invocation::new(&entry, plugin, Verb::Del, netns);
        let ran = invocation.run(result.unwrap_or(&none), &lock, deadline).await;
        errors.extend(ran.err());
    }
    if let Some(error) = CniError::all(errors) {
        return Err(error);
    }
    cache::forget(path).await?;
    lock.remove();
    Ok(())
}
