//! Checks the watch of a folder for every way in which its files change.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use kni_tasks::Tasks;
use tokio::sync::watch::Receiver;

use super::{ManifestError, ManifestSet, ManifestSource, manifest, names};

const DEBOUNCE: Duration = Duration::from_millis(100);

async fn follow(dir: &Path) -> Receiver<ManifestSet> {
    ManifestSource::new(dir)
        .watch(DEBOUNCE, &Tasks::default())
        .await
        .unwrap()
}

/// Waits for the next notification and returns the names in it.
async fn next(receiver: &mut Receiver<ManifestSet>) -> Vec<String> {
    tokio::time::timeout(Duration::from_secs(20), receiver.changed())
        .await
        .expect("a change is noticed")
        .unwrap();
    names(&receiver.borrow_and_update())
        .into_iter()
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn files_come_change_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.yaml");
    let mut receiver = follow(dir.path()).await;
    assert_eq!(*receiver.borrow(), ManifestSet::default());

    let started = Instant::now();
    fs::write(&file, manifest("one", "10.0.0.0/16")).unwrap();
    assert_eq!(next(&mut receiver).await, ["one"]);
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "noticed by event, not by the periodic look"
    );

    fs::write(&file, manifest("one", "10.1.0.0/16")).unwrap();
    assert_eq!(next(&mut receiver).await, ["one"]);
    assert_eq!(
        receiver.borrow().networks[0].0.subnets,
        ["10.1.0.0/16".parse().unwrap()]
    );

    fs::write(dir.path().join(".a.tmp"), manifest("two", "10.0.0.0/16")).unwrap();
    fs::rename(dir.path().join(".a.tmp"), &file).unwrap();
    assert_eq!(next(&mut receiver).await, ["two"]);

    fs::remove_file(&file).unwrap();
    assert_eq!(next(&mut receiver).await, [""; 0]);
}

#[tokio::test]
async fn a_series_of_changes_is_one_notification_and_no_change_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let mut receiver = follow(dir.path()).await;
    for name in ["a", "b", "c"] {
        fs::write(dir.path().join(format!("{name}.yaml")), manifest(name, "10.0.0.0/16")).unwrap();
    }
    assert_eq!(next(&mut receiver).await, ["a", "b", "c"]);
    fs::write(dir.path().join("a.yaml"), manifest("a", "10.0.0.0/16")).unwrap();
    fs::write(dir.path().join("notes.txt"), "nothing to see").unwrap();
    tokio::time::sleep(DEBOUNCE * 5).await;
    assert!(!receiver.has_changed().unwrap());
}

#[tokio::test]
async fn a_folder_that_never_rests_is_read_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let mut receiver = follow(dir.path()).await;
    fs::write(dir.path().join("a.yaml"), manifest("a", "10.0.0.0/16")).unwrap();
    let path = dir.path().join("noise.txt");
    let noise = tokio::spawn(async move {
        loop {
            fs::write(&path, "x").unwrap();
            tokio::time::sleep(DEBOUNCE / 5).await;
        }
    });
    let started = Instant::now();
    assert_eq!(next(&mut receiver).await, ["a"]);
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    noise.abort();
}

#[tokio::test]
async fn config_maps_are_followed_through_their_links() {
    let dir = tempfile::tempdir().unwrap();
    let publish = |version: &str, name: &str| {
        fs::create_dir(dir.path().join(version)).unwrap();
        fs::write(dir.path().join(version).join("a.yaml"), manifest(name, "10.0.0.0/16")).unwrap();
        symlink(version, dir.path().join("..data_tmp")).unwrap();
        fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).unwrap();
    };
    publish("..1", "one");
    symlink("..data/a.yaml", dir.path().join("a.yaml")).unwrap();
    let mut receiver = follow(dir.path()).await;
    assert_eq!(names(&receiver.borrow_and_update()), ["one"]);
    let started = Instant::now();
    publish("..2", "two");
    assert_eq!(next(&mut receiver).await, ["two"]);
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "noticed by event, not by the periodic look"
    );
}

#[tokio::test]
async fn a_changed_link_target_and_a_replaced_folder_are_found_by_the_periodic_look() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("manifests");
    fs::create_dir(&dir).unwrap();
    let target = parent.path().join("target");
    fs::write(&target, manifest("one", "10.0.0.0/16")).unwrap();
    symlink(&target, dir.join("a.yaml")).unwrap();
    let mut receiver = follow(&dir).await;
    fs::write(&target, manifest("two", "10.0.0.0/16")).unwrap();
    assert_eq!(next(&mut receiver).await, ["two"]);

    fs::rename(&dir, parent.path().join("old")).unwrap();
    tokio::time::sleep(DEBOUNCE * 5).await;
    assert!(
        !receiver.has_changed().unwrap(),
        "a missing folder must not look like an empty one"
    );
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("b.yaml"), manifest("three", "10.0.0.0/16")).unwrap();
    assert_eq!(next(&mut receiver).await, ["three"]);
    let started = Instant::now();
    fs::write(dir.join("b.yaml"), manifest("four", "10.0.0.0/16")).unwrap();
    assert_eq!(next(&mut receiver).await, ["four"]);
    assert!(started.elapsed() < Duration::from_secs(3), "the new folder is watched");
}

#[tokio::test]
async fn a_folder_that_is_not_there_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let missing = ManifestSource::new(dir.path().join("missing"))
        .watch(DEBOUNCE, &Tasks::default())
        .await;
    assert!(matches!(missing, Err(ManifestError::Watch { .. })));
}
