//! Remembers, across restarts of the agent but not of the node, what was promised and what must be cleaned up.
//! Layer: driver.
//!
//! One redb file on tmpfs. Each row is JSON with a version, so that a newer agent can read an older one's rows.
//! A commit is complete when the call returns: killing the agent at any instant loses nothing (I5).

mod record;

use std::{
    fs,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use kni_model::{Network, Sandbox, SandboxId};
pub use record::{NamespaceRecord, NamespaceUse, Removal, UplinkRecord, WarmInterface};
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition, WriteTransaction};
use serde::{Serialize, de::DeserializeOwned};

const SANDBOXES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("sandboxes");
const NAMESPACES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("namespaces");
const REMOVALS: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("removals");
const NETWORKS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("networks");
const UPLINK: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("uplink");
/// The only key of [`UPLINK`].
const THE_UPLINK: &str = "uplink";

/// Version of the rows.
const RECORD_VERSION: u32 = 1;

/// How long a starting agent waits for its predecessor to let go of the file (rolling update).
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Why the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another agent has the file.
    #[error("{}: another kni-agent uses it", .0.display())]
    InUse(PathBuf),
    /// The folder or file cannot be made.
    #[error("{}: {source}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The database refused.
    #[error("state database: {0}")]
    Database(#[from] Box<redb::Error>),
    /// A row cannot be read.
    #[error("state row {table}/{key}: {reason}")]
    Record {
        /// Table.
        table: &'static str,
        /// Key.
        key: String,
        /// Why.
        reason: String,
    },
}

fn database<E: Into<redb::Error>>(error: E) -> StoreError {
    StoreError::Database(Box::new(error.into()))
}

#[derive(Serialize, serde::Deserialize)]
struct Versioned<T> {
    version: u32,
    record: T,
}

/// Everything the store holds, as read at start.
#[derive(Debug, Default)]
pub struct Contents {
    /// Sandboxes by id.
    pub sandboxes: Vec<Sandbox>,
    /// Namespaces that the agent made.
    pub namespaces: Vec<NamespaceRecord>,
    /// Interfaces that still have to go.
    pub removals: Vec<Removal>,
    /// Networks as they were last in force, also those that no longer exist: their numbers are never given again.
    pub networks: Vec<Network>,
    /// What the agent has put at the uplink.
    pub uplink: UplinkRecord,
}

/// A set of changes that happens whole or not at all.
#[derive(Debug, Default, Clone)]
pub struct Change {
    puts: Vec<Put>,
}

#[derive(Debug, Clone)]
enum Put {
    Sandbox(Box<Sandbox>),
    ForgetSandbox(SandboxId),
    Namespace(NamespaceRecord),
    ForgetNamespace(PathBuf),
    Removal(Removal),
    ForgetRemoval(u32),
    Network(Box<Network>),
    Uplink(UplinkRecord),
}

impl Change {
    /// No change yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Writes a sandbox.
    #[must_use]
    pub fn sandbox(mut self, sandbox: &Sandbox) -> Self {
        self.puts.push(Put::Sandbox(Box::new(sandbox.clone())));
        self
    }
    /// Forgets a sandbox.
    #[must_use]
    pub fn forget_sandbox(mut self, id: &SandboxId) -> Self {
        self.puts.push(Put::ForgetSandbox(id.clone()));
        self
    }
    /// Writes a namespace.
    #[must_use]
    pub fn namespace(mut self, record: &NamespaceRecord) -> Self {
        self.puts.push(Put::Namespace(record.clone()));
        self
    }
    /// Forgets a namespace.
    #[must_use]
    pub fn forget_namespace(mut self, path: &Path) -> Self {
        self.puts.push(Put::ForgetNamespace(path.to_owned()));
        self
    }
    /// Writes an interface that has to go.
    #[must_use]
    pub fn removal(mut self, removal: &Removal) -> Self {
        self.puts.push(Put::Removal(removal.clone()));
        self
    }
    /// Forgets an interface that is gone.
    #[must_use]
    pub fn forget_removal(mut self, removal: &Removal) -> Self {
        self.puts.push(Put::ForgetRemoval(removal.endpoint.0));
        self
    }
    /// Writes a network.
    #[must_use]
    pub fn network(mut self, network: &Network) -> Self {
        self.puts.push(Put::Network(Box::new(network.clone())));
        self
    }
    /// Writes what the agent has put at the uplink.
    #[must_use]
    pub fn uplink(mut self, record: &UplinkRecord) -> Self {
        self.puts.push(Put::Uplink(record.clone()));
        self
    }
}

/// The state file. Clones share it.
#[derive(Debug, Clone)]
pub struct Store {
    database: Arc<Database>,
}

impl Store {
    /// Opens or makes the file `state.redb` in `dir` (0700). Waits up to 10 s for another agent to end.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Path { path, source }
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(at(dir))?;
        let path = dir.join("state.redb");
        let deadline = Instant::now() + LOCK_WAIT;
        let database = loop {
            match Database::create(&path) {
                Err(redb::DatabaseError::DatabaseAlreadyOpen) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(redb::DatabaseError::DatabaseAlreadyOpen) => return Err(StoreError::InUse(path)),
                other => break other.map_err(database)?,
            }
        };
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(at(&path))?;
        Ok(Self {
            database: Arc::new(database),
        })
    }

    /// Reads everything.
    pub fn load(&self) -> Result<Contents, StoreError> {
        // Opening a table in a write transaction makes it, so that an empty file reads as empty.
        let transaction = self.database.begin_write().map_err(database)?;
        for table in [SANDBOXES, NAMESPACES, NETWORKS, UPLINK] {
            transaction.open_table(table).map_err(database)?;
        }
        transaction.open_table(REMOVALS).map_err(database)?;
        transaction.commit().map_err(database)?;

        let read = self.database.begin_read().map_err(database)?;
        let mut contents = Contents::default();
        for row in read.open_table(SANDBOXES).map_err(database)?.iter().map_err(database)? {
            let (key, value) = row.map_err(database)?;
            contents
                .sandboxes
                .push(decode("sandboxes", key.value(), value.value())?);
        }
        for row in read
            .open_table(NAMESPACES)
            .map_err(database)?
            .iter()
            .map_err(database)?
        {
            let (key, value) = row.map_err(database)?;
            contents
                .namespaces
                .push(decode("namespaces", key.value(), value.value())?);
        }
        for row in read.open_table(REMOVALS).map_err(database)?.iter().map_err(database)? {
            let (key, value) = row.map_err(database)?;
            contents
                .removals
                .push(decode("removals", &key.value().to_string(), value.value())?);
        }
        for row in read.open_table(NETWORKS).map_err(database)?.iter().map_err(database)? {
            let (key, value) = row.map_err(database)?;
            contents.networks.push(decode("networks", key.value(), value.value())?);
        }
        if let Some(value) = read
            .open_table(UPLINK)
            .map_err(database)?
            .get(THE_UPLINK)
            .map_err(database)?
        {
            contents.uplink = decode("uplink", THE_UPLINK, value.value())?;
        }
        Ok(contents)
    }

    /// Carries a change out; it is durable when this returns.
    pub fn commit(&self, change: Change) -> Result<(), StoreError> {
        let transaction = self.database.begin_write().map_err(database)?;
        for put in change.puts {
            apply(&transaction, put)?;
        }
        transaction.commit().map_err(database)
    }
}

fn apply(transaction: &WriteTransaction, put: Put) -> Result<(), StoreError> {
    match put {
        Put::Sandbox(sandbox) => {
            let bytes = encode("sandboxes", sandbox.id.as_str(), &*sandbox)?;
            let mut table = transaction.open_table(SANDBOXES).map_err(database)?;
            table.insert(sandbox.id.as_str(), bytes.as_slice()).map_err(database)?;
        }
        Put::ForgetSandbox(id) => {
            let mut table = transaction.open_table(SANDBOXES).map_err(database)?;
            table.remove(id.as_str()).map_err(database)?;
        }
        Put::Namespace(record) => {
            let key = record.path.to_string_lossy().into_owned();
            let bytes = encode("namespaces", &key, &record)?;
            let mut table = transaction.open_table(NAMESPACES).map_err(database)?;
            table.insert(key.as_str(), bytes.as_slice()).map_err(database)?;
        }
        Put::ForgetNamespace(path) => {
            let mut table = transaction.open_table(NAMESPACES).map_err(database)?;
            table.remove(path.to_string_lossy().as_ref()).map_err(database)?;
        }
        Put::Removal(removal) => {
            let bytes = encode("removals", &removal.endpoint.to_string(), &removal)?;
            let mut table = transaction.open_table(REMOVALS).map_err(database)?;
            table.insert(removal.endpoint.0, bytes.as_slice()).map_err(database)?;
        }
        Put::ForgetRemoval(endpoint) => {
            let mut table = transaction.open_table(REMOVALS).map_err(database)?;
            table.remove(endpoint).map_err(database)?;
        }
        Put::Network(network) => {
            let name = network.spec.name.as_str();
            let bytes = encode("networks", name, &*network)?;
            let mut table = transaction.open_table(NETWORKS).map_err(database)?;
            table.insert(name, bytes.as_slice()).map_err(database)?;
        }
        Put::Uplink(record) => {
            let bytes = encode("uplink", THE_UPLINK, &record)?;
            let mut table = transaction.open_table(UPLINK).map_err(database)?;
            table.insert(THE_UPLINK, bytes.as_slice()).map_err(database)?;
        }
    }
    Ok(())
}

fn encode<T: Serialize>(table: &'static str, key: &str, record: &T) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(&Versioned {
        version: RECORD_VERSION,
        record,
    })
    .map_err(|error| StoreError::Record {
        table,
        key: key.to_owned(),
        reason: error.to_string(),
    })
}

fn decode<T: DeserializeOwned>(table: &'static str, key: &str, bytes: &[u8]) -> Result<T, StoreError> {
    let refuse = |reason: String| StoreError::Record {
        table,
        key: key.to_owned(),
        reason,
    };
    let versioned: Versioned<T> = serde_json::from_slice(bytes).map_err(|error| refuse(error.to_string()))?;
    if versioned.version == RECORD_VERSION {
        Ok(versioned.record)
    } else {
        Err(refuse(format!(
            "version {}, this agent reads {RECORD_VERSION}",
            versioned.version
        )))
    }
}

#[cfg(test)]
mod tests {
    use kni_model::{EndpointId, NetnsIdentity, NetworkSpec, Phase, PodRef};

    use super::*;

    fn sandbox(id: &str) -> Sandbox {
        Sandbox {
            id: id.parse().unwrap(),
            pod: PodRef {
                namespace: "ns".into(),
                name: "pod".into(),
                uid: "u".into(),
            },
            phase: Phase::Pending,
            netns: "/run/netns/x".into(),
            netns_identity: NetnsIdentity { dev: 4, inode: 5 },
            labels: [("a".to_owned(), "b".to_owned())].into(),
            port_mappings: Vec::new(),
            container_ports: Vec::new(),
            attachments: Vec::new(),
            cni: None,
            parent: None,
        }
    }

    fn network(name: &str, id: u32) -> Network {
        let spec = NetworkSpec {
            name: name.parse().unwrap(),
            default: true,
            enabled: true,
            subnets: vec!["10.0.0.0/24".parse().unwrap()],
            exclude_subnets: Vec::new(),
            mtu: 1500,
            egress: kni_model::network::EgressMode::Route,
            egress_addresses: Vec::new(),
            service_subnets: Vec::new(),
            xdp: false,
            provider: kni_model::Provider::Ebpf,
            blocks: None,
        };
        Network {
            id: id.try_into().unwrap(),
            spec,
        }
    }

    fn removal(endpoint: u32) -> Removal {
        Removal {
            endpoint: EndpointId(endpoint),
            host_ifname: "kni1".parse().unwrap(),
            host_ifindex: 7,
            netns: None,
        }
    }

    #[test]
    fn what_was_committed_is_there_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let blue = network("blue", 9);
        let uplink = UplinkRecord {
            ifname: "eth0".to_owned(),
            ifindex: 2,
            addresses: ["192.0.2.7".parse().unwrap()].into(),
        };
        {
            let store = Store::open(dir.path()).unwrap();
            assert!(store.load().unwrap().sandboxes.is_empty());
            assert_eq!(store.load().unwrap().uplink, UplinkRecord::default());
            store
                .commit(
                    Change::new()
                        .sandbox(&sandbox("one"))
                        .sandbox(&sandbox("two"))
                        .removal(&removal(3)),
                )
                .unwrap();
            store
                .commit(
                    Change::new()
                        .forget_sandbox(&"one".parse().unwrap())
                        .removal(&removal(4)),
                )
                .unwrap();
            store
                .commit(Change::new().forget_removal(&removal(3)).network(&blue).uplink(&uplink))
                .unwrap();
        }
        let contents = Store::open(dir.path()).unwrap().load().unwrap();
        assert_eq!(contents.sandboxes, [sandbox("two")]);
        assert_eq!(contents.removals, [removal(4)]);
        assert_eq!(contents.networks, [blue]);
        assert_eq!(contents.uplink, uplink);
    }

    #[test]
    fn sandboxes_of_an_agent_that_knew_no_policy_have_no_container_ports() {
        let mut row = serde_json::to_value(sandbox("old")).unwrap();
        assert!(row.as_object_mut().unwrap().remove("container_ports").is_some());
        let bytes = serde_json::to_vec(&Versioned {
            version: 1,
            record: row,
        })
        .unwrap();
        assert_eq!(decode::<Sandbox>("sandboxes", "old", &bytes).unwrap(), sandbox("old"));
    }

    #[test]
    fn the_file_is_for_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let _store = Store::open(&state).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&state), 0o700);
        assert_eq!(mode(&state.join("state.redb")), 0o600);
    }

    #[test]
    fn rows_of_another_version_are_refused_by_name() {
        let bytes = serde_json::to_vec(&Versioned {
            version: 99,
            record: removal(1),
        })
        .unwrap();
        let error = decode::<Removal>("removals", "1", &bytes).unwrap_err().to_string();
        assert!(error.contains("removals/1") && error.contains("99"), "{error}");
    }
}
