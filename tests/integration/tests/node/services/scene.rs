//! Sets up a node whose agent reads Services, pods that answer with their names, and requests to them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
pub(crate) use kni_integration::patience;
use kni_integration::{
    AgentOptions, Manifest, Namespaces, Node, Pod, Stage, eventually,
    stage::forwarding,
    traffic::{Answer, NoAnswer, Servers, new_token, syn_repeats, tcp_get_to, udp_ask_by},
};
use kni_proto::runtime::ListServicesRequest;
use serde_json::{Value, json};

use super::objects::{BACK, FRONT, HERE, ZONE, networks, vip};

/// Both families, IPv4 first.
pub(crate) const FAMILIES: [bool; 2] = [true, false];
/// Time to wait before no answer counts as silence.
const SILENCE: Duration = Duration::from_millis(700);

/// A node and its agent.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    /// Number of the last change.
    change: u16,
}

/// A pod with a server at [`BACK`]; its servers are dropped first.
pub(crate) struct Backend {
    pub(crate) server: Servers,
    pub(crate) pod: Pod,
}

impl Scene {
    pub(crate) async fn set(name: &str) -> Result<Self> {
        Self::with(name, networks(), &[]).await
    }

    /// Uses other manifests and additional arguments of the agent.
    pub(crate) async fn with(name: &str, manifests: Vec<Manifest>, args: &[&str]) -> Result<Self> {
        let node = Node::new(name)?;
        forwarding(&node)?;
        let args = [&["--node-name", HERE, "--zone", ZONE][..], args].concat();
        Ok(Self {
            stage: Stage::with(node, AgentOptions::new(manifests, &args)).await?,
            change: 0,
        })
    }

    pub(crate) async fn backend(&self, name: &str) -> Result<Backend> {
        Self::serving(self.stage.pod(name).await?)
    }

    pub(crate) async fn backend_in(&self, network: &str, name: &str, ips: &str) -> Result<Backend> {
        Self::serving(self.stage.pod_in(network, name, ips).await?)
    }

    fn serving(pod: Pod) -> Result<Backend> {
        let server = Servers::start(&pod.inside, &pod.name, BACK)?;
        Ok(Backend { server, pod })
    }

    /// Replaces all Services and EndpointSlices, and waits until they are applied.
    pub(crate) async fn apply(&mut self, objects: &[Value]) -> Result<()> {
        self.write(objects)?;
        self.wait_until_applied().await
    }

    /// Replaces all Services and EndpointSlices without waiting. They are in one file, so that they change together.
    pub(crate) fn write(&mut self, objects: &[Value]) -> Result<()> {
        self.change += 1;
        let canary = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "canary", "name": "canary"},
            "spec": {"clusterIP": vip(true, 254).to_string(), "ports": [{"port": self.change}]},
        });
        let all = [objects, &[canary][..]].concat();
        Manifest::apply(&[Manifest::of("services.yaml", &all)], &self.stage.node)
    }

    /// Waits until the last change is applied.
    pub(crate) async fn wait_until_applied(&self) -> Result<()> {
        eventually(patience(), async || {
            let listed = self.list().await?;
            let canary = listed.iter().find(|port| port.service.starts_with("canary/"));
            let applied = canary.is_some_and(|port| port.port == u32::from(self.change));
            ensure!(applied, "change {} is not applied", self.change);
            Ok(())
        })
        .await
        .with_context(|| format!("the agent's log:\n{}", self.stage.agent.log()))
    }

    pub(crate) async fn list(&self) -> Result<Vec<kni_proto::runtime::ServicePort>> {
        let request = ListServicesRequest {};
        Ok(self
            .stage
            .kubelet
            .runtime()
            .list_services(request)
            .await?
            .into_inner()
            .services)
    }

    /// Checks that TCP and UDP get no answer, and that both are counted as drops of `client` for `reason`.
    pub(crate) async fn assert_silent(&self, client: &Pod, to: SocketAddr, reason: &str) -> Result<()> {
        let before = self.stage.drops(client, "from_pod", reason).await?;
        for transport in Transport::BOTH {
            let asked = transport.ask_within(&client.inside, to, SILENCE);
            ensure!(asked == Err(NoAnswer::Timeout), "{transport:?} to {to}: {asked:?}");
        }
        // From: a busy machine repeats the SYN before it gives up.
        let counted = self.stage.wait_for_drops_from(client, "from_pod", reason, before + 2);
        let counted = counted
            .await
            .with_context(|| format!("{to} is silent, but not for {reason}"));
        counted.map(drop)
    }
}

/// A virtual address at its usual port.
pub(crate) fn front(v4: bool, last: u8) -> SocketAddr {
    SocketAddr::new(vip(v4, last), FRONT)
}

/// The transport of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Udp,
}

impl Transport {
    pub(crate) const BOTH: [Self; 2] = [Self::Tcp, Self::Udp];

    /// Opens a new flow with one request.
    pub(crate) fn ask(self, from: &Namespaces, to: SocketAddr) -> Result<Answer, NoAnswer> {
        self.ask_within(from, to, patience())
    }

    fn ask_within(self, from: &Namespaces, to: SocketAddr, patience: Duration) -> Result<Answer, NoAnswer> {
        let token = new_token();
        match self {
            Self::Tcp => tcp_get_to(from, to, &token, patience),
            Self::Udp => udp_ask_by(from, fresh_port(), to, &token, patience),
        }
    }
}

/// A port below the kernel's ephemeral ports, each used once: a UDP flow outlives its socket, and another one from the
/// same port would not be a new flow.
fn fresh_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    10_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 20_000
}

/// The servers that answer `times` new flows of each transport, with the numbers of answers. Every flow must be
/// answered.
pub(crate) fn answering(from: &Namespaces, to: SocketAddr, times: usize) -> Result<BTreeMap<String, usize>> {
    let mut found = BTreeMap::new();
    for transport in Transport::BOTH {
        for _ in 0..times {
            let answer = transport.ask(from, to);
            let answer = answer.with_context(|| format!("{transport:?} from {} to {to}", from.name()))?;
            *found.entry(answer.identity).or_default() += 1;
        }
    }
    Ok(found)
}

/// Checks that exactly these servers answer new flows. With three of them, the probability of missing one is 10^-6.
pub(crate) fn assert_answering(from: &Namespaces, to: SocketAddr, who: &[&str]) -> Result<()> {
    let found: BTreeSet<String> = answering(from, to, 20)?.into_keys().collect();
    let who: BTreeSet<String> = who.iter().map(|&name| name.to_owned()).collect();
    ensure!(
        found == who,
        "from {} at {to}: {found:?} answer, not {who:?}",
        from.name()
    );
    Ok(())
}

/// Checks that TCP is refused by RST and UDP by an ICMP error, before a client would retransmit.
pub(crate) fn assert_refused(from: &Namespaces, to: SocketAddr) -> Result<()> {
    let repeats = syn_repeats(from)?;
    for transport in Transport::BOTH {
        let answer = transport.ask_within(from, to, patience());
        ensure!(
            answer == Err(NoAnswer::Refused),
            "{transport:?} from {} to {to}: {answer:?}",
            from.name()
        );
    }
    ensure!(
        syn_repeats(from)? == repeats,
        "refused, but not the first SYN from {} to {to}",
        from.name()
    );
    Ok(())
}

/// The address, with IPv4-mapped IPv6 addresses converted to IPv4.
pub(crate) fn seen(answer: &Answer) -> IpAddr {
    answer.client.ip().to_canonical()
}
