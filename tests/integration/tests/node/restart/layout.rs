//! An agent takes over the traffic of programs of layout 2: established connections of every kind live on.
//!
//! The short form needs no agent of that layout: the maps of a running node are written in the form of layout 2, from
//! which the next agent takes over. The long form uses a real one ([`kni_integration::earlier`]).

mod former;
mod town;

use std::{fs, path::Path, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Namespaces, agent::agent_binary, earlier, long, require};

use self::town::Town;

const TAKEN_OVER: &str = "took over the traffic of layout 2";
const PINS: &str = "/sys/fs/bpf/kni";

/// Connections of each kind: direct TCP, direct UDP, masqueraded, through a ClusterIP.
const MANY: [usize; 4] = [50, 50, 20, 20];
const FEW: [usize; 4] = [4, 4, 4, 4];

/// A step of a conversion, and what shows that it has begun; a busy machine may look only after its end.
type Step = (&'static str, fn() -> bool);

const STEPS: [Step; 3] = [
    ("the maps are filled", || {
        ["v3-new", "v3"].iter().any(|name| Path::new(PINS).join(name).exists())
    }),
    ("they are in place", || {
        let names = fs::read_dir(Path::new(PINS).join("v3")).into_iter().flatten().flatten();
        let mut names = names.into_iter().map(|entry| entry.file_name());
        names.any(|name| name.to_string_lossy().starts_with("of-")) || are_switched()
    }),
    ("the links are switched", are_switched),
];

fn are_switched() -> bool {
    !Path::new(PINS).join("v2/FLOWS6").exists()
}

fn layouts(node: &Namespaces) -> Result<Vec<String>> {
    let listed = node.enter(|| fs::read_dir(PINS))??;
    let mut names: Vec<String> = listed
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with('v'))
        .collect();
    names.sort();
    Ok(names)
}

#[tokio::test(flavor = "multi_thread")]
async fn established_connections_outlive_the_maps_of_layout_2() -> Result<()> {
    require!(root, netns, bpf, ip);
    for hook in ["tcx", "clsact"] {
        let mut town = Town::build(hook, None, hook).await?;
        let flows = town.open(FEW)?;
        town.world.stage.agent.kill9()?;
        former::write(&town.world.stage.node)?;
        assert_eq!(layouts(&town.world.stage.node)?, ["v2"]);
        town.world.stage.agent.restart()?;
        let log = town.world.stage.agent.log();
        ensure!(log.contains(TAKEN_OVER), "{hook}: {log}");
        thread::sleep(Duration::from_millis(600));
        assert_eq!(layouts(&town.world.stage.node)?, ["v3"]);
        flows.assert_whole().context(hook)?;
        town.assert_policy(hook)?;
        town.assert_opens(hook)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_conversion_is_continued() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("resumed", None, "auto").await?;
    let mut flows = town.open(FEW)?;
    for (step, holds) in STEPS {
        // Milliseconds. One of about six runs loses flows where the agent is killed 10 ms after the links are switched.
        let moments: &[u64] = if long() { &[0, 3, 10, 30] } else { &[0] };
        for after in moments.iter().copied() {
            town.world.stage.agent.kill9()?;
            former::write(&town.world.stage.node)?;
            let killed = town
                .world
                .stage
                .agent
                .start_and_kill(holds, Duration::from_millis(after));
            killed.context(step)?;
            town.world.stage.agent.restart()?;
            thread::sleep(Duration::from_millis(200));
            let found = layouts(&town.world.stage.node)?;
            assert_eq!(found, ["v3"], "killed {after} ms after: {step}");
            // In use, so that none expires.
            let log = town.world.stage.agent.log();
            let last: Vec<&str> = log.lines().rev().take(30).collect();
            flows
                .ask()
                .with_context(|| format!("killed {after} ms after: {step}\n{}", last.join("\n")))?;
            town.assert_policy(step)?;
        }
    }
    flows.assert_whole()?;
    town.assert_opens("after")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_table_is_ignored_and_named() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut town = Town::build("foreign", None, "auto").await?;
    town.world.stage.agent.kill9()?;
    former::write(&town.world.stage.node)?;
    town.world
        .stage
        .node
        .enter(|| fs::rename(format!("{PINS}/v2/CONFIG"), format!("{PINS}/v2/FLOWS4")))??;
    town.world.stage.agent.restart()?;
    let log = town.world.stage.agent.log();
    ensure!(
        log.contains("the maps of layout 2 are ignored") && log.contains("CONFIG"),
        "{log}"
    );
    town.assert_policy("after")?;
    town.assert_opens("after")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_follows_one_of_layout_2_and_the_other_way_round() -> Result<()> {
    require!(root, netns, bpf, ip);
    let Some(old) = earlier::layout_2_agent()? else {
        println!("not tested with an agent of layout 2: no KNI_LAYOUT2_AGENT, and KNI_LONG is not 1");
        return Ok(());
    };
    let mut town = Town::build("former", Some(old.clone()), "auto").await?;
    let rounds = if long() { 20 } else { 2 };
    for round in 0..rounds {
        let flows = town.open(MANY)?;
        thread::sleep(Duration::from_millis(600));
        town.world.stage.agent.kill9()?;
        town.world.stage.agent.replace(&agent_binary()?)?;
        thread::sleep(Duration::from_millis(600));
        assert_eq!(layouts(&town.world.stage.node)?, ["v3"], "round {round}");
        let log = town.world.stage.agent.log();
        let lines = log.lines().filter(|line| line.contains(TAKEN_OVER));
        lines.skip(round).for_each(|line| println!("{line}"));
        flows.assert_whole()?;
        town.assert_policy("forward")?;
        town.assert_opens("forward")?;
        back(&mut town, &old)?;
    }
    Ok(())
}

/// Returns to the agent of layout 2: policy holds, and new connections are opened.
fn back(town: &mut Town, old: &Path) -> Result<()> {
    town.world.stage.agent.kill9()?;
    town.world.stage.agent.replace_by_release(old)?;
    thread::sleep(Duration::from_millis(300));
    assert_eq!(layouts(&town.world.stage.node)?, ["v2"]);
    town.assert_policy("back")?;
    town.assert_opens("back")
}
