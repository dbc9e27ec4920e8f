use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result};
use kni_integration::{
    Agent, AgentOptions, Kubelet, Namespaces, NodeSnapshot, Pod,
    agent::{self, SOCKET},
    kubelet::Sandbox,
    patience, require,
    traffic::{Servers, Stream},
};

use crate::watched::{Watched, entries, warm};

/// Time without a running agent between two agents.
const INTERREGNUM: Duration = Duration::from_secs(2);

/// Streams of both transports to both addresses of a pod.
pub(super) fn streams(from: &Namespaces, to: &Pod) -> Result<Vec<(String, Stream)>> {
    let mut streams = Vec::new();
    for ip in to.ips() {
        let at = SocketAddr::new(ip, 8080);
        streams.push((to.name.clone(), Stream::udp(from, at)?));
        streams.push((to.name.clone(), Stream::tcp(from, at)?));
    }
    Ok(streams)
}

/// Two pods in blue, two in the default network, servers in one of each, and traffic between pods and from the node to
/// pods.
struct Town {
    pods: Vec<Pod>,
    servers: Vec<Servers>,
    streams: Vec<(String, Stream)>,
}

impl Town {
    async fn build(stage: &Watched) -> Result<Self> {
        let mut pods = Vec::new();
        let mut servers = Vec::new();
        let mut running = Vec::new();
        for network in ["blue", "default"] {
            let wish = [("kni.dev/network", network)];
            let client = stage
                .kubelet
                .run_pod("town", &format!("{network}-client"), &wish)
                .await?;
            let server = stage
                .kubelet
                .run_pod("town", &format!("{network}-server"), &wish)
                .await?;
            servers.push(Servers::start(&server.inside, &server.name, 8080)?);
            running.extend(streams(&client.inside, &server)?);
            if network == "default" {
                running.extend(streams(&stage.node, &server)?);
            }
            pods.extend([client, server]);
        }
        Ok(Self {
            pods,
            servers,
            streams: running,
        })
    }

    fn assert_no_packet_was_lost(&mut self) {
        assert_eq!(self.streams.len(), 12);
        for (server, stream) in self.streams.drain(..) {
            stream.stop().assert_whole(&server);
        }
    }

    async fn assert_queries_answer_the_same(&self, stage: &Watched) -> Result<()> {
        for pod in &self.pods {
            let now = stage.kubelet.query(&pod.id).await?.ipconfigs;
            assert_eq!(now, pod.interfaces, "{}", pod.name);
            // The kubelet repeats an attach whose answer it has not received.
            let again = stage.kubelet.kni().attach_interface(pod.attach_request()).await?;
            assert_eq!(again.into_inner().ipconfigs, pod.interfaces, "{}", pod.name);
        }
        let interfaces = stage.interfaces().await?;
        assert_eq!(interfaces.len(), self.pods.len());
        assert!(interfaces.iter().all(|interface| interface.healthy), "{interfaces:#?}");
        Ok(())
    }

    async fn leave(self, stage: &Watched) -> Result<()> {
        drop(self.servers);
        for pod in self.pods {
            stage.kubelet.kill_pod(pod).await?;
        }
        Ok(())
    }
}

async fn killed_and_started_again(hook: &str, sandboxes: u32) -> Result<()> {
    let mut options = warm(sandboxes);
    options.args.extend(["--hook".into(), hook.into()]);
    let mut stage = Watched::with(hook, options).await?;
    let before = stage.picture().await?;
    let mut town = Town::build(&stage).await?;
    assert_eq!(stage.status().await?.hook, hook);
    thread::sleep(Duration::from_millis(200));
    stage.agent.kill9()?;
    thread::sleep(INTERREGNUM);
    stage.restart().await?;
    town.assert_queries_answer_the_same(&stage).await?;
    // A new pod reaches the existing ones.
    let newcomer = stage
        .kubelet
        .run_pod("town", "newcomer", &[("kni.dev/network", "blue")])
        .await?;
    for (server, stream) in streams(&newcomer.inside, &town.pods[1])? {
        thread::sleep(Duration::from_millis(50));
        stream.stop().assert_whole(&server);
    }
    town.assert_no_packet_was_lost();
    stage.kubelet.kill_pod(newcomer).await?;
    town.leave(&stage).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_packet_is_lost_across_kill_and_restart_on_tcx() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    killed_and_started_again("tcx", 0).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_packet_is_lost_across_kill_and_restart_on_clsact() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    killed_and_started_again("clsact", 2).await
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_and_three_restarts_leave_pods_as_they_are() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::with("sigterm", warm(2)).await?;
    let before = stage.picture().await?;
    let mut town = Town::build(&stage).await?;
    for _ in 0..3 {
        let status = stage.agent.terminate()?;
        assert_eq!(status.code(), Some(0), "{}", stage.agent.log());
        stage.restart().await?;
        town.assert_queries_answer_the_same(&stage).await?;
    }
    town.assert_no_packet_was_lost();
    town.leave(&stage).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_promised_before_the_kill_is_still_known() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::new("promised").await?;
    stage.node.ip(&["netns add theirs"])?;
    let before = stage.picture().await?;
    let unused = stage.kubelet.create_network("team", "unused").await?;
    let detached = stage.kubelet.run_pod("team", "detached", &[]).await?;
    stage.kubelet.detach(&detached.id).await?;
    let lost = stage.kubelet.run_pod("team", "lost", &[]).await?;
    let mut foreign = Sandbox::new("team", "foreign", "/run/netns/theirs");
    foreign.extradata = entries(&[("netns", "/run/netns/theirs")]);
    stage.kubelet.attach(&foreign).await?;
    let addresses = stage.kubelet.query(&foreign.id).await?.ipconfigs;
    stage.agent.kill9()?;
    // A pod loses its interface while no agent is running.
    lost.inside.ip(&["link del eth0"])?;
    stage.restart().await?;

    assert!(
        stage.kubelet.query(&detached.id).await?.ipconfigs.is_empty(),
        "a detached sandbox has addresses again"
    );
    assert_eq!(stage.kubelet.query(&foreign.id).await?.ipconfigs, addresses);
    let listed = stage.interfaces().await?;
    let unhealthy: Vec<&str> = listed
        .iter()
        .filter(|i| !i.healthy)
        .map(|i| i.pod_name.as_str())
        .collect();
    assert_eq!(unhealthy, ["lost"], "{listed:#?}");
    // A namespace that was created before the restart can be attached afterwards.
    let late = Sandbox::new("team", "unused", &unused);
    stage.kubelet.attach(&late).await?;
    for id in [&late.id, &detached.id, &lost.id, &foreign.id] {
        stage.kubelet.detach(id).await?;
        stage.kubelet.delete_network(id).await?;
    }
    assert!(
        stage
            .node
            .enter(|| std::path::Path::new("/run/netns/theirs").exists())?
    );
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_and_a_cleanup_are_refused_while_one_runs() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::with("second", warm(2)).await?;
    let before = stage.picture().await?;
    let mut town = Town::build(&stage).await?;
    let mut second = Agent::start_unready(&stage.node, stage.options.clone())?;
    let program = stage.node.install(&agent::agent_binary()?)?;
    let node = (*stage.node).clone();
    let cleanup = thread::spawn(move || agent::cleanup(&node, &program));
    let code = second.wait_exit(patience())?.code();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    let log = second.log();
    assert!(
        log.contains("another kni-agent uses it") && !log.contains("serving on"),
        "{log}"
    );
    let cleanup = cleanup.join().expect("no panic")?;
    let said = String::from_utf8_lossy(&cleanup.stderr).into_owned() + &String::from_utf8_lossy(&cleanup.stdout);
    assert!(!cleanup.status.success() && said.contains("stop it first"), "{said}");
    // The first agent is not affected.
    town.assert_queries_answer_the_same(&stage).await?;
    town.assert_no_packet_was_lost();
    town.leave(&stage).await?;
    stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn cleanup_after_a_kill_returns_the_node_to_what_it_was() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    for (hook, sandboxes) in [("tcx", 3), ("clsact", 0)] {
        let mut options = warm(sandboxes);
        options.args.extend(["--hook".into(), hook.into()]);
        let mut stage = Watched::with("cleanup", options).await?;
        let town = Town::build(&stage).await?;
        let _unused = stage.kubelet.create_network("team", "unused").await?;
        drop((town.streams, town.servers));
        stage.agent.kill9()?;
        for _ in 0..2 {
            let done = stage.agent.cleanup()?;
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            stage.pristine.assert_unchanged(&stage.node, patience());
        }
        // The next agent starts without any state.
        stage.restart().await?;
        assert_eq!(stage.status().await?.sandboxes, 0);
        let pod = stage.kubelet.run_pod("team", "web-0", &[]).await?;
        stage.kubelet.kill_pod(pod).await?;
        stage.agent.terminate()?;
        assert!(stage.agent.cleanup()?.status.success());
        stage.pristine.assert_unchanged(&stage.node, patience());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn cleanup_leaves_what_others_made() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::new("others").await?;
    let pod = stage.kubelet.run_pod("team", "web-0", &[]).await?;
    stage.agent.kill9()?;
    stage.node.ip(&[
        "netns add foreign",
        "link add knifoo0 type veth peer name other0",
        "link set other0 alias kni:team/web-0",
        "link set other0 up",
        "route add 203.0.113.9 dev other0 table 19278",
        "rule add pref 1910 from 203.0.113.0/24 table 77",
    ])?;
    let done = stage.agent.cleanup()?;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let links = stage.node.run("ip", &["-o", "link", "show", "type", "veth"])?;
    assert!(links.contains("knifoo0") && links.contains("other0"), "{links}");
    assert_eq!(links.lines().count(), 3, "only they and the uplink are left: {links}");
    assert!(
        stage
            .node
            .run("ip", &["route", "show", "table", "19278"])?
            .contains("203.0.113.9")
    );
    assert!(stage.node.run("ip", &["rule"])?.contains("lookup 77"));
    assert!(
        stage
            .node
            .enter(|| std::path::Path::new("/run/netns/foreign").exists())?
    );
    drop(pod);
    // Without the pods the node has its earlier state.
    stage
        .node
        .ip(&["rule del pref 1910", "link del knifoo0", "netns del foreign"])?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_update_waits_for_the_old_agent() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::new("rolling").await?;
    let mut town = Town::build(&stage).await?;
    let next = Agent::start_unready(&stage.node, stage.options.clone())?;
    thread::sleep(Duration::from_millis(500));
    assert!(!next.log().contains("serving on"), "{}", next.log());
    assert_eq!(stage.agent.terminate()?.code(), Some(0));
    next.wait_ready(patience())?;
    stage.kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
    town.assert_queries_answer_the_same(&stage).await?;
    town.assert_no_packet_was_lost();
    town.leave(&stage).await
}

#[tokio::test(flavor = "multi_thread")]
async fn another_number_of_endpoints_keeps_the_pods() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::new("resized").await?;
    let pods = [
        stage.kubelet.run_pod("team", "web-0", &[]).await?,
        stage.kubelet.run_pod("team", "web-1", &[]).await?,
    ];
    let servers = Servers::start(&pods[1].inside, "web-1", 8080)?;
    stage.agent.terminate()?;
    let options = AgentOptions {
        args: ["--warm-sandboxes", "0", "--max-endpoints", "64"]
            .map(String::from)
            .into(),
        ..AgentOptions::default()
    };
    let first = NodeSnapshot::take(&stage.node)?;
    let next = Agent::start(&stage.node, options)?;
    stage.kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
    let links = NodeSnapshot::take(&stage.node)?;
    assert_eq!(links.section("link"), first.section("link"));
    for (server, stream) in streams(&pods[0].inside, &pods[1])? {
        thread::sleep(Duration::from_millis(50));
        stream.stop().assert_whole(&server);
    }
    drop(servers);
    for pod in pods {
        stage.kubelet.kill_pod(pod).await.context("after the change")?;
    }
    drop(next);
    Ok(())
}
