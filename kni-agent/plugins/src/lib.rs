//! Runs CNI plugins by their configuration, with a cached entry per attachment until DEL. Only it starts processes.
//! Layer: driver.
//!
//! ```text
//! add:  write the entry (configuration, arguments) -> ADD of each plugin in order -> write the result into the entry
//! del:  read the entry -> DEL of each plugin in reverse -> remove the entry
//! ```
//!
//! The entry is on disk before the first plugin runs and holds everything that DEL needs, so that neither a changed or
//! deleted configuration nor a killed agent prevents it. Running plugins of a killed agent hold the entry's lock, for
//! which DEL waits.

mod cache;
mod call;
mod configuration;
mod configuration_error;
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
    configuration_error::ConfigurationError,
    error::{CniError, NotReady, RunError},
    result::{Outcome, PluginAddress},
};

/// Lifetime of a cached result of [`Plugins::readiness`].
const READINESS_LIFETIME: Duration = Duration::from_secs(1);
/// Time limit of all plugins of one call together. A repeated DHCP exchange takes some ten seconds.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The folders of plugins, configurations and entries.
#[derive(Debug, Clone)]
pub struct PluginOptions {
    /// Folders of plugins; the first one with the program wins.
    pub bin_dirs: Vec<PathBuf>,
    /// Folder of configurations.
    pub conf_dir: PathBuf,
    /// Folder of the entries; durable, as is the state of the plugins.
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
    readiness: Mutex<HashMap<String, CachedReadiness>>,
}

/// The capabilities that the plugins of a network declare.
pub type Readiness = Result<BTreeSet<String>, NotReady>;

/// The result of a check, and its time.
type CachedReadiness = (Instant, Readiness);

impl Plugins {
    /// Plugins by these options. Reads nothing yet.
    pub fn new(options: PluginOptions) -> Self {
        let readiness = Mutex::default();
        Self {
            inner: Arc::new(Inner { options, readiness }),
        }
    }

    /// The configuration of a source, if all its plugins are installed. Reads files.
    pub fn find(&self, source: &CniSource) -> Result<Configuration, CniError> {
        let PluginOptions { bin_dirs, conf_dir, .. } = &self.inner.options;
        let configuration = configuration::find(conf_dir, source)?;
        for plugin in configuration.plugins() {
            execute::locate(bin_dirs, &configuration, plugin.kind())?;
        }
        Ok(configuration)
    }

    /// The capabilities of a source's plugins, or why pods cannot be attached. Cached for a second, for frequent calls.
    pub fn readiness(&self, source: &CniSource) -> Readiness {
        let key = source.to_string();
        let mut cached = self.inner.readiness.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, readiness)) = cached.get(&key)
            && when.elapsed() < READINESS_LIFETIME
        {
            return readiness.clone();
        }
        let readiness = self
            .find(source)
            .map(|configuration| configuration.capabilities())
            .map_err(NotReady::from);
        cached.insert(key, (Instant::now(), readiness.clone()));
        readiness
    }

    /// Path of an attachment's entry.
    pub fn entry_path(&self, network: &NetworkName, sandbox: &SandboxId, ifname: &IfName) -> PathBuf {
        self.inner
            .options
            .cache_dir
            .join(cache::file_name(network, sandbox, ifname))
    }

    /// All entries, also those of attachments without a record.
    pub fn entries(&self) -> Result<Vec<PathBuf>, CniError> {
        cache::list(&self.inner.options.cache_dir)
    }

    /// Runs ADD of each plugin. After an error some may have completed: [`delete`] undoes them.
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

/// Runs CHECK of each plugin. Succeeds for plugins of versions without CHECK.
pub async fn check(path: &Path, netns: &Path) -> Result<(), CniError> {
    let lock = Lock::take(path).await?;
    let Some(entry) = Entry::read(path).await? else {
        return Err(CniError::NoEntry(path.to_owned()));
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

/// Runs DEL of each plugin, the last one first, and removes the entry. `netns` is `None` when the namespace is gone.
/// Continues after errors, returns all of them and keeps the entry then. Idempotent: without an entry there is nothing
/// to undo. Needs only the entry.
pub async fn delete(path: &Path, netns: Option<&Path>) -> Result<(), CniError> {
    let lock = Lock::take(path).await?;
    let Some(entry) = Entry::read(path).await? else {
        lock.remove();
        return Ok(());
    };
    let configuration = entry.configuration()?;
    let none = Value::Null;
    let result = entry.result().filter(|_| configuration.passes_result_to_del());
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
    cache::remove(path).await?;
    lock.remove();
    Ok(())
}
