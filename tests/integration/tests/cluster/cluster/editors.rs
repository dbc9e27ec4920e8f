//! Tests, as a table, that nothing that an editor of one namespace may write has an effect on others: two editors in
//! different namespaces, who are real users of RBAC, try every row, and after each row two victims are measured: their
//! streams, Services, policies, new pods and objects. Without any attempt the same is measured before and after all
//! rows; and at the end each check fails after a change of the victims' own.

mod measure;
mod row;
mod rows;
mod scene;
mod shown;
mod state;
mod victim;
mod without;

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    cluster::{objects, patience},
    eventually, long, require,
};
use serde_json::{Value, json};

use measure::{Baseline, Check, Red, Streams};
use row::{Answer, Row};
use scene::{Editor, Scene};
use without::Without;

use super::request::{Outcome, Request};

/// Rows of the table at least.
const ROWS: usize = 60;
/// Objects that do not change for so long are at rest.
const REST: Duration = Duration::from_millis(500);
/// All checks of a measurement, in the order of the columns.
const CHECKS: [Check; 5] = [
    Check::Stream,
    Check::Service,
    Check::NewPods,
    Check::Policies,
    Check::Objects,
];
/// Those of a row of the short form.
const QUICK: [Check; 4] = [Check::Stream, Check::Service, Check::Policies, Check::Objects];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_editor_of_a_namespace_has_an_effect_on_others() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let without = Without::from_environment()?;
    let rows = rows::all();
    let names: BTreeSet<&str> = rows.iter().map(|row| row.name).collect();
    ensure!(
        names.len() == rows.len() && rows.len() >= ROWS,
        "{} rows, {} names",
        rows.len(),
        names.len()
    );
    without::are_rows(&names)?;
    let all = long() || without.is_some();
    let start = Instant::now();
    let scene = Scene::start("cluster-editors").await?;
    println!("two editors and two victims after {:?}", start.elapsed());
    let lasting = Streams::start(&scene, true)?;
    let mut table = Table::new(&scene, all, without).await?;
    table.control("control, before").await?;
    for (number, row) in rows.iter().filter(|row| all || row.short).enumerate() {
        table.row(number, row).await?;
    }
    table.control("control, after").await?;
    println!(
        "{} rows, and two without an attempt, after {:?}",
        table.rows,
        start.elapsed()
    );
    table.finish()?;
    if without.is_none() {
        lasting.stop().context("connections from before all rows")?;
        every_check_can_fail(&scene, &table.baseline).await?;
    }
    println!("the whole took {:?}", start.elapsed());
    Ok(())
}

/// The results.
struct Table<'a> {
    scene: &'a Scene,
    baseline: Baseline,
    /// Whether both editors try each row, and each row is measured in full.
    all: bool,
    /// The defence that is absent: only its rows are measured in full.
    without: Option<&'static Without>,
    /// Attempts until now.
    rows: usize,
    /// The names of the rows that are not as expected.
    red: BTreeSet<&'static str>,
    wrong: Vec<String>,
}

impl<'a> Table<'a> {
    async fn new(scene: &'a Scene, all: bool, without: Option<&'static Without>) -> Result<Self> {
        let columns =
            "| class | attempt | by | API server | shown | streams | Services | new pods | policies | objects |";
        println!("{columns}\n|---|---|---|---|---|---|---|---|---|---|");
        // The victims' objects follow their pods a moment later.
        eventually(patience(), async || measure::are_policed(scene).await).await?;
        let baseline = eventually(patience(), async || {
            let before = Baseline::read(scene).await?;
            tokio::time::sleep(REST).await;
            measure::are_equal(scene, &before).await?;
            Ok(before)
        });
        let baseline = baseline.await.context("the victims' objects are at rest")?;
        Ok(Self {
            scene,
            baseline,
            all,
            without,
            rows: 0,
            red: BTreeSet::new(),
            wrong: Vec::new(),
        })
    }

    /// What is expected to be red is not waited for in full, and after another red row no other.
    fn limit(&self, row: &str) -> Duration {
        let expected = self.without.map(Without::rows).unwrap_or_default();
        if expected.contains(row) || !self.red.is_subset(&expected) {
            patience() / 4
        } else {
            patience()
        }
    }

    /// The measurement without an attempt.
    async fn control(&mut self, name: &'static str) -> Result<()> {
        let streams = Streams::start(self.scene, false)?;
        let red = measure::red(self.scene, &self.baseline, (streams, &CHECKS), self.limit(name)).await?;
        self.note(name, &format!("| - | {name} | - | - | - |"), (&red, &CHECKS), &[]);
        Ok(())
    }

    /// What the editors attempt, and what it does to the victims.
    async fn row(&mut self, number: usize, row: &Row) -> Result<()> {
        let scene = self.scene;
        self.rows += 1;
        // In the short form they take turns.
        let editors: Vec<&Editor> = match scene.editors.get(number % 2) {
            Some(editor) if !self.all => vec![editor],
            _ => scene.editors.iter().collect(),
        };
        let streams = Streams::start(scene, false)?;
        let mut wrong = Vec::new();
        let mut attempts = Vec::new();
        for editor in &editors {
            let requests = (row.attempt)(&editor.form);
            wrong.extend(refusals(editor, &requests, row.answer).await?);
            attempts.push((*editor, requests));
        }
        for (editor, requests) in &attempts {
            if row.answer == Answer::Accepted && wrong.is_empty() {
                let shown = shown::wait(&scene.cluster, editor, (row.shown, requests), self.limit(row.name)).await;
                wrong.extend(shown.err().map(|error| format!("{}: {error:#}", editor.user)));
            }
        }
        let is_full = self
            .without
            .map_or(self.all, |without| without.rows().contains(row.name));
        let checks: &[Check] = if is_full { &CHECKS } else { &QUICK };
        let red = measure::red(scene, &self.baseline, (streams, checks), self.limit(row.name)).await?;
        for (editor, requests) in &attempts {
            let removed = remove(scene, editor, requests).await;
            wrong.extend(removed.err().map(|error| format!("not removed: {error:#}")));
        }
        let by: Vec<&str> = editors.iter().map(|editor| editor.user).collect();
        let class = format!("{:?}", row.class);
        let head = format!(
            "| {class} | {} | {} | {} | {} |",
            row.name,
            by.join(", "),
            row.answer,
            row.shown
        );
        self.note(row.name, &head, (&red, checks), &wrong);
        Ok(())
    }

    fn note(&mut self, name: &'static str, head: &str, (red, checks): (&Red, &[Check]), wrong: &[String]) {
        let column = |check: Check| match red.iter().find(|(of, _)| *of == check) {
            Some((_, why)) => format!(" RED: {why} |"),
            None if checks.contains(&check) => " as before |".to_owned(),
            None => " - |".to_owned(),
        };
        let columns: String = CHECKS.map(column).concat();
        let mark = if wrong.is_empty() { "" } else { " RED: " };
        let line = format!("{head}{columns}{mark}{}", wrong.join("; "));
        println!("{line}");
        if !red.is_empty() || !wrong.is_empty() {
            self.red.insert(name);
            self.wrong.push(line);
        }
    }

    /// No row is red; without a defence exactly those that it has.
    fn finish(&self) -> Result<()> {
        let expected = self.without.map(Without::rows).unwrap_or_default();
        if let Some(without) = self.without {
            println!(
                "without {}: {} rows are red: {:?}",
                without.name,
                self.red.len(),
                self.red
            );
        }
        ensure!(
            self.red == expected,
            "expected red: {expected:?}; red:\n{}",
            self.wrong.join("\n")
        );
        Ok(())
    }
}

/// Sends all requests of an attempt: those that are not answered as expected.
async fn refusals(editor: &Editor, requests: &[Request], expected: Answer) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for request in requests {
        let outcome: Outcome = request.send(&editor.client, false).await?;
        if !expected.is(&outcome) {
            wrong.push(format!("{}: {request}: {outcome}", editor.user));
        }
    }
    wrong.truncate(3);
    Ok(wrong)
}

/// Removes what an attempt has made, with the rights of the administrator.
async fn remove(scene: &Scene, editor: &Editor, requests: &[Request]) -> Result<()> {
    let client = &scene.cluster.client;
    let made = || requests.iter().filter(|request| request.created().is_some()).rev();
    for request in made() {
        let object = request.created().context("an object")?;
        if object["metadata"]["finalizers"].is_array() {
            let none = json!({ "metadata": { "finalizers": Value::Null } });
            request.change(none).send(client, false).await?;
        }
        // No kubelet ends the pods of the host network, nor those of a node that does not exist.
        let spec = &object["spec"];
        let is_tended = spec["nodeName"] == editor.form.node.as_str() && spec["hostNetwork"] != true;
        let is_at_once = object["kind"] == "Pod" && !is_tended;
        let outcome = request.deletion(is_at_once).send(client, false).await?;
        ensure!([200, 404, 405].contains(&outcome.code), "{request}: {outcome}");
    }
    for request in made() {
        eventually(patience(), async || {
            let outcome = request.read().send(client, false).await?;
            ensure!([404, 405].contains(&outcome.code), "{request}: {outcome}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// Changes of the victims' own, each of which makes a check fail.
async fn every_check_can_fail(scene: &Scene, baseline: &Baseline) -> Result<()> {
    let cluster = &scene.cluster;
    let victim = &scene.victims[1];
    let [backend, friend] = [&victim.backends[0], &victim.friend];
    let fails = async |check: Check| {
        let failure = eventually(patience(), async || {
            let held = match check {
                Check::Service => measure::are_served(scene),
                Check::Policies => measure::are_policed(scene).await,
                Check::Objects => measure::are_equal(scene, baseline).await,
                Check::Stream | Check::NewPods => Ok(()),
            };
            held.err().context("holds")
        });
        let failure = failure.await.with_context(|| format!("{check:?} cannot fail"))?;
        println!("{check:?} fails: {}", short(&failure));
        anyhow::Ok(())
    };
    measure::are_equal(scene, baseline).await?;
    super::scene::patch_metadata(cluster, backend, &json!({ "labels": { "own": "yes" } })).await?;
    fails(Check::Objects).await?;
    let unknown = json!({ "kni.dev/network": "nowhere" });
    let failure = measure::are_extensible(scene, Duration::from_secs(1), &unknown).await;
    println!(
        "NewPods fails: {}",
        short(&failure.err().context("NewPods cannot fail")?)
    );
    let other = victim::service(victim.namespace, "web", &[&scene.editors[0].probe], &json!({}));
    cluster.apply(&other).await?;
    fails(Check::Service).await?;
    cluster
        .delete(&victim::guard(victim.namespace, "guard", "server"))
        .await?;
    fails(Check::Policies).await?;

    let streams = Streams::start(scene, false)?;
    streams.continue_now()?;
    let before = victim::dropped(cluster, [friend, backend]).await?;
    let closed = json!({ "podSelector": {}, "policyTypes": ["Ingress"], "ingress": [] });
    let closed = objects::policy(victim.namespace, "closed", &closed);
    cluster.apply(std::slice::from_ref(&closed)).await?;
    eventually(patience(), async || {
        ensure!(
            victim::dropped(cluster, [friend, backend]).await? != before,
            "nothing is dropped"
        );
        Ok(())
    })
    .await?;
    cluster.delete(&closed).await?;
    println!(
        "Stream fails: {}",
        short(&streams.stop().err().context("Stream cannot fail")?)
    );
    Ok(())
}

/// The beginning of a reason.
fn short(error: &anyhow::Error) -> String {
    format!("{error:#}").chars().take(200).collect()
}
