//! Runs the setup of the Kubernetes policy tests on a real agent: namespaces x, y and z with pods a, b and c each, on
//! two networks, all with TCP, UDP and SCTP servers on ports 80 and 81 over both families.
//!
//! [`NinePods::apply`] applies policies and labels, [`NinePods::wait_for`] waits until every question has the expected
//! answer consistently. The expectation comes from [`crate::oracle`].

mod canary;
mod objects;
mod probe;
mod sctp;
mod serve;
mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use self::{canary::Canary, probe::Probe, serve::Serving};
pub use self::{
    objects::{Addresses, PolicyText},
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

/// Timeout of an answer. A denied packet takes all of it.
const PATIENCE: Duration = Duration::from_millis(200);

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

/// The nine pods and their agent.
#[derive(Debug)]
pub struct NinePods {
    members: Vec<Member>,
    setting: Setting,
    canary: Canary,
    /// The agent, the kubelet and the node.
    pub stage: Stage,
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
        let canary = Canary::start(&stage).await?;
        let mut world = Self {
            members,
            setting,
            canary,
            stage,
        };
        world.write(&[
            objects::namespaces(&world.setting.namespaces),
            objects::services(&world.addresses()),
        ])?;
        let (_, first) = world.canary.next();
        world.write(&[first])?;
        world.canary.wait_shut()?;
        world.apply(Net::Default, &[], &Setting::default()).await?;
        Ok(world)
    }

    /// The pod with an index.
    pub fn member(&self, index: usize) -> &Member {
        &self.members[index]
    }

    /// Every pod's addresses.
    pub fn addresses(&self) -> Addresses {
        Addresses(self.members.iter().map(|member| member.addresses.clone()).collect())
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
            objects::namespaces(&setting.namespaces),
            objects::services(&addresses),
            objects::policies(net, policies, &addresses),
        ])?;
        let (port, manifest) = self.canary.next();
        self.write(&[manifest])?;
        self.canary
            .wait(port)
            .with_context(|| format!("the agent does not read its manifests:\n{}", self.stage.agent.log()))
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
        let mut by_pod: Vec<Vec<Probe>> = vec![Vec::new(); MEMBERS];
        for question in questions {
            by_pod[question.from].push(self.plan(*question));
        }
        thread::scope(|scope| {
            let threads: Vec<_> = by_pod
                .into_iter()
                .enumerate()
                .map(|(index, probes)| {
                    let inside = &self.members[index].inside;
                    scope.spawn(move || probe::probe(inside, probes, PATIENCE))
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

    fn write(&self, manifests: &[Manifest]) -> Result<()> {
        Manifest::apply(manifests, &self.stage.node)
    }
}

/// An agent whose flow tables hold the flows of hundreds of question tables: an SCTP flow lives for hours, and no pod
/// may reach its flow limit.
async fn stage(node: Node) -> Result<Stage> {
    let args = ["--max-flows", "262144", "--max-flows-per-endpoint", "0"];
    Stage::with(node, AgentOptions::new(objects::networks(), &args)).await
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
    let all: Vec<IpAddr> = addresses.values().flatten().copied().collect();
    ensure!(all.len() == 4, "{namespace}/{name} has the addresses {all:?}");
    Ok(Member {
        _serving: Serving::start(&inside, &full_name(index), &all)?,
        sandbox: sandbox.id,
        inside,
        addresses,
    })
}
