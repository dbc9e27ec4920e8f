//! Measures what a pod loses that sends as soon as it is attached, from an address block that other nodes do not know
//! yet.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr, UdpSocket},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_api::AddressBlock;
use kni_integration::{
    Cluster, Namespaces, Pod,
    cluster::{Member, objects, patience},
    long, require,
    traffic::Servers,
};
use kni_proto::runtime::ListDropsRequest;
use kube::{Api, api::ListParams};
use serde_json::{Value, json};

use super::super::scene::{PORT, address, serve, wait_for_condition};

/// Pause between two datagrams of a pod.
const INTERVAL: Duration = Duration::from_millis(1);
/// How long a pod sends after its first answer.
const AFTERWARDS: Duration = Duration::from_millis(100);
/// Within this time other nodes know a block, also on a busy machine.
const KNOWN: Duration = Duration::from_secs(5);
/// Blocks that a node may have claimed before it needs them, where a block is one address.
const SPARE: usize = 4;
const NETWORK: &str = "fresh";
const TEAM: &str = "fresh-team";

/// Pods that start at once, each in a block of its own.
fn count() -> usize {
    if long() { 100 } else { 12 }
}

/// What one pod has sent in one family.
struct Sent {
    tokens: Vec<String>,
    /// From its first datagram to its first answer.
    answered: Duration,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_a_fresh_block_loses_is_short_and_counted() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("fabric-fresh", 2).await?;
    let more = json!({
        "namespaceSelector": { "matchLabels": { "tenant": NETWORK } },
        // Each address is a block.
        "perNodePrefix": { "ipv4": 32, "ipv6": 128 },
    });
    cluster
        .apply(&[
            objects::default_network(),
            objects::network(NETWORK, &["10.10.0.0/23", "fd10::/119"], &more),
            objects::namespace(TEAM, &json!({ "tenant": NETWORK })),
        ])
        .await?;
    wait_for_condition(&cluster, NETWORK, "Programmed", true).await?;
    let run = cluster.run(&[objects::pod(TEAM, "server", "node2")]).await?;
    let target = run.first().context("a pod")?;
    let server = serve(target)?;

    // The node does not follow the network yet; its attach waits until it knows the blocks of the other one.
    let first = Measured::of(&cluster, (target, &server), &["first".to_owned()]).await?;
    first.print("the first pod of a network on its node");
    ensure!(
        first.dropped("node1", "no_destination") == 0,
        "the node did not know the network: {:?}",
        first.drops
    );
    ensure!(
        first.lost == first.dropped("node2", "owner_unknown"),
        "{} were lost: {:?}",
        first.lost,
        first.drops
    );
    // It does, and so does the other one.
    let before = ranges(&cluster).await?;
    let names: Vec<String> = (0..count()).map(|pod| format!("late{pod}")).collect();
    let measured = Measured::of(&cluster, (target, &server), &names).await?;
    measured.print(&format!("{} pods in blocks of their own", names.len()));
    let fresh = |ip: &&IpAddr| !before.iter().any(|range| range.contains(*ip));
    let found = measured.addresses.iter().filter(fresh).count();
    ensure!(
        found >= 2 * (names.len() - SPARE),
        "only {found} of {} addresses are of fresh blocks",
        measured.addresses.len()
    );
    ensure!(
        measured.lost == measured.dropped("node2", "owner_unknown"),
        "{} were lost: {:?}",
        measured.lost,
        measured.drops
    );
    ensure!(measured.longest < KNOWN, "{:?}", measured.longest);
    Ok(())
}

/// All blocks of the network.
async fn ranges(cluster: &Cluster) -> Result<Vec<IpNet>> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let blocks = api.list(&ListParams::default()).await?.items;
    let of_network = blocks.iter().filter(|block| block.spec.network == NETWORK);
    of_network.map(|block| Ok(block.spec.cidr.parse()?)).collect()
}

/// What pods lost that sent at once.
struct Measured {
    addresses: Vec<IpAddr>,
    sent: usize,
    lost: u64,
    /// Pods and families that lost anything.
    affected: usize,
    /// The longest time from the first datagram to the first answer.
    longest: Duration,
    /// By node, direction and reason.
    drops: BTreeMap<(String, String, String), u64>,
}

impl Measured {
    /// Creates pods on the first node at once, each of which sends to the target from its attach on.
    async fn of(cluster: &Cluster, (target, server): (&Pod, &Servers), names: &[String]) -> Result<Self> {
        let to = [true, false].map(|v4| SocketAddr::new(address(target, v4), PORT));
        let before = drops(cluster).await?;
        let wanted: Vec<Value> = names.iter().map(|name| objects::pod(TEAM, name, "node1")).collect();
        cluster.create_pods(&wanted).await?;
        let pods = begin_when_attached(&cluster.nodes[0], names, to).await?;
        let mut measured = Self {
            addresses: Vec::new(),
            sent: 0,
            lost: 0,
            affected: 0,
            longest: Duration::ZERO,
            drops: BTreeMap::new(),
        };
        let arrived = |token: &String| server.saw(token);
        for (pod, threads) in pods {
            measured.addresses.extend(pod.ips());
            for thread in threads {
                let Sent { tokens, answered } = thread.join().expect("a sender does not panic")?;
                ensure!(
                    server.saw_within(tokens.last().context("a datagram")?, KNOWN),
                    "the last one is lost"
                );
                let first = tokens.iter().position(arrived).context("none has arrived")?;
                ensure!(
                    tokens[first..].iter().all(arrived),
                    "{}: datagrams are lost after the first one that arrived: {tokens:?}",
                    pod.name
                );
                measured.sent += tokens.len();
                measured.lost += u64::try_from(first)?;
                measured.affected += usize::from(first > 0);
                measured.longest = measured.longest.max(answered);
            }
        }
        measured.drops = drops(cluster).await?;
        for (row, earlier) in before {
            *measured.drops.entry(row).or_default() -= earlier;
        }
        measured.drops.retain(|_, count| *count > 0);
        Ok(measured)
    }

    fn dropped(&self, node: &str, reason: &str) -> u64 {
        let of = self
            .drops
            .iter()
            .filter(|((of, _, why), _)| of == node && why == reason);
        of.map(|(_, count)| count).sum()
    }

    fn print(&self, what: &str) {
        println!(
            "{what}: {} datagrams, one each {INTERVAL:?}; {} lost, by {} of {} pods and families; first answer after at most \
             {:.0?}; dropped: {:?}",
            self.sent,
            self.lost,
            self.affected,
            self.addresses.len(),
            self.longest,
            self.drops
        );
    }
}

type Sending = JoinHandle<Result<Sent>>;

/// Lets each of the pods send in both families as soon as the attach has ended.
async fn begin_when_attached(
    member: &Member,
    names: &[String],
    to: [SocketAddr; 2],
) -> Result<Vec<(Pod, [Sending; 2])>> {
    let (start, mut known, mut begun) = (Instant::now(), BTreeSet::new(), Vec::new());
    while begun.len() < names.len() {
        ensure!(
            start.elapsed() < patience(),
            "{} of {} pods run",
            begun.len(),
            names.len()
        );
        for pod in member.kubelet.running() {
            if names.contains(&pod.name) && known.insert(pod.name.clone()) {
                let threads = to.map(|to| {
                    let (inside, name) = (pod.inside.clone(), pod.name.clone());
                    thread::spawn(move || send(&inside, &name, to))
                });
                begun.push((pod, threads));
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
    Ok(begun)
}

/// Sends datagrams until a time after the first answer.
fn send(inside: &Namespaces, name: &str, to: SocketAddr) -> Result<Sent> {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = inside.enter(|| UdpSocket::bind(SocketAddr::new(any, 0)))??;
    socket.set_nonblocking(true)?;
    let (start, mut tokens, mut answered) = (Instant::now(), Vec::new(), None);
    while answered.is_none_or(|answered| start.elapsed() < answered + AFTERWARDS) {
        ensure!(start.elapsed() < patience(), "{name} has no answer of {to}");
        let token = format!("{name}-{}-{}", to.is_ipv4(), tokens.len());
        socket.send_to(token.as_bytes(), to)?;
        tokens.push(token);
        thread::sleep(INTERVAL);
        while socket.recv(&mut [0; 256]).is_ok() {
            answered.get_or_insert_with(|| start.elapsed());
        }
    }
    let answered = answered.context("no answer")?;
    Ok(Sent { tokens, answered })
}

/// All drops of the nodes.
async fn drops(cluster: &Cluster) -> Result<BTreeMap<(String, String, String), u64>> {
    let mut all = BTreeMap::new();
    for member in &cluster.nodes {
        let request = ListDropsRequest::default();
        let listed = member.kubelet.kni().runtime().list_drops(request).await?.into_inner();
        for drop in listed.drops {
            let packets = drop.count.map_or(0, |count| count.packets);
            *all.entry((member.name.clone(), drop.direction, drop.reason))
                .or_default() += packets;
        }
    }
    Ok(all)
}
