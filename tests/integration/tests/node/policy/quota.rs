//! Tests the quota of policy rows: a namespace whose policies exceed it closes its own pods, and no other pod is
//! affected.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    AgentOptions, Manifest, Node, Pod, Stage, eventually, manifest::network_policy, patience, require, stage::address,
    traffic::Servers, traffic::tcp_get,
};

use super::PORT;

const POLICIES: u32 = 4;
/// Ranges of each policy: together more than the tables of the test have.
const RANGES: u32 = 1500;

/// Policies of namespace `hog` with this many different ranges each, which allow everything to its pods.
fn policies(ranges: u32) -> Manifest {
    let mut text = String::new();
    for policy in 0..POLICIES {
        let mut peers = String::from("{ipBlock: {cidr: 10.244.0.0/16}}, {ipBlock: {cidr: 'fd00:244::/64'}}");
        for n in policy * ranges..(policy + 1) * ranges {
            let [_, high, middle, low] = n.to_be_bytes();
            let _infallible = write!(peers, ", {{ipBlock: {{cidr: {}.{middle}.{low}.0/24}}}}", 64 + high);
        }
        let spec = format!("{{podSelector: {{}}, policyTypes: [Ingress], ingress: [{{from: [{peers}]}}]}}");
        text += &network_policy("hog", &format!("p{policy}"), &spec);
    }
    Manifest::file("hog.yaml", text)
}

fn team(allow: bool) -> Manifest {
    let rules = if allow { "[{from: [{podSelector: {}}]}]" } else { "[]" };
    let spec = format!("{{podSelector: {{}}, policyTypes: [Ingress], ingress: {rules}}}");
    Manifest::file("team.yaml", network_policy("team", "own", &spec))
}

struct Scene {
    stage: Stage,
    server: Pod,
    client: Pod,
    hog: Pod,
    pods: usize,
}

impl Scene {
    async fn start(name: &str, args: &[&str]) -> Result<Self> {
        let options = AgentOptions::new(Manifest::overlapping(), args);
        let stage = Stage::with(Node::new(name)?, options).await?;
        let (server, client) = (stage.pod("server").await?, stage.pod("client").await?);
        let hog = stage.kubelet.run_pod("hog", "hog", &[]).await?;
        Ok(Self {
            stage,
            server,
            client,
            hog,
            pods: 0,
        })
    }

    /// Whether the client may reach a server at `port`, which answers over TCP, too, then.
    async fn reaches(&self, to: &Pod, server: &Servers, port: u16) -> Result<bool> {
        let enters = self.stage.enters(&self.client, to, server, port).await?;
        if enters {
            tcp_get(&self.client.inside, address(to, true), port, patience())?;
        }
        Ok(enters)
    }

    /// How long other tenants wait for an attach, and for both directions of a change of policies.
    async fn latencies(&mut self, server: &Servers) -> Result<[Duration; 2]> {
        let mut attach = Duration::ZERO;
        for _ in 0..5 {
            self.pods += 1;
            let begin = Instant::now();
            self.stage.pod(&format!("late{}", self.pods)).await?;
            attach = attach.max(begin.elapsed());
        }
        let mut change = Duration::ZERO;
        for allow in [false, true] {
            let begin = Instant::now();
            Manifest::apply(&[team(allow)], &self.stage.node)?;
            eventually(patience(), async || {
                // A datagram only: between it and a connection the policy may change.
                let enters = self.stage.enters(&self.client, &self.server, server, PORT).await?;
                ensure!(enters == allow, "the policy of another tenant is not applied");
                Ok(())
            })
            .await?;
            change = change.max(begin.elapsed());
        }
        ensure!(
            self.reaches(&self.server, server, PORT).await?,
            "another tenant's server is closed"
        );
        Ok([attach, change])
    }

    /// Applies the policies of the hog, and waits until the agent reports that they exceed the quota.
    async fn exceed(&self, hog: &Servers, port: u16) -> Result<String> {
        Manifest::apply(&[policies(RANGES)], &self.stage.node)?;
        let reported = eventually(patience(), async || {
            let status = self.stage.status().await?;
            let about = status.reasons.iter().find(|reason| reason.contains("namespace hog"));
            about.cloned().with_context(|| format!("{status:?}"))
        })
        .await?;
        let status = self.stage.status().await?;
        ensure!(status.ready, "{status:?}");
        ensure!(!self.reaches(&self.hog, hog, port).await?, "the hog's own pods close");
        Ok(reported)
    }
}

async fn others_are_as_before(scene: &mut Scene) -> Result<()> {
    let server = Servers::start(&scene.server.inside, "server", PORT)?;
    let hog = Servers::start(&scene.hog.inside, "hog", PORT)?;
    Manifest::apply(&[team(true)], &scene.stage.node)?;
    ensure!(scene.reaches(&scene.hog, &hog, PORT).await?, "before its policies");
    let before = scene.latencies(&server).await?;
    let begin = Instant::now();
    let reported = scene.exceed(&hog, PORT).await?;
    println!("{reported}\nreported after {:?}", begin.elapsed());
    ensure!(
        reported.contains("rows") && reported.contains("NetworkPolicy hog/p"),
        "it names the figures and the policy: {reported}"
    );
    let after = scene.latencies(&server).await?;
    println!("slowest of 5 attaches, slower of 2 policy changes: {before:?} before, {after:?} beside the hog");
    ensure!(
        scene.reaches(&scene.server, &server, PORT).await?,
        "others are as before"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_beyond_the_quota_close_the_pods_of_their_own_namespace() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::start("quota", &["--max-policy-rows", "4096"]).await?;
    others_are_as_before(&mut scene).await?;
    let hog = Servers::start(&scene.hog.inside, "again", PORT + 1)?;
    // The same state after a restart.
    scene.stage.agent.kill9()?;
    scene.stage.agent.restart()?;
    scene.exceed(&hog, PORT + 1).await?;
    let more = scene.stage.kubelet.run_pod("hog", "second", &[]).await?;
    let second = Servers::start(&more.inside, "second", PORT)?;
    ensure!(
        !scene.reaches(&more, &second, PORT).await?,
        "the namespace's pods attach, closed"
    );
    // Fewer rules open them again.
    Manifest::apply(&[policies(10)], &scene.stage.node)?;
    eventually(patience(), async || {
        ensure!(scene.reaches(&scene.hog, &hog, PORT + 1).await?, "it stays closed");
        Ok(())
    })
    .await?;
    eventually(patience(), async || {
        let status = scene.stage.status().await?;
        ensure!(status.ready && status.reasons.is_empty(), "{status:?}");
        Ok(())
    })
    .await
}
