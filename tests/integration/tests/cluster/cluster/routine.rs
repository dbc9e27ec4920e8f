//! Tests routine operations under traffic, as a table: for each, packets lost, time until all is right, that denied
//! packets stay denied, and objects that are equal afterwards.

mod bed;
mod measured;
mod objects;
mod operations;
mod row;
mod rows;
mod streams;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{cluster::patience, eventually, require};

use bed::Bed;
use measured::{Class, Measured};
use objects::{Difference, Picture};
use row::{Row, evaluate, wrong_objects};
use streams::{Denied, Load};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: the operations take six minutes"]
async fn routine_operations_lose_what_the_table_states() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut table = Table::default();
    let mut bed = Bed::start("cluster-routine").await?;
    table.run(&mut bed, &rows::CONTROL).await?;
    // What these do not concern is a control of the rest.
    for fault in &rows::FAULTS {
        table.run_fault(&mut bed, fault).await?;
    }
    for row in rows::FIRST.iter().chain(&rows::REST) {
        table.run(&mut bed, row).await?;
    }
    table.run(&mut bed, &rows::CONTROL).await?;
    bed.is_reported().await?;
    table.finish()
}

#[derive(Default)]
struct Table {
    shown: Vec<String>,
    wrong: Vec<String>,
}

impl Table {
    /// A row that cannot be measured is wrong, and the others follow.
    async fn run(&mut self, bed: &mut Bed, row: &Row) -> Result<()> {
        let chosen = std::env::var("KNI_ROW").unwrap_or_default();
        if !row.name.contains(&chosen) {
            return Ok(());
        }
        match measure(bed, row, self.limit()).await {
            Ok(measured) => self.add(row, &measured),
            Err(e) => {
                println!("FAILED {}: {e:#}", row.name);
                self.wrong.push(format!("{}: {e:#}", row.name));
            }
        }
        Ok(())
    }

    /// A row whose fault would be found if it were not expected.
    async fn run_fault(&mut self, bed: &mut Bed, row: &Row) -> Result<()> {
        let measured = measure(bed, row, self.limit())
            .await
            .with_context(|| row.name.to_owned())?;
        let unexpected = Row::whole(row.name, row.operation);
        ensure!(!evaluate(&unexpected, &measured).is_empty(), "{}: not found", row.name);
        self.add(row, &measured);
        Ok(())
    }

    /// How long to wait for the expected objects: all rows are shown, and one is enough to wait for in full.
    fn limit(&self) -> Duration {
        if self.wrong.is_empty() {
            patience()
        } else {
            patience() / 6
        }
    }

    fn add(&mut self, row: &Row, measured: &Measured) {
        let wrong = evaluate(row, measured);
        for wrong in &wrong {
            println!("    wrong: {wrong}");
        }
        self.shown.push(line(row, measured, wrong.is_empty()));
        println!("{}", self.shown.last().map_or("", |line| line));
        for (class, server, report) in &measured.streams {
            if let Some(why) = &report.broken {
                println!("    {class:?} to {server}: {why}");
            }
        }
        for difference in &measured.differences {
            println!("    {difference}");
        }
        self.wrong
            .extend(wrong.iter().map(|wrong| format!("{}: {wrong}", row.name)));
    }

    fn finish(self) -> Result<()> {
        println!(
            "\n| operation | took | requests | lost: same node | other node | Service | node3 | new connections | \
             longest gap, ms: same node | other node | Service | node3 | new connections | denied | objects |"
        );
        println!("|{}", "---|".repeat(15));
        println!("{}", self.shown.join("\n"));
        let wrong = self.wrong;
        ensure!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
        Ok(())
    }
}

/// Runs an operation under traffic.
async fn measure(bed: &mut Bed, row: &Row, limit: Duration) -> Result<Measured> {
    let before = bed.is_right().await?;
    let load = Load::start(bed)?;
    let denied = Denied::start(bed).await?;
    let begun = Instant::now();
    let own = row.operation.run(bed).await?;
    let (took, ended) = (begun.elapsed(), Instant::now());
    load.continues()?;
    denied.continues()?;
    let refused = denied.stop(bed, row.reasons).await?;
    let streams = load.stop();
    let differences = differences(bed, row, &before, limit).await?;
    let objects_after = ended.elapsed();
    row.operation.undo(bed).await?;
    Ok(Measured {
        took,
        streams,
        own,
        refused,
        differences,
        objects_after,
    })
}

/// Waits until the objects are as expected; else returns all differences.
async fn differences(bed: &Bed, row: &Row, before: &Picture, limit: Duration) -> Result<Vec<Difference>> {
    let look = async || anyhow::Ok(before.differences(&Picture::take(&bed.cluster).await?));
    let right = eventually(limit, async || {
        let differences = look().await?;
        let wrong = wrong_objects(row.changes, &differences);
        ensure!(wrong.is_empty(), "{wrong:?}");
        Ok(differences)
    });
    match right.await {
        Ok(differences) => Ok(differences),
        Err(_in_vain) => look().await,
    }
}

fn line(row: &Row, measured: &Measured, is_right: bool) -> String {
    let totals = Class::ALL.map(|class| measured.of(class));
    let requests: u64 = totals.iter().map(|totals| totals.sent).sum();
    let lost = totals.map(|totals| match totals.broken {
        0 => totals.lost.to_string(),
        broken => format!("{}, {broken} broken", totals.lost),
    });
    let gaps = totals.map(|totals| totals.gap.as_millis().to_string());
    let refused = &measured.refused;
    let dropped: Vec<String> = refused
        .dropped
        .iter()
        .map(|(reason, count)| format!("{count} {reason}"))
        .collect();
    let objects = match measured.differences.len() {
        0 => "equal".to_owned(),
        count => format!("{count} fields differ"),
    };
    format!(
        "| {}{} | {:.1?} | {requests} | {} | {} | {} of {}, {} received | {objects} after {:.1?} |",
        if is_right { "" } else { "WRONG: " },
        row.name,
        measured.took,
        lost.join(" | "),
        gaps.join(" | "),
        dropped.join(", "),
        refused.sent,
        refused.received,
        measured.objects_after,
    )
}
