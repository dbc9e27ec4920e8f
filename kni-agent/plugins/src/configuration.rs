//! Finds and parses network configurations. All other fields of a plugin's part are passed on as they are.

use std::{
    collections::BTreeSet,
    fs, io,
    io::Read as _,
    path::{Path, PathBuf},
};

use kni_model::provider::CniSource;
use serde_json::{Map, Value};

use super::{
    configuration_error::{ConfigurationError, MAX_PLUGINS, VERSIONS},
    error::CniError,
};

/// First version with CHECK, and with the result as input of DEL.
const WITH_CHECK: &str = "0.4.0";
/// Version of a configuration that contains none.
const OLDEST: &str = "0.3.0";
/// Largest file, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// KNI's own shim, which would call the agent again.
const OWN_SHIM: [&str; 2] = ["kni-cni", "kni-shim"];

/// A configuration: a name and a chain of plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    name: String,
    version: String,
    disable_check: bool,
    plugins: Vec<Plugin>,
    whole: Value,
}

/// One plugin of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plugin {
    kind: String,
    capabilities: BTreeSet<String>,
    fields: Map<String, Value>,
}

impl Configuration {
    /// Its name, which is also the network's name for the plugins.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version that is passed to the plugins.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    pub(super) fn plugins(&self) -> &[Plugin] {
        &self.plugins
    }

    /// The JSON that was read.
    pub(super) fn whole(&self) -> &Value {
        &self.whole
    }

    /// Capabilities that any of its plugins declares.
    pub fn capabilities(&self) -> BTreeSet<String> {
        self.plugins
            .iter()
            .flat_map(|plugin| plugin.capabilities.clone())
            .collect()
    }

    pub(super) fn can_check(&self) -> bool {
        !self.disable_check && self.is_at_least(WITH_CHECK)
    }

    pub(super) fn passes_result_to_del(&self) -> bool {
        self.is_at_least(WITH_CHECK)
    }

    fn is_at_least(&self, version: &str) -> bool {
        let age = |version: &str| VERSIONS.iter().position(|known| *known == version);
        age(&self.version) >= age(version)
    }

    /// Parses a configuration; one without a list of plugins is a list of one.
    pub(super) fn read(whole: &Value) -> Result<Self, ConfigurationError> {
        let object = whole.as_object().ok_or(ConfigurationError::NotAnObject)?;
        let name = object.get("name").and_then(Value::as_str).unwrap_or_default();
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || !name.chars().all(legal) {
            return Err(ConfigurationError::Name(name.to_owned()));
        }
        let plugins = match object.get("plugins") {
            Some(Value::Array(list)) => list.iter().map(Plugin::read).collect::<Result<Vec<_>, _>>()?,
            Some(_) => return Err(ConfigurationError::PluginsNotAList),
            None => vec![Plugin::read(whole)?],
        };
        if plugins.is_empty() || plugins.len() > MAX_PLUGINS {
            return Err(ConfigurationError::PluginCount(plugins.len()));
        }
        Ok(Self {
            name: name.to_owned(),
            version: version(object)?,
            disable_check: object.get("disableCheck").is_some_and(is_true),
            plugins,
            whole: whole.clone(),
        })
    }
}

impl Plugin {
    /// Its `type`: the name of the program.
    pub(super) fn kind(&self) -> &str {
        &self.kind
    }

    pub(super) fn declares(&self, capability: &str) -> bool {
        self.capabilities.contains(capability)
    }

    pub(super) fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    fn read(value: &Value) -> Result<Self, ConfigurationError> {
        let fields = value.as_object().ok_or(ConfigurationError::PluginNotAnObject)?;
        let kind = fields.get("type").and_then(Value::as_str).unwrap_or_default();
        if kind.is_empty() || kind.contains('/') || kind == ".." || kind == "." {
            return Err(ConfigurationError::PluginType(kind.to_owned()));
        }
        if OWN_SHIM.contains(&kind) {
            return Err(ConfigurationError::OwnShim(kind.to_owned()));
        }
        let declared = fields.get("capabilities").and_then(Value::as_object);
        Ok(Self {
            kind: kind.to_owned(),
            capabilities: declared
                .into_iter()
                .flatten()
                .filter(|(_, declared)| is_true(declared))
                .map(|(capability, _)| capability.clone())
                .collect(),
            fields: fields.clone(),
        })
    }
}

/// Old configurations have a string.
fn is_true(value: &Value) -> bool {
    value.as_bool().unwrap_or(false) || value.as_str() == Some("true")
}

/// `cniVersion`, or the newest supported one of `cniVersions`.
fn version(object: &Map<String, Value>) -> Result<String, ConfigurationError> {
    let listed = object.get("cniVersions").and_then(Value::as_array);
    let single = object.get("cniVersion").and_then(Value::as_str);
    let given: Vec<&str> = listed
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .chain(single)
        .collect();
    let newest = VERSIONS.iter().rev().find(|known| given.contains(known));
    match newest {
        Some(version) => Ok((*version).to_owned()),
        None if given.is_empty() => Ok(OLDEST.to_owned()),
        None => Err(ConfigurationError::Version(given.join(", "))),
    }
}

/// The configuration of a source. Files are read in the order of their names; an invalid file is an error only if the
/// source refers to it.
pub(super) fn find(dir: &Path, source: &CniSource) -> Result<Configuration, CniError> {
    let missing = || CniError::NotFound {
        what: source.to_string(),
        dir: dir.to_owned(),
    };
    match source {
        CniSource::File(file) => match read_file(&dir.join(file)) {
            Err(CniError::Entry { source, .. }) if source.kind() == io::ErrorKind::NotFound => Err(missing()),
            read => read,
        },
        CniSource::Name(name) => {
            let mut broken = None;
            for file in files(dir) {
                match read_file(&file) {
                    Ok(found) if found.name == *name => return Ok(found),
                    Ok(_other) => {}
                    // The file contains the name, so it probably is the requested one.
                    Err(error) if mentions(&file, name) => broken = Some(error),
                    Err(_other) => {}
                }
            }
            Err(broken.unwrap_or_else(missing))
        }
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let extensions = ["conf", "conflist", "json"];
    let is_configuration = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| extensions.iter().any(|known| extension == *known))
    };
    let mut files: Vec<PathBuf> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(is_configuration)
        .collect();
    files.sort();
    files
}

fn read_file(file: &Path) -> Result<Configuration, CniError> {
    let invalid = |source: ConfigurationError| CniError::Invalid {
        file: file.to_owned(),
        source,
    };
    let text = text_of(file).map_err(|source| CniError::Entry {
        path: file.to_owned(),
        source,
    })?;
    let whole = serde_json::from_str(&text).map_err(|error| invalid(ConfigurationError::NotJson(error)))?;
    Configuration::read(&whole).map_err(invalid)
}

fn text_of(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(file)?.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

fn mentions(file: &Path, name: &str) -> bool {
    text_of(file).is_ok_and(|text| text.contains(&format!("\"{name}\"")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chain() -> Value {
        json!({
            "cniVersion": "0.4.0", "name": "cbr0", "vendor": 7,
            "plugins": [
                { "type": "bridge", "bridge": "cni0", "ipam": { "type": "host-local" } },
                { "type": "portmap", "capabilities": { "portMappings": true, "dns": false } },
            ],
        })
    }

    #[test]
    fn a_chain_keeps_unknown_fields() {
        let read = Configuration::read(&chain()).unwrap();
        assert_eq!((read.name(), read.version()), ("cbr0", "0.4.0"));
        let kinds: Vec<_> = read.plugins().iter().map(Plugin::kind).collect();
        assert_eq!(kinds, ["bridge", "portmap"]);
        assert_eq!(read.plugins()[0].fields()["ipam"]["type"], "host-local");
        assert_eq!(read.capabilities(), ["portMappings".to_owned()].into());
        assert!(read.plugins()[1].declares("portMappings") && !read.plugins()[0].declares("portMappings"));
        assert!(read.can_check() && read.passes_result_to_del());
    }

    #[test]
    fn one_plugin_is_a_chain_of_one() {
        let read = Configuration::read(&json!({ "cniVersion": "0.3.1", "name": "a", "type": "ptp" })).unwrap();
        assert_eq!(read.plugins().len(), 1);
        assert!(!read.can_check() && !read.passes_result_to_del());
    }

    #[test]
    fn versions() {
        let with = |versions: Value| {
            let mut whole = chain();
            whole["cniVersions"] = versions;
            Configuration::read(&whole).map(|read| read.version().to_owned())
        };
        assert_eq!(with(json!(["1.1.0", "9.0.0"])).unwrap(), "1.1.0");
        assert_eq!(with(json!(["9.0.0"])).unwrap(), "0.4.0");
        let mut old = chain();
        old["cniVersion"] = json!("0.2.0");
        assert!(Configuration::read(&old).unwrap_err().to_string().contains("0.2.0"));
    }

    #[test]
    fn invalid_configurations_are_rejected() {
        for (field, value, why) in [
            ("name", json!("../x"), "name"),
            ("name", Value::Null, "name"),
            ("plugins", json!([]), "0 plugins"),
            ("plugins", json!({}), "not a list"),
            ("plugins", json!([{ "type": "../sh" }]), "name of a program"),
            ("plugins", json!([{ "type": "kni-cni" }]), "own shim"),
        ] {
            let mut whole = chain();
            whole[field] = value;
            let error = Configuration::read(&whole).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn found_by_name_or_by_file() {
        let dir = tempfile::tempdir().unwrap();
        let name = CniSource::Name("cbr0".to_owned());
        assert!(matches!(find(dir.path(), &name), Err(CniError::NotFound { .. })));
        fs::write(dir.path().join("05-broken.conflist"), "{").unwrap();
        fs::write(dir.path().join("10-flannel.conflist"), chain().to_string()).unwrap();
        fs::write(dir.path().join("20-old.conflist.bak"), "{").unwrap();
        assert_eq!(find(dir.path(), &name).unwrap().name(), "cbr0");
        let file = |file: &str| find(dir.path(), &CniSource::File(file.to_owned()));
        assert_eq!(file("10-flannel.conflist").unwrap().name(), "cbr0");
        assert!(matches!(file("05-broken.conflist"), Err(CniError::Invalid { .. })));
        assert!(matches!(file("99-none.conf"), Err(CniError::NotFound { .. })));
        fs::write(
            dir.path().join("10-flannel.conflist"),
            r#"{"name": "cbr0", "plugins": 7}"#,
        )
        .unwrap();
        assert!(matches!(find(dir.path(), &name), Err(CniError::Invalid { .. })));
    }
}
