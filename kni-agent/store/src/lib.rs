//! Keeps the agent's records across restarts of the agent, but not of the node.
//! Layer: driver.
//!
//! One redb file on tmpfs. Each row is JSON with a version, so that a newer agent can read an older one's rows. A
//! commit is complete when the call returns: killing the agent at any time loses nothing (I5).

mod error;
mod record;
mod table;

use std::{
    fs,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

pub use error::StoreError;
use kni_model::{Network, Sandbox, SandboxId};
pub use record::{NamespaceRecord, NamespaceUse, Removal, UplinkRecord, WarmInterface};
use redb::{Database, ReadableDatabase as _};

use self::table::{Edit, NAMESPACES, NETWORKS, REMOVALS, SANDBOXES, UPLINK};

/// The only key of [`UPLINK`].
const UPLINK_KEY: &str = "uplink";

/// How long a starting agent waits for its predecessor to close the file (rolling update).
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// All records, as read at start.
#[derive(Debug, Default)]
pub struct Contents {
    /// Sandboxes by id.
    pub sandboxes: Vec<Sandbox>,
    /// Namespaces that the agent created.
    pub namespaces: Vec<NamespaceRecord>,
    /// Interfaces that remain to be removed.
    pub removals: Vec<Removal>,
    /// Networks as last applied, including deleted ones: their numbers are never assigned again.
    pub networks: Vec<Network>,
    /// The agent's configuration of the uplink.
    pub uplink: UplinkRecord,
}

/// A set of changes that is applied whole or not at all.
#[derive(Default)]
pub struct Change {
    edits: Vec<Edit>,
}

impl Change {
    /// No change yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn edit(mut self, edit: Edit) -> Self {
        self.edits.push(edit);
        self
    }

    /// Writes a sandbox.
    #[must_use]
    pub fn sandbox(self, sandbox: &Sandbox) -> Self {
        self.edit(SANDBOXES.put(sandbox.id.to_string(), sandbox))
    }

    /// Removes a sandbox.
    #[must_use]
    pub fn remove_sandbox(self, id: &SandboxId) -> Self {
        self.edit(SANDBOXES.remove(id.to_string()))
    }

    /// Writes a namespace.
    #[must_use]
    pub fn namespace(self, record: &NamespaceRecord) -> Self {
        self.edit(NAMESPACES.put(path_key(&record.path), record))
    }

    /// Removes a namespace.
    #[must_use]
    pub fn remove_namespace(self, path: &Path) -> Self {
        self.edit(NAMESPACES.remove(path_key(path)))
    }

    /// Writes an interface that is to be removed.
    #[must_use]
    pub fn removal(self, removal: &Removal) -> Self {
        self.edit(REMOVALS.put(removal.endpoint.0, removal))
    }

    /// Removes the record of an interface that is gone.
    #[must_use]
    pub fn remove_removal(self, removal: &Removal) -> Self {
        self.edit(REMOVALS.remove(removal.endpoint.0))
    }

    /// Writes a network.
    #[must_use]
    pub fn network(self, network: &Network) -> Self {
        self.edit(NETWORKS.put(network.spec.name.to_string(), network))
    }

    /// Writes the agent's configuration of the uplink.
    #[must_use]
    pub fn uplink(self, record: &UplinkRecord) -> Self {
        self.edit(UPLINK.put(UPLINK_KEY.to_owned(), record))
    }
}

fn path_key(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The state file. Clones share it.
#[derive(Debug, Clone)]
pub struct Store {
    database: Arc<Database>,
}

impl Store {
    /// Opens or creates the file `state.redb` in `dir` (0700). Waits up to 10 s for another agent to end.
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
                other => break other?,
            }
        };
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(at(&path))?;
        Ok(Self {
            database: Arc::new(database),
        })
    }

    /// Reads all records.
    pub fn load(&self) -> Result<Contents, StoreError> {
        // A write transaction creates missing tables, so that an empty file reads as empty.
        let transaction = self.database.begin_write()?;
        SANDBOXES.create(&transaction)?;
        NAMESPACES.create(&transaction)?;
        REMOVALS.create(&transaction)?;
        NETWORKS.create(&transaction)?;
        UPLINK.create(&transaction)?;
        transaction.commit()?;

        let read = self.database.begin_read()?;
        Ok(Contents {
            sandboxes: SANDBOXES.rows(&read)?,
            namespaces: NAMESPACES.rows(&read)?,
            removals: REMOVALS.rows(&read)?,
            networks: NETWORKS.rows(&read)?,
            uplink: UPLINK.rows(&read)?.pop().unwrap_or_default(),
        })
    }

    /// Applies a change; it is durable when this returns.
    pub fn commit(&self, change: Change) -> Result<(), StoreError> {
        let transaction = self.database.begin_write()?;
        for edit in change.edits {
            edit(&transaction)?;
        }
        Ok(transaction.commit()?)
    }
}

#[cfg(test)]
mod tests {
    use kni_model::{EndpointId, NetnsIdentity, NetworkSpec, Phase, PodRef};
    use serde_json::json;

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
            access: kni_model::Access::default(),
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
    fn committed_records_are_there_after_reopening() {
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
                        .remove_sandbox(&"one".parse().unwrap())
                        .removal(&removal(4)),
                )
                .unwrap();
            store
                .commit(Change::new().remove_removal(&removal(3)).network(&blue).uplink(&uplink))
                .unwrap();
        }
        let contents = Store::open(dir.path()).unwrap().load().unwrap();
        assert_eq!(contents.sandboxes, [sandbox("two")]);
        assert_eq!(contents.removals, [removal(4)]);
        assert_eq!(contents.networks, [blue]);
        assert_eq!(contents.uplink, uplink);
    }

    #[test]
    fn sandboxes_of_an_agent_without_policy_have_no_container_ports() {
        let mut row = serde_json::to_value(sandbox("old")).unwrap();
        assert!(row.as_object_mut().unwrap().remove("container_ports").is_some());
        let bytes = serde_json::to_vec(&json!({ "version": 1, "record": row })).unwrap();
        assert_eq!(SANDBOXES.decode(&"old".to_owned(), &bytes).unwrap(), sandbox("old"));
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
        let row = json!({ "version": 99, "record": removal(1) }).to_string();
        let error = REMOVALS.decode(&1, row.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("removals/1") && error.contains("99"), "{error}");
    }

    // Rows as an earlier agent wrote them: names of fields and variants.
    const SANDBOX: &str = r#"{"version":1,"record":{"id":"s1","pod":{"namespace":"shop","name":"web-0","uid":"u-1"},
            "phase":"Ready","netns":"/run/netns/kni-1","netns_identity":{"dev":4,"inode":5},"labels":{"app":"web"},
            "port_mappings":[],"attachments":[
            {"endpoint":7,"network":"blue","network_id":9,"ifname":"eth0","ifindex":2,"host_ifname":"kni7",
            "host_ifindex":1007,"mac":"02:00:00:00:00:07","host_mac":"02:00:00:00:00:08","ipv4":"10.0.0.7","ipv6":null,
            "mtu":1500,"default_route":true,"host_access":true},
            {"endpoint":8,"network":"storage","network_id":10,"ifname":"net1","ifindex":3,"host_ifname":"kni8",
            "host_ifindex":1008,"mac":"02:00:00:00:00:09","host_mac":"02:00:00:00:00:0a","ipv4":null,"ipv6":null,
            "mtu":9000,"default_route":false,"host_access":false,"kind":{"HostDevice":{"device":"enp3s0f1",
            "mac":"02:00:00:00:00:09","mtu":1500,"up":true,"alias":null,"physical":true}}}]}}"#;
    const NAMESPACE: &str = r#"{"version":1,"record":{"path":"/run/netns/kni-1","identity":{"dev":4,"inode":5},
            "used_by":{"Bound":{"sandbox":"s1"}},"warm":null}}"#;
    const WARM: &str = r#"{"version":1,"record":{"path":"/run/netns/kni-2","identity":null,"used_by":"Warm",
            "warm":{"endpoint":6,"ifname":"eth0","ifindex":2,"host_ifname":"kni6","host_ifindex":1006,
            "mac":"02:00:00:00:00:06","host_mac":"02:00:00:00:00:07"}}}"#;
    const GIVEN: &str = r#"{"version":1,"record":{"path":"/run/netns/kni-3","identity":null,
            "used_by":{"Given":{"pod":{"namespace":"a","name":"b","uid":""},"since":7}},"warm":null}}"#;
    const REMOVAL: &str = r#"{"version":1,"record":{"endpoint":3,"host_ifname":"kni1","host_ifindex":7,"netns":null}}"#;
    const NETWORK: &str = r#"{"version":1,"record":{"id":9,"spec":{"name":"blue","default":true,"enabled":true,
            "subnets":["10.0.0.0/24"],"exclude_subnets":[],"mtu":1500,"egress":"Route"}}}"#;
    const UPLINK: &str = r#"{"version":1,"record":{"ifname":"eth0","ifindex":2,"addresses":["192.0.2.7"]}}"#;

    /// Names of tables and keys also stay those of earlier agents.
    #[test]
    fn rows_of_an_earlier_agent_are_read() {
        type Rows = redb::TableDefinition<'static, &'static str, &'static [u8]>;

        let dir = tempfile::tempdir().unwrap();
        let database = Database::create(dir.path().join("state.redb")).unwrap();
        let transaction = database.begin_write().unwrap();
        for (table, key, row) in [
            ("sandboxes", "s1", SANDBOX),
            ("namespaces", "/run/netns/kni-1", NAMESPACE),
            ("namespaces", "/run/netns/kni-2", WARM),
            ("namespaces", "/run/netns/kni-3", GIVEN),
            ("networks", "blue", NETWORK),
            ("uplink", "uplink", UPLINK),
        ] {
            let mut rows = transaction.open_table(Rows::new(table)).unwrap();
            rows.insert(key, row.as_bytes()).unwrap();
        }
        let removals: redb::TableDefinition<'_, u32, &[u8]> = redb::TableDefinition::new("removals");
        transaction
            .open_table(removals)
            .unwrap()
            .insert(3, REMOVAL.as_bytes())
            .unwrap();
        transaction.commit().unwrap();
        drop(database);

        let contents = Store::open(dir.path()).unwrap().load().unwrap();
        let [sandbox] = contents.sandboxes.try_into().unwrap();
        assert_eq!((sandbox.phase, sandbox.pod.name.as_str()), (Phase::Ready, "web-0"));
        let kinds: Vec<bool> = sandbox.attachments.iter().map(|one| one.kind.is_ebpf()).collect();
        assert_eq!(kinds, [true, false]);
        assert_eq!(sandbox.attachments[0].ipv4, Some([10, 0, 0, 7].into()));
        let uses: Vec<NamespaceUse> = contents.namespaces.iter().map(|one| one.used_by.clone()).collect();
        let given = NamespaceUse::Given {
            pod: PodRef::named("a", "b"),
            since: 7,
        };
        let bound = NamespaceUse::Bound { sandbox: sandbox.id };
        assert_eq!(uses, [bound, NamespaceUse::Warm, given]);
        assert_eq!(contents.namespaces[1].warm.as_ref().unwrap().host_ifindex, 1006);
        assert_eq!(contents.removals, [removal(3)]);
        assert_eq!(contents.networks, [network("blue", 9)]);
        assert_eq!(contents.uplink.addresses, ["192.0.2.7".parse().unwrap()].into());
    }
}
