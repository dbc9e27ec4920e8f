//! Tests network policies whose peers are on other nodes: the cases of the nine pods against the oracle.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    long, patience, require,
    world::{
        Net, NinePods, PLACEMENTS, Placement, Question, Spread,
        cases::{self, Case},
    },
};

/// The timeout after many cases have failed, so that the remaining ones end quickly.
const SHORT_LIMIT: Duration = Duration::from_secs(1);
const MANY_FAILURES: usize = 5;

/// The cases outside long tests: each kind of peer, of port, of direction and of change. The others, with connections
/// between pods of one node, are those of `policy::table`.
const SHORT: [(Net, &str); 8] = [
    (Net::Default, "podSelector-and-namespaceSelector"),
    (Net::Default, "named-port-egress"),
    (Net::Default, "both-ends-must-agree"),
    (Net::Default, "egress-to-a-CIDR-with-except"),
    (Net::Default, "generated: ingress from blocks with excepts"),
    (Net::Default, "one-of-two-policies-deleted"),
    (Net::Default, "namespace-label-updated"),
    (Net::Named, "pod-label-updated"),
];

/// The cases for each network of a placement: in long tests all of them on both, otherwise [`SHORT`].
fn chosen() -> Vec<(Net, Case)> {
    let wanted = std::env::var("KNI_CASE").unwrap_or_default();
    let all = long() || !wanted.is_empty();
    let on = |net: Net| cases::all().into_iter().map(move |case| (net, case));
    let mut chosen: Vec<(Net, Case)> = Net::BOTH.into_iter().flat_map(on).collect();
    chosen.retain(|(net, case)| all || SHORT.contains(&(*net, &case.name)));
    chosen.retain(|(_, case)| case.name.contains(&wanted));
    chosen
}

#[test]
fn the_short_list_names_cases() {
    let names: Vec<String> = cases::all().into_iter().map(|case| case.name).collect();
    for (_, name) in SHORT {
        assert!(names.iter().any(|known| known == name), "{name}");
    }
}

#[test]
fn placements_put_most_pairs_on_different_nodes() {
    let pairs = Question::pairs(Net::Default);
    let apart = |placement: &Placement, question: &Question| placement[question.from] != placement[question.to];
    let ever = pairs
        .iter()
        .filter(|pair| PLACEMENTS.iter().any(|placement| apart(placement, pair)));
    assert_eq!((ever.count(), pairs.len()), (60, 72));
    for placement in PLACEMENTS {
        assert_eq!(pairs.iter().filter(|pair| apart(&placement, pair)).count(), 40);
        assert!(placement.chunks(3).all(|pods| pods.contains(&1) && pods.contains(&2)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_case_with_pods_of_two_nodes() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut report = Report::default();
    for placement in &PLACEMENTS[..if long() { 2 } else { 1 }] {
        let mut world = NinePods::spread("fabric-policies", *placement).await?;
        for (net, case) in chosen() {
            let run = run(&mut world, placement, net, &case, &mut report).await;
            run.with_context(|| case.name.clone())?;
        }
    }
    report.finish()
}

async fn run(
    world: &mut NinePods<Spread>,
    placement: &Placement,
    net: Net,
    case: &Case,
    report: &mut Report,
) -> Result<()> {
    let start = Instant::now();
    for (number, step) in case.steps.iter().enumerate() {
        world.apply(net, &step.policies, &step.setting).await?;
        let expected = world.expect_all(net, &step.policies);
        let many = report.failures.len() >= MANY_FAILURES;
        let differing = world.wait_for(&expected, if many { SHORT_LIMIT } else { patience() })?;
        report.count(placement, &expected);
        if !differing.is_empty() {
            let first: Vec<_> = differing
                .iter()
                .take(8)
                .map(|(_, difference)| difference.as_str())
                .collect();
            let failure = format!(
                "{} on {}, state {number}, pods on {placement:?}: {} differ:\n  {}",
                case.name,
                net.name(),
                differing.len(),
                first.join("\n  ")
            );
            println!("{failure}");
            report.failures.push(failure);
        }
    }
    println!("{} on {}: {:.1?}", case.name, net.name(), start.elapsed());
    report.cases += 1;
    Ok(())
}

#[derive(Default)]
struct Report {
    cases: usize,
    /// Questions by whether both pods are on one node, and whether policies allow it.
    asked: BTreeMap<(bool, bool), usize>,
    failures: Vec<String>,
}

impl Report {
    fn count(&mut self, placement: &Placement, expected: &BTreeMap<Question, bool>) {
        for (question, allowed) in expected {
            let together = placement[question.from] == placement[question.to];
            *self.asked.entry((together, *allowed)).or_default() += 1;
        }
    }

    fn finish(&self) -> Result<()> {
        let count = |together, allowed| self.asked.get(&(together, allowed)).copied().unwrap_or_default();
        println!(
            "{} cases; between nodes {} questions are allowed and {} denied, on one node {} and {}; {} states differ",
            self.cases,
            count(false, true),
            count(false, false),
            count(true, true),
            count(true, false),
            self.failures.len()
        );
        ensure!(self.failures.is_empty(), "{}", self.failures.join("\n"));
        ensure!(
            self.asked.len() == 4 && count(false, true) + count(false, false) > count(true, true) + count(true, false),
            "{:?}",
            self.asked
        );
        Ok(())
    }
}
