//! Tests that no background task of the agent can end or hang unnoticed: the agent stops, and the next one loses
//! nothing.

use std::{
    collections::BTreeSet,
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Cluster,
    cluster::{Member, MemberOptions, objects, patience},
    require,
    traffic::Stream,
    wait,
};

use super::scene::{PORT, address, assert_reached, assert_silent, guarded, identity, tenants, wait_for_truth};

/// Where the agent reads the faults of the test.
const FAULTS: &str = "/run/node/faults";
const METRICS: &str = "127.0.0.1:9630";
/// How long a task may work without progress in this test.
const LIMIT_SECONDS: &str = "2";
/// Tasks that end when the agent stops, before it exits.
const FINITE: [&str; 4] = ["delete-journal", "gone-namespaces", "preparation", "repair"];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "every task in turn")]
async fn no_task_ends_or_hangs_unnoticed() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-tasks").await?;
    let args = [
        "--warm-sandboxes",
        "0",
        "--metrics-address",
        METRICS,
        "--test-task-faults",
        FAULTS,
        "--test-task-limit",
        LIMIT_SECONDS,
    ];
    let options = MemberOptions {
        args: args.map(str::to_owned).to_vec(),
        ..MemberOptions::default()
    };
    cluster.add_node(options).await?;
    tenants(&cluster).await?;
    let (pods, _server) = guarded(&cluster).await?;
    wait_for_truth(&cluster).await?;
    let stream = Stream::udp(&pods[1].inside, (address(&pods[0], true), PORT).into())?;

    let tasks = tasks(&cluster.nodes[0])?;
    ensure!(tasks.len() >= 25, "only {tasks:?}");
    // The task that carries out the faults, last of all.
    let others = tasks.iter().filter(|task| *task != "task-faults");
    let long = kni_integration::long();
    for (number, task) in others.chain(["task-faults".to_owned()].iter()).enumerate() {
        // Every task hangs below; without `KNI_LONG=1` a quarter of them fail in turn.
        if !long && number % 4 != 0 {
            continue;
        }
        // Tasks of the attach service may end, because they do so when the agent stops.
        let fault = if number % 8 == 0 || FINITE.contains(&task.as_str()) {
            "panic"
        } else {
            "end"
        };
        let start = Instant::now();
        inject(&cluster.nodes[0], &[(fault, task)])?;
        let agent = &mut cluster.nodes[0].agent;
        let status = agent.wait_exit(patience()).with_context(|| format!("{fault} {task}"))?;
        let exited = start.elapsed();
        ensure!(!status.success(), "{fault} {task}: {status}");
        let how = if fault == "panic" { "panicked" } else { "ended" };
        let told = format!("task {task} {how}; the agent must start again");
        ensure!(
            agent.log().contains(&told),
            "{told:?} is not in the log:\n{}",
            agent.log()
        );
        agent.restart()?;
        wait_until_complete(&cluster.nodes[0], &tasks).await?;
        println!(
            "{fault:5} {task:38} exit after {exited:>9.1?}, complete after {:>9.1?}",
            start.elapsed()
        );
        assert_reached(&pods[1], &pods[0]);
    }
    assert_silent(&pods[2], &pods[0]);
    cluster.run(&[objects::pod("red-team", "after", "node1")]).await?;
    wait_for_truth(&cluster).await?;

    // Tasks that hang: all but those that serve the probe and carry out the faults.
    ensure!(probe(&cluster.nodes[0])?.0, "{:?}", probe(&cluster.nodes[0])?);
    let serving = ["metrics", "task-faults"];
    let hanging: Vec<&String> = tasks.iter().filter(|task| !serving.contains(&task.as_str())).collect();
    let start = Instant::now();
    let faults: Vec<(&str, &String)> = hanging.iter().map(|task| ("hang", *task)).collect();
    inject(&cluster.nodes[0], &faults)?;
    let told = wait::until_some("the probe names every task", patience(), async || {
        let (alive, text) = probe(&cluster.nodes[0])?;
        ensure!(!alive, "alive");
        for task in &hanging {
            ensure!(text.contains(task.as_str()), "{task} is not named: {text}");
        }
        Ok(Some(text))
    });
    println!("{} after {:?}: {}", hanging.len(), start.elapsed(), told.await?);
    // As the kubelet does then.
    cluster.nodes[0].agent.kill9()?;
    cluster.nodes[0].agent.restart()?;
    wait_until_complete(&cluster.nodes[0], &tasks).await?;
    wait_for_truth(&cluster).await?;
    stream.stop().assert_whole(&identity(&pods[0]));
    Ok(())
}

/// Waits until the agent runs all of `tasks`, is ready and alive.
async fn wait_until_complete(member: &Member, tasks: &BTreeSet<String>) -> Result<()> {
    wait::until("the agent runs all tasks", patience(), async || {
        let running = self::tasks(member)?;
        let missing: Vec<&String> = tasks.difference(&running).collect();
        ensure!(missing.is_empty(), "missing: {missing:?}");
        let (alive, text) = probe(member)?;
        ensure!(alive, "{text}");
        let (ready, text) = get(member, "/readyz")?;
        ensure!(ready, "{text}");
        Ok(true)
    })
    .await
    .map(drop)
}

/// The background tasks, except those that end by themselves.
fn tasks(member: &Member) -> Result<BTreeSet<String>> {
    let (_, page) = get(member, "/metrics")?;
    let names = page.lines().filter_map(|line| {
        let rest = line.strip_prefix("kni_task_last_run_seconds{task=\"")?;
        rest.split('"').next().map(str::to_owned)
    });
    Ok(names.filter(|name| name != "first-sync").collect())
}

fn inject(member: &Member, faults: &[(&str, &String)]) -> Result<()> {
    let lines: Vec<String> = faults.iter().map(|(fault, task)| format!("{fault} {task}")).collect();
    let text = lines.join("\n");
    member
        .node
        .enter(|| {
            let unfinished = format!("{FAULTS}.new");
            fs::write(&unfinished, text)?;
            fs::rename(unfinished, FAULTS)
        })?
        .context("write the faults")
}

/// The liveness probe: whether it succeeds, and its text.
fn probe(member: &Member) -> Result<(bool, String)> {
    get(member, "/healthz")
}

/// Whether the status is 200, and the answer.
fn get(member: &Member, path: &str) -> Result<(bool, String)> {
    let text = member.node.enter(|| {
        let mut stream = TcpStream::connect(METRICS)?;
        stream.set_read_timeout(Some(patience()))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text).map(|_| text)
    })??;
    Ok((text.starts_with("HTTP/1.1 200 "), text))
}
