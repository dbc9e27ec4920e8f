//! Runs worlds with questions, and compares every answer.

use std::{collections::BTreeMap, env, time::Instant};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_common::Verdict;
use kni_integration::{oracle::Direction, programs::Programs, require};

use super::{
    case::Case,
    coverage::Coverage,
    engine::Beside,
    generate::{self, Question},
    objects::Numbers,
    programs::{self, Rig},
    trail,
};

/// Questions per world.
const QUESTIONS: usize = 20;
/// Number of successive worlds that differ by small changes, with one engine.
const LINEAGE: u64 = 8;

pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) worlds: u64,
    only: Option<u64>,
}

impl Plan {
    pub(crate) fn from_environment() -> Result<Self> {
        let number = |name| env::var(name).ok().map(|text| text.parse::<u64>()).transpose();
        let plan = Self {
            seed: number("KNI_SEED")?.unwrap_or_else(|| kni_integration::default_seed(6)),
            worlds: number("KNI_WORLDS")?.unwrap_or(10_000),
            only: number("KNI_WORLD")?,
        };
        println!("{} worlds, KNI_SEED={}", plan.worlds, plan.seed);
        Ok(plan)
    }

    /// Generates every world and passes it to `look`, with the flags of pods of other nodes. Worlds of one lineage are
    /// successive.
    pub(crate) fn each(&self, mut look: impl FnMut(&Case<'_>) -> Result<()>) -> Result<()> {
        for first in (0..self.worlds).step_by(usize::try_from(LINEAGE)?) {
            if self.only.is_some_and(|only| only / LINEAGE != first / LINEAGE) {
                continue;
            }
            // Each lineage has its own seed, so that it can be repeated alone.
            let mut rng = Rng::with_seed(self.seed.wrapping_add(first));
            let mut world = generate::world(&mut rng);
            let remote = world.pods.iter().skip(1).map(|_| rng.u8(..6) == 0);
            let remote: Vec<bool> = std::iter::once(false).chain(remote).collect();
            for number in first..(first + LINEAGE).min(self.worlds) {
                let numbers = Numbers::of(&world, &remote);
                let questions = (0..QUESTIONS).map(|_| generate::question(&mut rng, &world)).collect();
                let case = Case {
                    number,
                    is_first: number == first,
                    world: &world,
                    numbers,
                    questions,
                };
                look(&case).with_context(|| {
                    let objects: Vec<_> = world
                        .policies
                        .iter()
                        .map(|policy| (&policy.networks, &policy.object))
                        .collect();
                    format!(
                        "repeat with KNI_SEED={} KNI_WORLD={number}\npods: {:#?}\nnamespaces: {:?}\npolicies: {}",
                        self.seed,
                        world.pods,
                        world.namespaces,
                        serde_json::to_string_pretty(&objects).unwrap_or_default()
                    )
                })?;
                for _ in 0..rng.u8(1..4) {
                    generate::change(&mut rng, &mut world);
                }
            }
        }
        Ok(())
    }
}

#[test]
fn the_engine_says_what_the_oracle_says() -> Result<()> {
    let plan = Plan::from_environment()?;
    let (start, mut asked, mut coverage) = (Instant::now(), 0_u64, Coverage::default());
    let mut beside = Beside::default();
    plan.each(|case| {
        if case.is_first {
            beside = Beside::default();
        }
        beside.become_(case.world, &case.numbers)?;
        coverage.world(case.world);
        for question in &case.questions {
            let expected = case.oracle(question);
            let found = beside.evaluate(question, &case.numbers);
            let ends = [(Direction::Egress, expected.0), (Direction::Ingress, expected.1)];
            for (found, (direction, expected)) in found.into_iter().zip(ends) {
                let Some((allowed, trail)) = found else { continue };
                ensure!(
                    allowed == expected,
                    "world {}: {question:?}: the engine says {direction:?} {allowed}, the oracle {expected}",
                    case.number
                );
                trail::check(beside.engine(), case.world, question, direction, (allowed, trail))?;
                asked += 1;
            }
            coverage.question(case.world, question, case.is_remote(question), expected == (true, true));
        }
        Ok(())
    })?;
    println!("{asked} verdicts compared in {:.1} s", start.elapsed().as_secs_f64());
    if plan.is_whole() {
        coverage.check(plan.worlds)?;
        ensure!(asked > plan.worlds * 20, "{asked} verdicts only");
    }
    Ok(())
}

/// Rows of the flow table; more than a lineage needs, so that none is evicted.
const MAX_FLOWS: u32 = 65_536;

#[test]
fn the_programs_and_their_explanations_say_what_the_oracle_says() -> Result<()> {
    require!(root, netns, bpf, ip);
    let plan = Plan::from_environment()?;
    let (start, mut asked) = (Instant::now(), BTreeMap::<Verdict, u64>::new());
    Programs::inside("random", MAX_FLOWS, |programs| {
        let mut rig = Rig::new(programs)?;
        plan.each(|case| {
            rig.become_(case)?;
            for question in &case.questions {
                if let Some(verdict) = compare(&mut rig, case, question)? {
                    *asked.entry(verdict).or_default() += 1;
                }
            }
            Ok(())
        })?;
        rig.clear()
    })?;
    println!("{:.1} s", start.elapsed().as_secs_f64());
    for (verdict, count) in &asked {
        println!("{:<24} {count:>9}", verdict.as_str());
    }
    if plan.is_whole() {
        for verdict in [
            Verdict::Redirected,
            Verdict::PassedToStack,
            Verdict::Delivered,
            Verdict::PolicyEgress,
            Verdict::PolicyIngress,
        ] {
            let count = asked.get(&verdict).copied().unwrap_or_default();
            ensure!(count > plan.worlds / 2, "{} only {count} times", verdict.as_str());
        }
    }
    Ok(())
}

/// Compares programs and explanation for one question.
fn compare(rig: &mut Rig, case: &Case<'_>, question: &Question) -> Result<Option<Verdict>> {
    let said = case.oracle(question);
    let expected = programs::expected(question, &case.numbers, said);
    let Some(decided) = rig.decide(question, &case.numbers)? else {
        return Ok(None);
    };
    let told = || {
        format!(
            "world {}: {question:?}, oracle {said:?}: {:?}",
            case.number, decided.explanation
        )
    };
    ensure!(
        Some(decided.verdict) == expected,
        "{} instead of {expected:?}: {}",
        decided.verdict.as_str(),
        told()
    );
    ensure!(
        programs::describes(&decided.explanation, question, &case.numbers),
        "another packet: {}",
        told()
    );
    let event = &decided.explanation.event;
    let [sends, receives] =
        [question.from, question.to].map(|ip| case.numbers.endpoint(question.network, ip).is_some());
    if sends {
        let trail = (said.0, event.egress);
        trail::check(rig.beside.engine(), case.world, question, Direction::Egress, trail).with_context(told)?;
    }
    // After a denial the receiver's policies are not evaluated.
    if receives && (said.0 || !sends) {
        let trail = (said.1, event.ingress);
        trail::check(rig.beside.engine(), case.world, question, Direction::Ingress, trail).with_context(told)?;
    }
    let by_node = rig.sent_by_node(question, &case.numbers)?;
    // It reaches its pods whatever their policies, but not in the name of another pod.
    let expected = if sends {
        Verdict::SourceAddress
    } else {
        Verdict::Delivered
    };
    let exempt = by_node.is_none_or(|decided| decided.verdict == expected);
    ensure!(exempt, "the node, to its pod: {}", told());
    Ok(Some(decided.verdict))
}

impl Plan {
    /// Whether the run is large enough to contain every form.
    pub(crate) fn is_whole(&self) -> bool {
        self.only.is_none() && self.worlds >= 1000
    }
}

#[test]
fn worlds_are_reproducible() -> Result<()> {
    let plan = Plan {
        seed: 7,
        worlds: 24,
        only: None,
    };
    let mut seen = [Vec::new(), Vec::new()];
    for list in &mut seen {
        plan.each(|case| {
            list.push(format!("{:?}{:?}", case.world, case.questions));
            Ok(())
        })?;
    }
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0].len(), 24);
    Ok(())
}
