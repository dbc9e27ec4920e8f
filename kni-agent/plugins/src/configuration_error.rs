//! Defines why the configuration of plugins is not valid.

/// Supported versions of the specification, the oldest first.
pub(super) const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// Most plugins of one configuration.
pub(super) const MAX_PLUGINS: usize = 32;

/// Why a configuration is not valid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigurationError {
    /// The file is not JSON.
    #[error("is not JSON: {0}")]
    NotJson(#[source] serde_json::Error),
    /// The configuration is not an object.
    #[error("is not a JSON object")]
    NotAnObject,
    /// The name has other characters than the specification allows.
    #[error("name {0:?} is not letters, digits, '_', '.' and '-', beginning with one of the former")]
    Name(String),
    /// `plugins` is not a list.
    #[error("plugins is not a list")]
    PluginsNotAList,
    /// There are too few or too many plugins.
    #[error("has {0} plugins, not 1 to {MAX_PLUGINS}")]
    PluginCount(usize),
    /// A plugin is not an object.
    #[error("a plugin is not a JSON object")]
    PluginNotAnObject,
    /// The type of a plugin is not a file name.
    #[error("type {0:?} of a plugin is not the name of a program")]
    PluginType(String),
    /// A plugin is KNI's own shim.
    #[error("plugin {0} is this agent's own shim, which would call the agent again")]
    OwnShim(String),
    /// No version is supported.
    #[error("cniVersion {0} is none of {versions}", versions = VERSIONS.join(", "))]
    Version(String),
}
