//! Tests senders that send in the name of another one, as a table: who, from where, in whose name, by which way, in
//! which family. Every packet of every row is counted, as the drop that the row names, and none arrives. Before and
//! after them, those who may send by the same ways do, and each of their packets arrives.

mod forged;
mod genuine;
mod packet;
mod row;
mod scene;
mod watch;

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use kni_integration::{eventually, long, patience, require};

use row::{Fate, Row};
use scene::Scene;

/// Packets of each row of senders that may send.
const GENUINE: u32 = 200;
/// Rows of forged senders.
const FORGED: usize = 45;

/// Packets of each row of forged senders.
fn forged_count() -> u32 {
    if long() { 100_000 } else { 200 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_forged_sender_is_believed() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let scene = Scene::start("fabric-sources").await?;
    let mut table = Table::default();
    table
        .run(&scene, "genuine senders, before", genuine::rows(&scene)?, GENUINE)
        .await?;
    let forged = forged::rows(&scene)?;
    let kinds = forged
        .iter()
        .map(|row| (row.who, row.name, row.way, row.packet.family()));
    let kinds = kinds.collect::<BTreeSet<_>>().len();
    ensure!(
        (forged.len(), kinds) == (FORGED, FORGED),
        "{} rows, {kinds} kinds",
        forged.len()
    );
    table.run(&scene, "forged senders", forged, forged_count()).await?;
    table
        .run(&scene, "genuine senders, after", genuine::rows(&scene)?, GENUINE)
        .await?;
    table.finish()?;
    // What is allowed still works.
    scene.bed.matrix().assert_expected();
    Ok(())
}

/// The results.
#[derive(Default)]
struct Table {
    /// Rows until now, each of which has its number in its packets.
    rows: usize,
    shown: Vec<String>,
    wrong: Vec<String>,
}

impl Table {
    /// Shows all rows; an error lists all those that are wrong.
    fn finish(self) -> Result<()> {
        println!("{}", self.shown.join("\n"));
        let wrong = self.wrong;
        ensure!(
            wrong.is_empty(),
            "{} rows are wrong:\n{}",
            wrong.len(),
            wrong.join("\n")
        );
        Ok(())
    }

    /// Runs all rows, with so many packets each, whatever becomes of those before.
    async fn run(&mut self, scene: &Scene, title: &str, rows: Vec<Row<'_>>, count: u32) -> Result<()> {
        self.shown.push(format!("\n{title}, {count} packets each\n"));
        self.shown
            .push("| row | who | where | in the name of | way | family | expected | seen |".to_owned());
        self.shown.push("|---|---|---|---|---|---|---|---|".to_owned());
        for row in rows {
            self.rows += 1;
            let expected = row.expected.times(count);
            let (is_right, seen) = match self.result(scene, &row, &expected, count).await {
                Ok(seen) => (seen.fulfils(&expected), seen.shown()?),
                Err(error) => (false, format!("{error:#}")),
            };
            let of_row = [row.who, row.place, row.name, row.way, row.packet.family()].join(" | ");
            let mark = if is_right { "" } else { "WRONG: " };
            let line = format!("| {} | {of_row} | {} | {mark}{seen} |", self.rows, expected.shown()?);
            if !is_right {
                self.wrong.push(line.clone());
            }
            self.shown.push(line);
        }
        Ok(())
    }

    /// What becomes of the packets of a row: what is expected, or what is seen after a wait for it.
    async fn result(&self, scene: &Scene, row: &Row<'_>, expected: &Fate, count: u32) -> Result<Fate> {
        let before = watch::drops(&scene.bed).await?;
        for number in 0..count {
            row.send(self.rows, number)?;
        }
        // All rows are shown, and one is enough to wait for in full.
        let limit = if self.wrong.is_empty() {
            patience()
        } else {
            patience() / 20
        };
        let look = async || watch::fate(&scene.bed, &scene.watch, self.rows, &before).await;
        let right = eventually(limit, async || {
            let seen = look().await?;
            ensure!(seen.fulfils(expected), "not yet");
            Ok(seen)
        });
        match right.await {
            Ok(seen) => Ok(seen),
            Err(_in_vain) => look().await,
        }
    }
}
