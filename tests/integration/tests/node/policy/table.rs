//! Runs every case on the nine pods and writes the table of results.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    long, patience, require,
    world::{
        Addresses, Net, NinePods, Question, Via,
        cases::{self, Case},
    },
};

/// Timeout for a state to be applied: other programs may use the CPUs.
fn limit() -> Duration {
    patience()
}

/// The timeout after many cases have failed, so that the remaining ones end quickly.
const SHORT_LIMIT: Duration = Duration::from_secs(1);
const MANY_FAILURES: usize = 5;

/// The cases for a network. Variations alternate between the networks, except in long tests, and if one is asked for:
/// both networks have the same engine and programs.
fn cases_on(net: Net) -> Vec<Case> {
    let wanted = std::env::var("KNI_CASE").unwrap_or_default();
    let all = long() || !wanted.is_empty();
    let variations = cases::generated().into_iter().enumerate();
    let variations = variations.filter(|(number, _)| all || (number % 2 == 0) == (net == Net::Default));
    let mut cases = cases::extended();
    cases.extend(variations.map(|(_, case)| case));
    cases.retain(|case| case.name.contains(&wanted));
    cases
}

#[test]
fn every_case_is_on_a_network() {
    let names = |cases: Vec<Case>| cases.into_iter().map(|case| case.name).collect::<BTreeSet<_>>();
    let on_either = Net::BOTH.into_iter().flat_map(cases_on).collect();
    if std::env::var_os("KNI_CASE").is_none() {
        assert_eq!(names(on_either), names(cases::all()));
    }
}

#[test]
fn cases_are_many_and_have_names_of_their_own() {
    assert!(
        cases::generated().len() >= 60,
        "{} variations",
        cases::generated().len()
    );
    let names: BTreeSet<_> = cases::all().into_iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases::all().len());
    assert!(
        cases::extended()
            .iter()
            .flat_map(|case| &case.steps)
            .all(|step| step.denied.is_some())
    );
}

#[test]
fn the_oracle_and_the_authors_of_the_cases_agree() {
    let addresses = Addresses::invented();
    let mut asked = 0;
    for case in cases::all() {
        for net in Net::BOTH {
            for (number, step) in case.steps.iter().enumerate() {
                let Some(denied) = step.denied else { continue };
                let world = step.setting.world(net, &step.policies, &addresses);
                for question in Via::BOTH.into_iter().flat_map(|via| Question::all(net, via)) {
                    let allowed = question.from == question.to || !denied(&question);
                    assert_eq!(
                        question.ask(&world),
                        allowed,
                        "{} state {number}: {question}",
                        case.name
                    );
                    asked += 1;
                }
            }
        }
    }
    assert!(asked > 100_000, "{asked}");
}

#[test]
fn variations_say_different_things() {
    let addresses = Addresses::invented();
    let mut meanings = BTreeMap::<Vec<bool>, Vec<String>>::new();
    let questions = Question::all(Net::Default, Via::Address);
    for case in cases::generated() {
        for step in &case.steps {
            let world = step.setting.world(Net::Default, &step.policies, &addresses);
            let truth = questions.iter().map(|question| question.ask(&world)).collect();
            meanings.entry(truth).or_default().push(case.name.clone());
        }
    }
    // Some forms are equivalent; a generator without variations would have only a few results.
    assert!(meanings.len() >= 45, "{} meanings: {meanings:?}", meanings.len().min(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_case_on_the_default_network() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    every_case("policy-default", Net::Default).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_case_on_an_additional_interface() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    every_case("policy-named", Net::Named).await
}

/// By address and by ClusterIP.
async fn every_case(name: &str, net: Net) -> Result<()> {
    let start = Instant::now();
    let mut world = NinePods::start(name).await?;
    let mut report = Report::default();
    for case in cases_on(net) {
        run(&mut world, net, &case, &mut report)
            .await
            .with_context(|| case.name.clone())?;
    }
    report.finish(net, start.elapsed())
}

async fn run(world: &mut NinePods, net: Net, case: &Case, report: &mut Report) -> Result<()> {
    let mut failures = Vec::new();
    for (number, step) in case.steps.iter().enumerate() {
        world.apply(net, &step.policies, &step.setting).await?;
        let expected = world.expect_all(net, &step.policies);
        let limit = if report.failed_cases() < MANY_FAILURES {
            limit()
        } else {
            SHORT_LIMIT
        };
        let differing = world.wait_for(&expected, limit)?;
        report.asked += expected.len();
        failures.extend(
            differing
                .into_iter()
                .map(|(question, told)| (question, format!("state {number}: {told}"))),
        );
    }
    report.enter(net, &case.name, failures);
    Ok(())
}

/// A column of the table: the network with the policies, and the kind of address; `None` is the other network.
type Column = (Net, Option<Via>);

fn columns(net: Net) -> [(Column, &'static str); 3] {
    let open = match net {
        Net::Default => "net1 open",
        Net::Named => "default open",
    };
    [
        ((net, Some(Via::Address)), "address"),
        ((net, Some(Via::ClusterIp)), "ClusterIP"),
        ((net, None), open),
    ]
}

#[derive(Default)]
struct Report {
    rows: Vec<String>,
    cells: BTreeMap<(String, Column), bool>,
    failures: Vec<String>,
    asked: usize,
}

impl Report {
    fn enter(&mut self, net: Net, case: &str, failures: Vec<(Question, String)>) {
        if !self.rows.iter().any(|row| row == case) {
            self.rows.push(case.into());
        }
        for via in [Some(Via::Address), Some(Via::ClusterIp), None] {
            let of_column = |question: &Question| {
                let own = question.net == net;
                via.map_or(!own, |via| own && question.via == via)
            };
            let failed = failures.iter().any(|(question, _)| of_column(question));
            self.cells.insert((case.into(), (net, via)), !failed);
        }
        if !failures.is_empty() {
            let (count, first) = (failures.len(), failures.into_iter().take(8));
            let told: Vec<String> = first.map(|(_, told)| told).collect();
            self.failures.push(format!(
                "{case} on {}: {count} differ:\n  {}",
                net.name(),
                told.join("\n  ")
            ));
        }
    }

    fn failed_cases(&self) -> usize {
        self.failures.len()
    }

    fn finish(&self, net: Net, took: Duration) -> Result<()> {
        let columns = columns(net);
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header(["case"].into_iter().chain(columns.map(|(_, name)| name)));
        for row in &self.rows {
            let cell = |column: Column| match self.cells.get(&(row.clone(), column)) {
                Some(true) => "pass",
                Some(false) => "FAIL",
                None => "-",
            };
            table.add_row(
                [row.as_str()]
                    .into_iter()
                    .chain(columns.map(|(column, _)| cell(column))),
            );
        }
        let summary = format!(
            "{} cases, {} questions, {:.0} s, {} with differences\n",
            self.rows.len(),
            self.asked,
            took.as_secs_f64(),
            self.failures.len()
        );
        let text = format!("{table}\n\n{summary}{}\n", self.failures.join("\n"));
        println!("{text}");
        let path = target_folder()?.join(format!("policy-cases-{}.txt", net.name()));
        fs::write(&path, &text).with_context(|| path.display().to_string())?;
        ensure!(self.failures.is_empty(), "{summary}{}", self.failures.join("\n"));
        Ok(())
    }
}

/// The build folder of cargo.
fn target_folder() -> Result<PathBuf> {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = scratch.parent().context("the test was built in no target folder")?;
    Ok(folder.to_owned())
}
