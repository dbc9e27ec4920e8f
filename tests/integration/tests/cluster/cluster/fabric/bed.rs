//! Provides nodes with a pod of each network on every node, and what is on the wire between them.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_api::{NodeEndpoint, PodNetwork};
use kni_integration::{
    Cluster, Pod,
    cluster::{Member, MemberOptions, objects, patience, wire::ip_packet},
    frames::{Link, PacketSocket, parse_mac},
    traffic::{Matrix, Probe, Servers},
    wait,
};
use kni_proto::runtime::ListDropsRequest;
use kube::{Api, api::ListParams};
use serde_json::{Value, json};

use super::super::scene::{PORT, address, ask, identity, serve, wait_for_condition};

/// Nodes of a bed.
pub(super) const NODES: usize = 3;
/// The namespaces of the default network, and of two networks with the same addresses.
pub(super) const TEAMS: [&str; 3] = ["plain", "red-team", "blue-team"];
/// [`TEAMS`], and that of a third network with the same addresses.
pub(super) const WITH_GREEN: [&str; 4] = ["plain", "red-team", "blue-team", "green-team"];
/// Time to wait for what must not come.
pub(super) const SILENCE: Duration = Duration::from_millis(500);

/// Time to wait for a crafted packet.
const RAW_PATIENCE: Duration = Duration::from_mins(1);

/// What differs between beds.
#[derive(Default)]
pub(super) struct Setting {
    pub(super) options: MemberOptions,
    /// Whether there is a third network with the same addresses.
    pub(super) green: bool,
    /// What is merged into the specs of networks, by name.
    pub(super) specs: Vec<(&'static str, Value)>,
}

/// Nodes with a pod of each team on every node, and a server in every pod.
pub(super) struct Bed {
    pub(super) cluster: Cluster,
    pub(super) teams: &'static [&'static str],
    /// The pods: all of the first team by node, then those of the next one.
    pub(super) pods: Vec<Pod>,
    pub(super) servers: Vec<Servers>,
}

impl Bed {
    /// Nodes whose agents have these additional arguments; the default network has this fabric.
    pub(super) async fn start(name: &str, args: &[&str], default: Option<&str>) -> Result<Self> {
        let setting = Setting::with_args(args);
        let fabric = default.map(|fabric| ("default", json!({ "fabric": fabric })));
        let specs = fabric.into_iter().collect();
        Self::start_with(name, &Setting { specs, ..setting }).await
    }

    /// The same with any setting.
    pub(super) async fn start_with(name: &str, setting: &Setting) -> Result<Self> {
        let mut cluster = Cluster::without_nodes(name).await?;
        for _node in 0..NODES {
            cluster.add_node(setting.options.clone()).await?;
        }
        let teams = setting.teams();
        apply_networks(&cluster, teams, &setting.specs).await?;
        let wanted: Vec<Value> = teams
            .iter()
            .flat_map(|team| (1..=NODES).map(|node| objects::pod(team, &format!("p{node}"), &format!("node{node}"))))
            .collect();
        let pods = cluster.run(&wanted).await?;
        let servers = pods.iter().map(serve).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            cluster,
            teams,
            pods,
            servers,
        })
    }

    /// A team's pod on a node, from 1 on.
    pub(super) fn pod(&self, team: &str, node: usize) -> &Pod {
        let team = self.teams.iter().position(|known| *known == team).expect("a team");
        &self.pods[team * NODES + node - 1]
    }

    /// Who answers whom: each pod of the own team, and of other teams none.
    pub(super) fn matrix(&self) -> Matrix {
        let names: Vec<String> = self.pods.iter().map(identity).collect();
        let mut probes = Vec::new();
        for from in &self.pods {
            for to in &self.pods {
                for v4 in [true, false] {
                    let ip = address(to, v4);
                    if ip == address(from, v4) {
                        continue;
                    }
                    let of_team = |(pod, _): &(&Pod, &String)| pod.namespace == from.namespace;
                    let owner = self.pods.iter().zip(&names).filter(of_team);
                    let owner = owner.clone().find(|(pod, _)| address(pod, v4) == ip);
                    probes.push(Probe {
                        from: &from.inside,
                        to: ip,
                        expected: owner.map(|(_, name)| name.as_str()),
                    });
                }
            }
        }
        let servers: Vec<&Servers> = self.servers.iter().collect();
        Matrix::run(&probes, &servers, PORT, SILENCE)
    }

    /// Waits until every pod reaches those of its team on the other nodes.
    pub(super) async fn connected(&self) -> Result<()> {
        wait::until("the pods of all nodes reach each other", patience(), async || {
            let matrix = self.matrix();
            let failures = matrix.failures().len();
            ensure!(failures == 0, "{failures} rows:\n{matrix}");
            Ok(true)
        })
        .await
        .map(drop)
        .with_context(|| self.state())
        .with_context(|| self.objects())
    }

    /// Waits until the pods of each team on these pairs of nodes reach each other, the first the second.
    pub(super) async fn reached(&self, pairs: &[(usize, usize)]) -> Result<()> {
        for team in TEAMS {
            for (from, to) in pairs {
                let (from, to) = (self.pod(team, *from), self.pod(team, *to));
                let what = format!("{} reaches {}", identity(from), identity(to));
                wait::until(&what, patience(), async || {
                    Ok(ask(from, to) == vec![Ok(identity(to)), Ok(identity(to))])
                })
                .await
                .with_context(|| self.state())?;
            }
        }
        Ok(())
    }

    /// The objects that the nodes follow, for messages.
    fn objects(&self) -> String {
        let shown = futures::executor::block_on(async {
            let endpoints: Api<NodeEndpoint> = Api::all(self.cluster.client.clone());
            let networks: Api<PodNetwork> = Api::all(self.cluster.client.clone());
            let endpoints = endpoints.list(&ListParams::default()).await?;
            let networks = networks.list(&ListParams::default()).await?;
            let endpoints = endpoints
                .items
                .iter()
                .map(|object| format!("{:?} {:?}", object.spec, object.status));
            let networks = networks.items.iter().map(|object| {
                let fabric = object.status.as_ref().map(|status| (status.fabric, &status.number));
                format!("{:?}: {fabric:?}", object.metadata.name)
            });
            anyhow::Ok(endpoints.chain(networks).collect::<Vec<_>>().join("\n"))
        });
        format!("{shown:?}")
    }

    /// What each node has dropped, for messages.
    pub(super) async fn drops(&self) -> Result<String> {
        let mut shown = Vec::new();
        for member in &self.cluster.nodes {
            let request = ListDropsRequest::default();
            let listed = member.kubelet.kni().runtime().list_drops(request).await?;
            shown.push(format!("{} dropped {:?}", member.name, listed.into_inner().drops));
        }
        Ok(shown.join("\n"))
    }

    /// What each node knows of others, for messages.
    pub(super) fn state(&self) -> String {
        let of_node = |member: &Member| {
            let commands = [
                "-d link show kni-overlay",
                "route show table 19278",
                "-6 route show table 19278",
            ];
            let shown = commands.map(|command| {
                let shown = member.node.run("ip", &command.split(' ').collect::<Vec<_>>());
                format!("{} {command}: {shown:?}", member.name)
            });
            let log = member.agent.log();
            let last: Vec<&str> = log.lines().rev().take(20).collect();
            format!(
                "{}\n{} log, newest first:\n{}",
                shown.join("\n"),
                member.name,
                last.join("\n")
            )
        };
        let nodes: Vec<String> = self.cluster.nodes.iter().map(of_node).collect();
        nodes.join("\n")
    }

    /// Checks that each two tenants have an address in common.
    pub(super) fn overlaps(&self) -> Result<()> {
        let of = |team: &str| -> Vec<IpAddr> { (1..=NODES).map(|node| address(self.pod(team, node), true)).collect() };
        let tenants = &self.teams[1..];
        for (at, one) in tenants.iter().enumerate() {
            for other in &tenants[..at] {
                let others = of(other);
                ensure!(
                    of(one).iter().any(|ip| others.contains(ip)),
                    "{one} and {other} are meant to have the same addresses"
                );
            }
        }
        Ok(())
    }
}

impl Setting {
    /// Nodes whose agents have these additional arguments.
    pub(super) fn with_args(args: &[&str]) -> Self {
        let mut setting = Self::default();
        setting.options.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        setting
    }

    const fn teams(&self) -> &'static [&'static str] {
        if self.green { &WITH_GREEN } else { &TEAMS }
    }
}

/// All ordered pairs of nodes.
pub(super) fn pairs() -> impl Iterator<Item = (usize, usize)> {
    let pairs = (1..=NODES).flat_map(|from| (1..=NODES).map(move |to| (from, to)));
    pairs.filter(|(from, to)| from != to)
}

/// The network of a team.
pub(super) fn network_of(team: &str) -> &str {
    team.strip_suffix("-team").unwrap_or("default")
}

async fn apply_networks(cluster: &Cluster, teams: &[&str], specs: &[(&str, Value)]) -> Result<()> {
    let way_out = json!({ "egress": { "mode": "Masquerade" } });
    let mut first = objects::default_network();
    objects::merge(&mut first["spec"], &way_out);
    let mut all = vec![first, objects::namespace("plain", &json!({}))];
    for team in &teams[1..] {
        let name = network_of(team);
        let more = json!({
            "namespaceSelector": { "matchLabels": { "tenant": name } },
            // Four blocks for three nodes, so that both networks assign the same addresses.
            "perNodePrefix": { "ipv4": 26, "ipv6": 122 },
        });
        all.push(objects::network(name, &["10.10.0.0/24", "fd10::/120"], &more));
        all.push(objects::namespace(team, &json!({ "tenant": name })));
    }
    for (name, spec) in specs {
        let mut objects = all.iter_mut();
        let object = objects.find(|object| object["kind"] == "PodNetwork" && object["metadata"]["name"] == *name);
        objects::merge(&mut object.context("a network of that name")?["spec"], spec);
    }
    cluster.apply(&all).await?;
    for team in teams {
        wait_for_condition(cluster, network_of(team), "Programmed", true).await?;
    }
    Ok(())
}

/// A socket for whole packets at the pod's end of its interface, as a pod with all capabilities has.
pub(super) struct Raw {
    pub(super) socket: PacketSocket,
    pub(super) link: Link,
}

impl Raw {
    pub(super) fn of(pod: &Pod) -> Result<Self> {
        let shown = |args: &[&str], field: &str| -> Result<_> {
            let shown: Value = serde_json::from_str(&pod.inside.run("ip", args)?)?;
            let mac = shown[0][field].as_str().and_then(parse_mac);
            mac.with_context(|| format!("no {field} in {shown}"))
        };
        let own = shown(&["-j", "link", "show", "eth0"], "address")?;
        let gateway = shown(&["-j", "neighbour", "show", "dev", "eth0"], "lladdr")?;
        Ok(Self {
            socket: PacketSocket::open(&pod.inside, "eth0")?,
            link: Link::new(own, gateway),
        })
    }

    pub(super) fn send(&self, packet: &[u8]) -> Result<()> {
        Ok(self.socket.send(&self.link.frame(packet))?)
    }

    /// The first packet with these ends and this protocol; its payload.
    pub(super) fn receive(&self, from: IpAddr, to: IpAddr, protocol: u8) -> Result<Option<Vec<u8>>> {
        let wanted = |frame: &[u8]| {
            ip_packet(frame)
                .is_some_and(|(source, destination, found, _)| (source, destination, found) == (from, to, protocol))
        };
        let frame = self.socket.receive(RAW_PATIENCE, wanted)?;
        Ok(frame.and_then(|frame| ip_packet(&frame).map(|(.., payload)| payload.to_vec())))
    }
}
