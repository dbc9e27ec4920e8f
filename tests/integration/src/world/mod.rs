//! Runs the setup of the Kubernetes policy tests on real agents: namespaces x, y and z with pods a, b and c each, on
//! two networks, all with TCP, UDP and SCTP servers on ports 80 and 81 over both families.
//!
//! The pods are on one node without an API server, or spread over the nodes of a cluster. `apply` applies policies and
//! labels, [`NinePods::wait_for`] waits until every question has the expected answer consistently. The expectation
//! comes from [`crate::oracle`].

mod canary;
pub mod cases;
mod objects;
mod probe;
mod sctp;
mod serve;
mod spread;
mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use self::{
    canary::Canary,
    probe::{Patience, Probe},
    serve::Serving,
};
pub use self::{
    objects::{Addresses, PolicyText},
    spread::{NODES, PLACEMENTS, Placement, Spread},
    table::{
        MEMBERS, NAMESPACES, Net, Outcome, PODS, PORTS, Question, Table, Via, differences, full_name, index_of,
        names_of,
    },
};
use crate::{
    agent::AgentOptions,
    kubelet::{Kubelet, Sandbox},
    manifest::Manifest,
    namespaces::Namespaces,
    node::Node,
    oracle::{self, Labels},
    stage::{Stage, forwarding},
};

/// Silence after which no more answers are expected. A denied packet takes all of it.
const PATIENCE: Duration = Duration::from_millis(200);

/// Flow tables that hold the flows of hundreds of question tables: an SCTP flow lives for hours, and no pod may reach
/// its flow limit.
const AGENT_ARGS: [&str; 4] = ["--max-flows", "262144", "--max-flows-per-endpoint", "0"];

/// The manifests of a node without an API server. That of the canary is read first and written last.
const CANARY_FILE: &str = "00-canary.yaml";
const NAMESPACES_FILE: &str = "20-namespaces.yaml";
const SERVICES_FILE: &str = "30-services.yaml";
/// All policies in one file, so that they change together.
const POLICIES_FILE: &str = "40-policies.yaml";

/// The labels of all objects, without the policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Labels of the namespaces.
    pub namespaces: BTreeMap<String, Labels>,
    /// Labels of the pods, by index.
    pub pods: Vec<Labels>,
}

impl Default for Setting {
    /// `ns=<name>` for namespaces, `pod=<name>` for pods.
    fn default() -> Self {
        let one = |key: &str, value: &str| Labels::from([(key.to_owned(), value.to_owned())]);
        Self {
            namespaces: NAMESPACES.map(|name| (name.to_owned(), one("ns", name))).into(),
            pods: (0..MEMBERS).map(|index| one("pod", names_of(index).1)).collect(),
        }
    }
}

impl Setting {
    /// The objects for the oracle.
    pub fn world(&self, net: Net, policies: &[PolicyText], addresses: &Addresses) -> oracle::World {
        let pod = |index: usize| {
            let (namespace, name) = names_of(index);
            oracle::Pod {
                namespace: namespace.into(),
                name: name.into(),
                labels: self.pods[index].clone(),
                ports: objects::named_ports(),
                interfaces: Net::BOTH
                    .map(|net| oracle::Interface {
                        network: net.name().into(),
                        primary: net == Net::Default,
                        addresses: [true, false].map(|v4| addresses.of(index, net, v4)).to_vec(),
                    })
                    .to_vec(),
            }
        };
        oracle::World {
            namespaces: self.namespaces.clone(),
            pods: (0..MEMBERS).map(pod).collect(),
            policies: policies
                .iter()
                .map(|policy| policy.for_oracle(net, addresses))
                .collect(),
        }
    }
}

/// A pod of the world. Its servers are dropped before its namespace.
#[derive(Debug)]
pub struct Member {
    /// Its servers.
    _serving: Serving,
    /// Id of its sandbox.
    pub sandbox: String,
    /// Its network namespace.
    pub inside: Namespaces,
    /// Its addresses.
    pub addresses: BTreeMap<Net, Vec<IpAddr>>,
}

impl Member {
    /// A running pod, whose servers are started.
    fn serving(
        index: usize,
        sandbox: String,
        inside: Namespaces,
        addresses: BTreeMap<Net, Vec<IpAddr>>,
    ) -> Result<Self> {
        let all: Vec<IpAddr> = addresses.values().flatten().copied().collect();
        ensure!(all.len() == 4, "{} has the addresses {all:?}", full_name(index));
        Ok(Self {
            _serving: Serving::start(&inside, &full_name(index), &all)?,
            sandbox,
            inside,
            addresses,
        })
    }
}

/// The nine pods and their agents.
#[derive(Debug)]
pub struct NinePods<S = Stage> {
    members: Vec<Member>,
    setting: Setting,
    canaries: Vec<Canary>,
    /// Where they run: by default one agent, its kubelet and its node.
    pub stage: S,
}

impl NinePods {
    /// Runs all pods; no policy selects them yet.
    pub async fn start(name: &str) -> Result<Self> {
        let node = Node::new(name)?;
        forwarding(&node)?;
        let stage = stage(node).await?;
        let setting = Setting::default();
        let mut members = Vec::new();
        for index in 0..MEMBERS {
            members.push(member(&stage, index, &setting.pods[index]).await?);
        }
        let canaries = vec![Canary::start(&stage).await?];
        let mut world = Self {
            members,
            setting,
            canaries,
            stage,
        };
        world.write(&[
            (NAMESPACES_FILE, objects::namespaces(&world.setting.namespaces)),
            (SERVICES_FILE, objects::services(&world.addresses())),
        ])?;
        world.write_canaries()?;
        world.canaries.iter().try_for_each(Canary::wait_shut)?;
        world.apply(Net::Default, &[], &Setting::default()).await?;
        Ok(world)
    }

    /// Replaces the policies, which apply to `net`, and the labels in the manifests, and waits until the agent has
    /// applied them. Pods whose labels change are removed and run again, because a pod cannot get other labels without
    /// an API server. The policies of both networks are replaced.
    pub async fn apply(&mut self, net: Net, policies: &[PolicyText], setting: &Setting) -> Result<()> {
        for index in 0..MEMBERS {
            if self.setting.pods[index] != setting.pods[index] {
                let labels = setting.pods[index].clone();
                self.stage.kubelet.detach(&self.members[index].sandbox).await?;
                self.stage.kubelet.delete_network(&self.members[index].sandbox).await?;
                self.members[index] = member(&self.stage, index, &labels).await?;
            }
        }
        self.setting = setting.clone();
        let addresses = self.addresses();
        self.write(&[
            (NAMESPACES_FILE, objects::namespaces(&setting.namespaces)),
            (SERVICES_FILE, objects::services(&addresses)),
            (POLICIES_FILE, objects::policies(net, policies, &addresses)),
        ])?;
        self.write_canaries()?;
        self.canaries
            .iter()
            .try_for_each(Canary::wait)
            .with_context(|| format!("the agent does not read its manifests:\n{}", self.stage.agent.log()))
    }

    fn write_canaries(&mut self) -> Result<()> {
        let policies = self.canaries.iter_mut().map(Canary::next).collect();
        self.write(&[(CANARY_FILE, policies)])
    }

    fn write(&self, files: &[(&str, Vec<Value>)]) -> Result<()> {
        let manifests: Vec<_> = files
            .iter()
            .map(|(name, objects)| Manifest::of(name, objects))
            .collect();
        Manifest::apply(&manifests, &self.stage.node)
    }
}

impl<S> NinePods<S> {
    /// The pod with an index.
    pub fn member(&self, index: usize) -> &Member {
        &self.members[index]
    }

    /// Every pod's addresses.
    pub fn addresses(&self) -> Addresses {
        Addresses(self.members.iter().map(|member| member.addresses.clone()).collect())
    }

    /// The policies' decisions on every question of `net`, which they apply to, and the open other network.
    pub fn expect_all(&self, net: Net, policies: &[PolicyText]) -> BTreeMap<Question, bool> {
        let asked: Vec<Question> = Via::BOTH.into_iter().flat_map(|via| Question::all(net, via)).collect();
        let mut expected = self.expect(net, policies, &asked);
        let other = Net::BOTH
            .into_iter()
            .filter(|other| *other != net)
            .flat_map(Question::pairs);
        expected.extend(other.map(|question| (question, true)));
        expected
    }

    /// The policies' decisions on questions.
    pub fn expect(&self, net: Net, policies: &[PolicyText], questions: &[Question]) -> BTreeMap<Question, bool> {
        let world = self.setting.world(net, policies, &self.addresses());
        questions
            .iter()
            .map(|question| (*question, question.ask(&world)))
            .collect()
    }

    /// Sends all requests concurrently, with real connections.
    pub fn probe(&self, questions: &[Question]) -> Result<Table> {
        let patience = Arc::new(Patience::new(PATIENCE));
        let mut by_pod: Vec<Vec<Probe>> = vec![Vec::new(); MEMBERS];
        for question in questions {
            by_pod[question.from].push(self.plan(*question));
        }
        thread::scope(|scope| {
            let threads: Vec<_> = by_pod
                .into_iter()
                .enumerate()
                .map(|(index, probes)| {
                    let (inside, patience) = (&self.members[index].inside, &patience);
                    scope.spawn(move || probe::probe(inside, probes, patience))
                })
                .collect();
            let mut table = Table::new();
            for thread in threads {
                table.extend(thread.join().expect("a probe does not panic")?);
            }
            Ok(table)
        })
    }

    /// Probes until all results are as expected twice in a row, but not longer than `limit`; returns the remaining
    /// differences.
    pub fn wait_for(&self, expected: &BTreeMap<Question, bool>, limit: Duration) -> Result<Vec<(Question, String)>> {
        let questions: Vec<Question> = expected.keys().copied().collect();
        ensure!(!questions.is_empty(), "nothing is asked");
        let (deadline, mut good) = (Instant::now() + limit, 0);
        loop {
            let differing = differences(expected, &self.probe(&questions)?);
            good = if differing.is_empty() { good + 1 } else { 0 };
            if good == 2 || Instant::now() > deadline && good == 0 {
                return Ok(differing);
            }
        }
    }

    fn plan(&self, question: Question) -> Probe {
        let to = &self.members[question.to];
        let address = table::of_family(&to.addresses[&question.net], question.v4);
        let server = address.expect("every pod has both families on both networks");
        Probe {
            question,
            to: match question.via {
                Via::Address => server,
                Via::ClusterIp => objects::cluster_ip(question.net, question.to, question.v4),
            },
            name: full_name(question.to),
            server,
        }
    }
}

async fn stage(node: Node) -> Result<Stage> {
    Stage::with(node, AgentOptions::new(objects::networks(), &AGENT_ARGS)).await
}

/// Runs a pod with labels, as the kubelet does.
pub async fn run_labelled(
    kubelet: &Kubelet,
    (namespace, name): (&str, &str),
    labels: &Labels,
    annotations: &[(&str, &str)],
) -> Result<(Sandbox, String)> {
    let netns = kubelet.create_network(namespace, name).await?;
    let mut sandbox = Sandbox::new(namespace, name, &netns);
    sandbox.annotate(annotations);
    let mut request = sandbox.attach_request();
    request.labels.extend(labels.clone());
    kubelet.kni().attach_interface(request).await?;
    Ok((sandbox, netns))
}

async fn member(stage: &Stage, index: usize, labels: &Labels) -> Result<Member> {
    let (namespace, name) = names_of(index);
    let ports = objects::ports_annotation();
    let annotations = [
        ("k8s.v1.cni.cncf.io/networks", Net::Named.name()),
        ("kni.dev/container-ports", &ports),
    ];
    let what = || format!("run pod {namespace}/{name}");
    let run = run_labelled(&stage.kubelet, (namespace, name), labels, &annotations).await;
    let (sandbox, netns) = run.with_context(what)?;
    let inside = stage.node.net_at(&full_name(index), Path::new(&netns))?;
    let mut addresses: BTreeMap<Net, Vec<IpAddr>> = BTreeMap::new();
    for (ifname, config) in stage.kubelet.query(&sandbox.id).await?.ipconfigs {
        let net = if ifname == "eth0" { Net::Default } else { Net::Named };
        let ips: Result<_, _> = config.ip.iter().map(|ip| ip.parse()).collect();
        addresses.insert(net, ips.with_context(what)?);
    }
    Member::serving(index, sandbox.id, inside, addresses)
}
