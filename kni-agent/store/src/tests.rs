use std::os::unix::fs::PermissionsExt as _;

use kni_model::{EndpointId, NetnsIdentity, NetworkSpec, Phase, PodRef};
use redb::Database;
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

/// A copy that outlives stores.
#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<Option<CopiedRows>>>);

impl Kernel {
    fn boxed(&self) -> Box<dyn RecordCopy> {
        Box::new(self.clone())
    }
}

impl RecordCopy for Kernel {
    fn read(&self) -> Result<Option<CopiedRows>, String> {
        Ok(self.0.lock().unwrap().clone())
    }

    fn write(&self, sequence: u64, edits: &[Edit]) -> Result<(), String> {
        let mut held = self.0.lock().unwrap();
        let copied = held.as_mut().ok_or("no copy")?;
        row::apply(&mut copied.rows, edits);
        copied.sequence = sequence;
        Ok(())
    }

    fn replace(&self, rows: &CopiedRows) -> Result<(), String> {
        *self.0.lock().unwrap() = Some(rows.clone());
        Ok(())
    }
}

fn ids(contents: &Contents) -> Vec<&str> {
    contents.sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect()
}

/// A folder with the state of two sandboxes, and its copy.
fn two_sandboxes() -> (tempfile::TempDir, Kernel) {
    let dir = tempfile::tempdir().unwrap();
    let kernel = Kernel::default();
    let store = Store::open(dir.path()).unwrap();
    let contents = store.load(Some(kernel.boxed())).unwrap();
    assert!(contents.lost.is_none() && contents.incomplete.unwrap().contains("missing"));
    for id in ["one", "two"] {
        store.commit(Change::new().sandbox(&sandbox(id))).unwrap();
    }
    (dir, kernel)
}

/// An agent that has started with the state of another one.
fn started(dir: &tempfile::TempDir, kernel: &Kernel) -> Store {
    let store = Store::open(dir.path()).unwrap();
    store.load(Some(kernel.boxed())).unwrap();
    store
}

/// What an agent starts with that finds this file and no copy.
fn from_file(dir: &tempfile::TempDir, file: &[u8]) -> Contents {
    fs::write(dir.path().join(file::NAME), file).unwrap();
    Store::open(dir.path()).unwrap().load(None).unwrap()
}

#[test]
fn a_lost_file_is_made_again_from_the_copy() {
    type Harm = fn(&Path);
    let harms: [(&str, Harm, &str); 4] = [
        ("removed", |file| fs::remove_file(file).unwrap(), "missing"),
        ("emptied", |file| fs::write(file, "").unwrap(), "missing"),
        (
            "truncated",
            |file| {
                fs::File::options()
                    .write(true)
                    .open(file)
                    .unwrap()
                    .set_len(5000)
                    .unwrap();
            },
            "cannot be read",
        ),
        (
            "garbled",
            |file| {
                let mut bytes = fs::read(file).unwrap();
                for byte in &mut bytes {
                    *byte ^= 0x5a;
                }
                fs::write(file, bytes).unwrap();
            },
            "cannot be read",
        ),
    ];
    for (what, harm, reason) in harms {
        let (dir, kernel) = two_sandboxes();
        harm(&dir.path().join(file::NAME));
        let contents = Store::open(dir.path()).unwrap().load(Some(kernel.boxed())).unwrap();
        assert_eq!(ids(&contents), ["one", "two"], "{what}");
        let lost = contents.lost.unwrap();
        assert!(lost.contains(reason), "{what}: {lost}");
        assert_eq!(contents.incomplete, None, "{what}");
        let names = fs::read_dir(dir.path()).unwrap();
        let kept = names
            .filter(|entry| entry.as_ref().unwrap().file_name() != file::NAME)
            .count();
        assert_eq!(
            kept,
            usize::from(reason == "cannot be read"),
            "{what}: unreadable files are kept"
        );
        // From here on the file is complete again.
        let contents = Store::open(dir.path()).unwrap().load(None).unwrap();
        assert_eq!(ids(&contents), ["one", "two"], "{what}");
        assert_eq!((contents.lost, contents.incomplete), (None, None));
    }
}

#[test]
fn an_older_file_loses_against_the_copy_and_a_newer_one_wins() {
    let (dir, kernel) = two_sandboxes();
    let path = dir.path().join(file::NAME);
    let old = fs::read(&path).unwrap();
    let store = started(&dir, &kernel);
    store.commit(Change::new().sandbox(&sandbox("three"))).unwrap();
    drop(store);
    let new = fs::read(&path).unwrap();
    let copied = kernel.0.lock().unwrap().clone();
    fs::write(&path, &old).unwrap();
    let contents = Store::open(dir.path()).unwrap().load(Some(kernel.boxed())).unwrap();
    assert_eq!(ids(&contents), ["one", "three", "two"]);
    assert!(contents.lost.unwrap().contains("older than its copy"));
    // The agent was killed between the file and the copy.
    let mut behind = copied.unwrap();
    behind.sequence -= 1;
    behind.rows.remove(&SANDBOXES.id("three"));
    *kernel.0.lock().unwrap() = Some(behind);
    fs::write(&path, &new).unwrap();
    let contents = Store::open(dir.path()).unwrap().load(Some(kernel.boxed())).unwrap();
    assert_eq!(ids(&contents), ["one", "three", "two"]);
    assert_eq!(contents.lost, None);
    assert!(
        kernel
            .0
            .lock()
            .unwrap()
            .as_ref()
            .unwrap()
            .rows
            .contains_key(&SANDBOXES.id("three"))
    );
}

#[test]
fn a_killed_agent_loses_nothing_of_what_only_the_copy_has() {
    let (dir, kernel) = two_sandboxes();
    let path = dir.path().join(file::NAME);
    let store = started(&dir, &kernel);
    let before = fs::read(&path).unwrap();
    store.commit(Change::new().sandbox(&sandbox("three"))).unwrap();
    store
        .commit_deferred(Change::new().remove_sandbox(&"one".parse().unwrap()))
        .unwrap();
    assert!(fs::read(&path).unwrap() == before, "a commit waits for the file");
    let copied = kernel.0.lock().unwrap().clone();
    store.maintain();
    let after = fs::read(&path).unwrap();
    drop(store);
    // Killed after the file was written: it has everything.
    let contents = from_file(&dir, &after);
    assert_eq!(ids(&contents), ["three", "two"]);
    // Killed before.
    fs::write(&path, before).unwrap();
    *kernel.0.lock().unwrap() = copied;
    let contents = Store::open(dir.path()).unwrap().load(Some(kernel.boxed())).unwrap();
    assert_eq!(ids(&contents), ["three", "two"]);
    assert_eq!((contents.lost, contents.incomplete), (None, None));
    // And written now.
    let contents = Store::open(dir.path()).unwrap().load(None).unwrap();
    assert_eq!(ids(&contents), ["three", "two"]);
}

#[test]
fn without_its_copy_a_change_waits_for_the_file() {
    let (dir, kernel) = two_sandboxes();
    let path = dir.path().join(file::NAME);
    let store = started(&dir, &kernel);
    store.commit(Change::new().sandbox(&sandbox("three"))).unwrap();
    // From here on the copy refuses.
    *kernel.0.lock().unwrap() = None;
    let before = fs::read(&path).unwrap();
    store.commit(Change::new().sandbox(&sandbox("four"))).unwrap();
    let after = fs::read(&path).unwrap();
    assert!(after != before);
    drop(store);
    let contents = from_file(&dir, &after);
    assert_eq!(ids(&contents), ["four", "one", "three", "two"]);
}

#[test]
fn with_many_unwritten_changes_a_change_waits_for_the_file() {
    let (dir, kernel) = two_sandboxes();
    let path = dir.path().join(file::NAME);
    let store = started(&dir, &kernel);
    let before = fs::read(&path).unwrap();
    let one = sandbox("three");
    for _ in 0..MOST_UNWRITTEN {
        store.commit(Change::new().sandbox(&one)).unwrap();
    }
    assert!(
        fs::read(&path).unwrap() == before,
        "changes wait for the file too early"
    );
    store.commit(Change::new().sandbox(&sandbox("four"))).unwrap();
    let after = fs::read(&path).unwrap();
    assert!(after != before, "unwritten changes grow without limit");
    assert!(store.held().unwritten.is_empty());
    drop(store);
    let contents = from_file(&dir, &after);
    assert_eq!(ids(&contents), ["four", "one", "three", "two"]);
}

/// Whatever another process with access to pinned maps writes there, no change is lost; at most a loss is reported.
#[test]
fn a_forged_note_of_what_is_in_the_file_loses_nothing() {
    let forged: [(&[u8], bool); 4] = [
        (b"0", false),
        (b"18446744073709551615", true),
        (b"-1", true),
        (b"\xff\xfe", true),
    ];
    for (note, reported) in forged {
        let (dir, kernel) = two_sandboxes();
        let path = dir.path().join(file::NAME);
        let store = started(&dir, &kernel);
        let before = fs::read(&path).unwrap();
        store.commit(Change::new().sandbox(&sandbox("three"))).unwrap();
        let mut copied = kernel.0.lock().unwrap().clone().unwrap();
        drop(store);
        fs::write(&path, before).unwrap();
        copied.rows.insert(choose::in_file_edit(0).id, note.to_vec());
        *kernel.0.lock().unwrap() = Some(copied);
        let contents = Store::open(dir.path()).unwrap().load(Some(kernel.boxed())).unwrap();
        assert_eq!(ids(&contents), ["one", "three", "two"], "{note:?}");
        assert_eq!(contents.lost.is_some(), reported, "{note:?}");
        assert_eq!(contents.incomplete, None, "{note:?}");
    }
}

#[test]
fn an_unreadable_copy_may_have_later_changes() {
    struct Unreadable;
    impl RecordCopy for Unreadable {
        fn read(&self) -> Result<Option<CopiedRows>, String> {
            Err("no memory".to_owned())
        }

        fn write(&self, _sequence: u64, _edits: &[Edit]) -> Result<(), String> {
            Ok(())
        }

        fn replace(&self, _rows: &CopiedRows) -> Result<(), String> {
            Ok(())
        }
    }
    let (dir, _kernel) = two_sandboxes();
    let contents = Store::open(dir.path())
        .unwrap()
        .load(Some(Box::new(Unreadable)))
        .unwrap();
    assert_eq!(ids(&contents), ["one", "two"]);
    assert!(contents.lost.unwrap().contains("its copy cannot be read (no memory)"));
}

#[test]
fn the_state_of_another_boot_is_dropped() {
    let (dir, kernel) = two_sandboxes();
    let (file, _, _) = StateFile::open(dir.path(), Duration::ZERO).unwrap();
    file.write(&[], 9, "another").unwrap();
    drop(file);
    let contents = Store::open(dir.path()).unwrap().load(None).unwrap();
    assert!(contents.sandboxes.is_empty() && contents.networks.is_empty());
    assert!(contents.incomplete.unwrap().contains("another boot"));
    drop(kernel);
}

/// Writes a row past the store.
fn write_row(dir: &Path, id: RowId, row: &[u8]) {
    let (file, _, contents) = StateFile::open(dir, Duration::ZERO).unwrap();
    let edit = Edit::put(id, row.to_vec());
    file.write(&[edit], contents.sequence, &boot_id()).unwrap();
}

#[test]
fn a_row_that_cannot_be_decoded_is_quarantined_and_the_rest_is_served() {
    let newer = SANDBOX.replacen("\"version\":1", "\"version\":2", 1);
    for (row, endpoints, labelled) in [
        (newer.as_str(), vec![7, 8], true),
        (SANDBOX.split_at(SANDBOX.len() - 9).0, vec![7, 8], false),
        ("\u{1}\u{2}", vec![], false),
    ] {
        let (dir, _) = two_sandboxes();
        write_row(dir.path(), SANDBOXES.id("s1"), row.as_bytes());
        for _ in 0..2 {
            let store = Store::open(dir.path()).unwrap();
            let contents = store.load(None).unwrap();
            assert_eq!(ids(&contents), ["one", "two"]);
            let [held] = contents.quarantined.as_slice() else {
                panic!("{:?}", contents.quarantined)
            };
            assert_eq!(held.id, SANDBOXES.id("s1"));
            let found: Vec<u32> = held.endpoints.iter().map(|endpoint| endpoint.0).collect();
            assert_eq!(found, endpoints, "{row}");
            assert_eq!(held.parts.labels.is_some(), labelled);
        }
    }
    // The agent that can read it uses it again.
    let (dir, kernel) = two_sandboxes();
    write_row(
        dir.path(),
        quarantine::quarantine_id(&SANDBOXES.id("s1")),
        SANDBOX.as_bytes(),
    );
    let store = Store::open(dir.path()).unwrap();
    let contents = store.load(None).unwrap();
    assert_eq!(
        (ids(&contents), contents.quarantined.len()),
        (vec!["one", "s1", "two"], 0)
    );
    drop(store);
    // With a sandbox, its quarantined row goes.
    write_row(dir.path(), SANDBOXES.id("two"), b"{");
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.load(None).unwrap().quarantined.len(), 1);
    store
        .commit(Change::new().remove_sandbox(&"two".parse().unwrap()))
        .unwrap();
    drop(store);
    assert!(
        Store::open(dir.path())
            .unwrap()
            .load(None)
            .unwrap()
            .quarantined
            .is_empty()
    );
    drop(kernel);
}

#[test]
fn a_damaged_row_is_taken_from_the_copy() {
    let (dir, kernel) = two_sandboxes();
    write_row(dir.path(), SANDBOXES.id("two"), b"{");
    let contents = Store::open(dir.path()).unwrap().load(Some(kernel.boxed())).unwrap();
    assert_eq!((ids(&contents), contents.quarantined.len()), (vec!["one", "two"], 0));
}

#[test]
fn a_file_that_is_removed_while_the_agent_runs_is_written_again() {
    let (dir, kernel) = two_sandboxes();
    let store = Store::open(dir.path()).unwrap();
    store.load(Some(kernel.boxed())).unwrap();
    fs::remove_file(dir.path().join(file::NAME)).unwrap();
    store.maintain();
    assert_eq!(store.problem(), None);
    drop(store);
    assert_eq!(
        ids(&Store::open(dir.path()).unwrap().load(None).unwrap()),
        ["one", "two"]
    );
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
        number: None,
        fabric: kni_model::Fabric::None,
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
        assert!(store.load(None).unwrap().sandboxes.is_empty());
        assert_eq!(store.uplink(), UplinkRecord::default());
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
    let contents = Store::open(dir.path()).unwrap().load(None).unwrap();
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
    assert_eq!(SANDBOXES.decode("old", &bytes).unwrap(), sandbox("old"));
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
    let error = REMOVALS.decode("1", row.as_bytes()).unwrap_err().to_string();
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

    let contents = Store::open(dir.path()).unwrap().load(None).unwrap();
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

#[test]
fn rests_of_addresses_survive_until_they_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let rest = |address: &str, withdrawn| AddressRest {
        network: "blue".parse().unwrap(),
        address: address.parse().unwrap(),
        owner: "pod shop/web-0 (sandbox s1)".to_owned(),
        withdrawn,
    };
    let reopened = || Store::open(dir.path()).unwrap();
    let store = reopened();
    store.load(None).unwrap();
    let (v4, v6) = (
        rest("10.0.0.7", None),
        rest("fd00::7", Some(Duration::from_millis(1_234_567))),
    );
    store.commit(Change::new().rest(&v4).rest(&v6)).unwrap();
    drop(store);
    let store = reopened();
    assert_eq!(store.load(None).unwrap().rests, [v4.clone(), v6]);
    let v4 = AddressRest {
        withdrawn: Some(Duration::ZERO),
        ..v4
    };
    let change = Change::new()
        .rest(&v4)
        .remove_rest(&v4.network, "fd00::7".parse().unwrap());
    store.commit_deferred(change).unwrap();
    drop(store);
    assert_eq!(reopened().load(None).unwrap().rests, [v4]);
}
