//! What an agent has recorded outside of itself, as JSON.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, Node};
use kni_store::Store;
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition, TableError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{cni::scene::PENDING, providers::scene::CACHE};

const STATE: &str = "/run/kni/state.redb";
const PINS: &str = "/sys/fs/bpf/kni";

/// The tables of the state file whose keys are text.
const NAMED: [&str; 4] = ["sandboxes", "namespaces", "networks", "uplink"];
/// The table whose keys are numbers of endpoints.
const REMOVALS: &str = "removals";
/// Every kind of interface, as a record names it.
const KINDS: [&str; 5] = ["Veth", "Macvlan", "HostDevice", "Tap", "Cni"];

type Rows = BTreeMap<String, BTreeMap<String, Value>>;

/// What an agent has recorded.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Recorded {
    /// Rows of the state file, by table and key.
    tables: Rows,
    /// Files of the agent's CNI backend and of the CNI plugin, by folder.
    files: BTreeMap<String, Vec<Value>>,
    /// Name of the folder of the pinned maps: their layout.
    #[serde(default = "layout_2")]
    layout: String,
    /// Pinned maps, by name.
    maps: BTreeMap<String, Map>,
}

/// That of a fixture which does not name it.
fn layout_2() -> String {
    "v2".to_owned()
}

/// The properties of a map that programs and tools rely on.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Map {
    kind: String,
    key_size: u64,
    value_size: u64,
    /// The types of key and value, a line per type and field.
    types: Vec<String>,
}

fn named(table: &'static str) -> TableDefinition<'static, &'static str, &'static [u8]> {
    TableDefinition::new(table)
}

fn numbered(table: &'static str) -> TableDefinition<'static, u32, &'static [u8]> {
    TableDefinition::new(table)
}

impl Recorded {
    fn path() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/upgrade.json")
    }

    /// What the agent of the earlier release recorded.
    pub(super) fn fixture() -> Result<Self> {
        let path = Self::path();
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(serde_json::from_str(&text)?)
    }

    pub(super) fn write_fixture(&self) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        Ok(fs::write(Self::path(), text)?)
    }

    /// What the agent of a node has recorded. It must not run: the state file is its own.
    pub(super) fn take(node: &Node) -> Result<Self> {
        let bytes = node.enter(|| fs::read(STATE))?.context(STATE)?;
        let folder = tempfile::tempdir()?;
        let copy = folder.path().join("state.redb");
        fs::write(&copy, bytes)?;
        let files = [CACHE, PENDING].map(|at| Ok::<_, anyhow::Error>((at.to_owned(), json_files(node, at)?)));
        let pinned = maps(node)?.into_iter();
        let described = pinned.map(|(name, _id)| Ok::<_, anyhow::Error>((name.clone(), describe(node, &name)?)));
        Ok(Self {
            tables: read_tables(&copy)?,
            files: files.into_iter().collect::<Result<_>>()?,
            layout: layout(node)?,
            maps: described.collect::<Result<_>>()?,
        })
    }

    /// Fails where the fixture has no example of something that a release may rename.
    pub(super) fn assert_complete(&self) -> Result<()> {
        for table in NAMED.iter().chain([&REMOVALS]) {
            ensure!(!self.tables[*table].is_empty(), "no row of {table}");
        }
        let text = serde_json::to_string(&self.tables["sandboxes"])?;
        for kind in KINDS {
            ensure!(text.contains(&format!("\"{kind}\"")), "no interface of kind {kind}");
        }
        let uses = serde_json::to_string(&self.tables["namespaces"])?;
        for used_by in ["Warm", "Given", "Bound"] {
            ensure!(
                uses.contains(&format!("\"{used_by}\"")),
                "no namespace of use {used_by}"
            );
        }
        ensure!(
            self.files.values().all(|files| !files.is_empty()),
            "a folder without files"
        );
        Ok(())
    }

    /// Writes the rows into a new state file in `folder`.
    pub(super) fn write_state(&self, folder: &Path) -> Result<()> {
        let database = Database::create(folder.join("state.redb"))?;
        let transaction = database.begin_write()?;
        for table in NAMED {
            let mut open = transaction.open_table(named(table))?;
            for (key, row) in &self.tables[table] {
                open.insert(key.as_str(), &*serde_json::to_vec(row)?)?;
            }
        }
        {
            let mut open = transaction.open_table(numbered(REMOVALS))?;
            for (key, row) in &self.tables[REMOVALS] {
                open.insert(key.parse::<u32>()?, &*serde_json::to_vec(row)?)?;
            }
        }
        Ok(transaction.commit()?)
    }

    /// Rows and fields of these that are not in `read`, or differ there.
    pub(super) fn missing_rows(&self, read: &Rows) -> Vec<String> {
        let mut missing = Vec::new();
        compare("", &json!(self.tables), &json!(read), &mut missing);
        missing
    }

    /// Fields of rows and files, and maps of the same layout, that `now` has none of; values may differ.
    pub(super) fn missing_in_shape_of(&self, now: &Self) -> Vec<String> {
        let mut missing = Vec::new();
        for (table, rows) in &self.tables {
            // When an agent is killed, one interface more or less is about to go.
            if table != REMOVALS {
                missing_fields(table, rows.values(), now.tables[table].values(), &mut missing);
            }
        }
        for (folder, files) in &self.files {
            missing_fields(folder, files, &now.files[folder], &mut missing);
        }
        for (name, map) in &self.maps {
            if now.layout == self.layout && now.maps.get(name) != Some(map) {
                missing.push(format!("map {name}: {map:?}, now {:?}", now.maps.get(name)));
            }
        }
        missing
    }
}

/// The rows of a state file, as the store of this release reads them and would write them.
pub(super) fn rows(folder: &Path) -> Result<Rows> {
    let contents = Store::open(folder)?.load(None)?;
    let mut tables = Rows::new();
    let mut put = |table: &str, key: String, record: Value| {
        let row = json!({ "version": 1, "record": record });
        tables.entry(table.to_owned()).or_default().insert(key, row);
    };
    for sandbox in &contents.sandboxes {
        put("sandboxes", sandbox.id.to_string(), serde_json::to_value(sandbox)?);
    }
    for namespace in &contents.namespaces {
        put(
            "namespaces",
            namespace.path.display().to_string(),
            serde_json::to_value(namespace)?,
        );
    }
    for network in &contents.networks {
        put(
            "networks",
            network.spec.name.to_string(),
            serde_json::to_value(network)?,
        );
    }
    for removal in &contents.removals {
        put(REMOVALS, removal.endpoint.to_string(), serde_json::to_value(removal)?);
    }
    put("uplink", "uplink".to_owned(), serde_json::to_value(&contents.uplink)?);
    Ok(tables)
}

/// The folder of the pinned maps: a `v` and the layout's number.
pub(super) fn layout(node: &Node) -> Result<String> {
    let names = node.enter(|| names(Path::new(PINS)))??;
    let layout = names.into_iter().find(|name| name.starts_with('v'));
    layout.context("no pinned maps")
}

fn names(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = fs::read_dir(folder)?.filter_map(Result::ok);
    Ok(entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

fn pin(node: &Node, name: &str) -> Result<String> {
    Ok(format!("{PINS}/{}/{name}", layout(node)?))
}

/// The pinned maps by name, and the kernel's number of each.
pub(super) fn maps(node: &Node) -> Result<BTreeMap<String, u64>> {
    let folder = Path::new(PINS).join(layout(node)?);
    let names = node.enter(|| names(&folder))??;
    names
        .into_iter()
        .map(|name| {
            let shown: Value = bpftool(node, &["map", "show", "pinned", &pin(node, &name)?])?;
            let id = shown["id"].as_u64().context("a map without a number")?;
            Ok((name, id))
        })
        .collect()
}

fn describe(node: &Node, name: &str) -> Result<Map> {
    let path = pin(node, name)?;
    let shown: Value = bpftool(node, &["map", "show", "pinned", &path])?;
    let number = |field: &str| {
        shown[field]
            .as_u64()
            .with_context(|| format!("{field} of {name}: {shown}"))
    };
    let types: Value = bpftool(node, &["btf", "dump", "map", "pinned", &path, "kv"]).unwrap_or_default();
    let types = types["types"].as_array().cloned().unwrap_or_default();
    Ok(Map {
        kind: shown["type"].as_str().context("a map without a type")?.to_owned(),
        key_size: number("bytes_key")?,
        value_size: number("bytes_value")?,
        types: types.iter().map(type_line).collect(),
    })
}

/// A type's name, its size, and its fields with their places. Numbers of types change with every build.
fn type_line(shown: &Value) -> String {
    let members = shown["members"].as_array().cloned().unwrap_or_default();
    let fields = members
        .iter()
        .map(|member| format!(" {}@{}", member["name"], member["bits_offset"]));
    format!(
        "{} {} {}{}",
        shown["kind"],
        shown["name"],
        shown["size"],
        fields.collect::<String>()
    )
}

fn bpftool<T: DeserializeOwned>(node: &Node, args: &[&str]) -> Result<T> {
    let shown = node.run("bpftool", &[&["-j"], args].concat())?;
    serde_json::from_str(&shown).with_context(|| format!("bpftool {args:?}: {shown}"))
}

fn json_files(ns: &Namespaces, folder: &str) -> Result<Vec<Value>> {
    let texts = ns.enter(|| -> std::io::Result<Vec<String>> {
        let mut paths: Vec<_> = fs::read_dir(folder)?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .collect();
        paths.retain(|path| path.extension().is_some_and(|ending| ending == "json"));
        paths.sort();
        paths.iter().map(fs::read_to_string).collect()
    })?;
    let texts = texts.with_context(|| folder.to_owned())?;
    texts.iter().map(|text| Ok(serde_json::from_str(text)?)).collect()
}

fn read_tables(file: &Path) -> Result<Rows> {
    let database = Database::create(file)?;
    let read = database.begin_read()?;
    let mut tables = Rows::new();
    for table in NAMED {
        let rows = tables.entry(table.to_owned()).or_default();
        for row in read.open_table(named(table))?.iter()? {
            let (key, value) = row?;
            rows.insert(key.value().to_owned(), serde_json::from_slice(value.value())?);
        }
    }
    let rows = tables.entry(REMOVALS.to_owned()).or_default();
    let removals = match read.open_table(numbered(REMOVALS)) {
        // No interface was about to go when the file was written, which is some time after a change.
        Err(TableError::TableDoesNotExist(_)) => return Ok(tables),
        found => found?,
    };
    for row in removals.iter()? {
        let (key, value) = row?;
        rows.insert(key.value().to_string(), serde_json::from_slice(value.value())?);
    }
    Ok(tables)
}

/// Every field of `old` is in `new` with the same value; `new` may have more fields.
fn compare(at: &str, old: &Value, new: &Value, missing: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in old {
                let at = format!("{at}/{key}");
                match new.get(key) {
                    Some(found) => compare(&at, value, found, missing),
                    None => missing.push(format!("{at}: {value}")),
                }
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            for (position, (old, new)) in old.iter().zip(new).enumerate() {
                compare(&format!("{at}/{position}"), old, new, missing);
            }
        }
        (old, new) if old == new => {}
        (old, new) => missing.push(format!("{at}: {old}, now {new}")),
    }
}

fn missing_fields<'a>(
    at: &str,
    old: impl IntoIterator<Item = &'a Value>,
    new: impl IntoIterator<Item = &'a Value>,
    missing: &mut Vec<String>,
) {
    let fields = |values: &mut dyn Iterator<Item = &'a Value>| {
        let mut found = BTreeSet::new();
        values.for_each(|value| collect_fields("", value, &mut found));
        found
    };
    let (old, new) = (fields(&mut old.into_iter()), fields(&mut new.into_iter()));
    missing.extend(old.difference(&new).map(|field| format!("{at}: {field}")));
}

/// Paths of all fields. Keys that are data, such as labels, are not fields: they are the same in both runs.
fn collect_fields(at: &str, value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let at = format!("{at}/{key}");
                found.insert(at.clone());
                collect_fields(&at, value, found);
            }
        }
        Value::Array(values) => values
            .iter()
            .for_each(|value| collect_fields(&format!("{at}[]"), value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
