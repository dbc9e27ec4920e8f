//! Checks connectivity by content: identifies the server that answers.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use kni_common::{Direction, IFINDEX_BASE, Verdict};
use kni_dataplane::Dataplane;
use kni_integration::{
    eventually_sync,
    frames::{Ip, Link, PacketSocket, Payload},
    traffic::{NoAnswer, new_token, ping, tcp_get_to, udp_ask_to},
};
use kni_model::EndpointId;

use super::pods::{NETWORKS, PORT, Pod, Pods, XDP, addresses, host_ifname, host_mac, mac, v4, v6};

/// Long, because the machine may be emulated.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Time to wait before no answer counts as silence.
pub(crate) const SILENCE: Duration = Duration::from_millis(400);

/// Checks that both programs are attached to every host interface, and that every row is correct.
pub(crate) fn attached(dataplane: &Dataplane, pods: &Pods) -> Result<()> {
    for pod in &pods.all {
        let (programs, mut problems) = dataplane.programs(&host_ifname(pod.id), EndpointId(pod.id));
        problems.extend(dataplane.verify(&pod.config()?));
        if pod.network == XDP {
            let index = IFINDEX_BASE + pod.id;
            problems.extend(
                dataplane
                    .xdp_program(&host_ifname(pod.id), index, EndpointId(pod.id))
                    .err()
                    .map(|problem| problem.to_string()),
            );
        }
        ensure!(problems.is_empty(), "{}: {}", pod.name, problems.join(", "));
        ensure!(programs.len() == 2, "{} has {} programs", pod.name, programs.len());
    }
    println!("both programs are at {} interfaces", pods.all.len());
    Ok(())
}

/// Checks that every datagram of a flow between pods with the fast path arrives.
pub(crate) fn fast_path(pods: &Pods) -> Result<()> {
    const MANY: u32 = 50;
    let (from, to) = (pods.named("red-2")?, pods.named("red-3")?);
    for address in addresses(to.host) {
        let any: IpAddr = if address.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = from.inside.enter(|| UdpSocket::bind((any, 0)))??;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.connect((address, PORT))?;
        for _ in 0..MANY {
            let (token, mut answer) = (new_token(), [0; 512]);
            socket.send(format!("{token}\n").as_bytes())?;
            let length = socket.recv(&mut answer).with_context(|| format!("from {address}"))?;
            let answer = String::from_utf8_lossy(&answer[..length]);
            ensure!(answer.contains(&token) && answer.contains(&to.name), "{answer:?}");
        }
    }
    println!("{MANY} datagrams of each family went there and back by XDP");
    Ok(())
}

/// Checks that every pod reaches exactly the pods of its network, by every protocol and family.
pub(crate) fn isolation(pods: &Pods) -> Result<()> {
    let probes = thread::scope(|scope| {
        // Silence takes the whole timeout, so all probes run concurrently.
        let all: Vec<_> = pods
            .all
            .iter()
            .map(|from| scope.spawn(|| probes_of(pods, from)))
            .collect();
        let results = all.into_iter().map(|pod| pod.join().expect("a probe does not panic"));
        results.sum::<Result<u32>>()
    })?;
    let mut asked = 0;
    for to in pods.all.iter().filter(|pod| pod.network == 3) {
        for address in addresses(to.host) {
            let at = SocketAddr::new(address, PORT);
            let answer = tcp_get_to(&pods.node, at, &new_token(), PATIENCE);
            ensure!(
                answer.as_ref().is_ok_and(|answer| answer.identity == to.name),
                "the node asked {address} and got {answer:?}"
            );
            asked += 1;
        }
    }
    println!(
        "{probes} probes over {} networks and {asked} from the node reached whom they should",
        NETWORKS.len()
    );
    Ok(())
}

/// Probes the addresses of all pods from one pod.
fn probes_of(pods: &Pods, from: &Pod) -> Result<u32> {
    let mut probes = 0;
    for host in (2..=4).filter(|host| *host != from.host) {
        let in_network = |to: &&Pod| to.network == from.network && to.host == host;
        let there = pods.all.iter().find(in_network);
        for address in addresses(host) {
            probe(pods, from, there, address).with_context(|| format!("{} to {address}", from.name))?;
            probes += 3;
        }
    }
    Ok(probes)
}

/// Probes an address over TCP, UDP and ping: its owner in the network must answer, or nothing.
fn probe(pods: &Pods, from: &Pod, there: Option<&Pod>, address: IpAddr) -> Result<()> {
    let timeout = if there.is_some() { PATIENCE } else { SILENCE };
    let at = SocketAddr::new(address, PORT);
    let tokens = [new_token(), new_token(), new_token()];
    let answers = [
        tcp_get_to(&from.inside, at, &tokens[0], timeout).map(|answer| answer.identity),
        udp_ask_to(&from.inside, at, &tokens[1], timeout).map(|answer| answer.identity),
        ping(&from.inside, address, &tokens[2], timeout).map(|()| String::new()),
    ];
    for (protocol, (answer, token)) in ["TCP", "UDP", "ping"].iter().zip(answers.iter().zip(&tokens)) {
        match (there, answer) {
            (Some(to), Ok(identity)) => {
                ensure!(
                    identity.is_empty() || *identity == to.name,
                    "{protocol} reached {identity}, not {}",
                    to.name
                );
                let saw = to.servers.saw_within(token, PATIENCE);
                ensure!(saw, "{} never saw the {protocol} request", to.name);
            }
            (Some(to), Err(error)) => bail!("{protocol} did not reach {}: {error}", to.name),
            (None, Ok(identity)) => bail!("{protocol} reached {identity}, where nobody is"),
            (None, Err(NoAnswer::Timeout)) => {}
            (None, Err(error)) => bail!("{protocol} met {error} instead of silence"),
        }
        let others = pods.all.iter().filter(|pod| there.is_none_or(|to| to.id != pod.id));
        if let Some(witness) = others.into_iter().find(|pod| pod.servers.saw(token)) {
            bail!("{} saw the {protocol} request", witness.name);
        }
    }
    Ok(())
}

fn drops(dataplane: &Dataplane, pod: &Pod, reason: Verdict) -> Result<u64> {
    let all = dataplane.drops()?;
    let found = all.iter().find(|drop| {
        drop.endpoint == EndpointId(pod.id) && drop.direction == Direction::FromPod && drop.reason == reason
    });
    Ok(found.map_or(0, |drop| drop.count.packets))
}

/// Checks that frames which no socket would send are dropped for the expected reason.
pub(crate) fn spoofing(dataplane: &Dataplane, pods: &Pods) -> Result<()> {
    let pod = pods.named("blue-2")?;
    let socket = PacketSocket::open(&pod.inside, "eth0")?;
    let own = Link::new(mac(pod.id), host_mac(pod.id));
    let stranger = Link::new(mac(3), host_mac(pod.id));
    let around = Link::new(mac(pod.id), mac(2));
    let udp = |from: IpAddr, to: IpAddr| Ip::new(from, to).packet(&Payload::udp(4000, PORT, b"spoofed\n"));
    let routed = Ip::new(v4(2).into(), v4(3).into()).options(&[131, 7, 4, 10, 10, 0, 3, 0]);
    let cases = [
        (
            "IPv4 source",
            own.frame(&udp(v4(3).into(), v4(2).into())),
            Verdict::SourceAddress,
        ),
        (
            "IPv6 source",
            own.frame(&udp(v6(3).into(), v6(2).into())),
            Verdict::SourceAddress,
        ),
        (
            "source MAC",
            stranger.frame(&udp(v4(2).into(), v4(3).into())),
            Verdict::SourceMac,
        ),
        (
            "destination MAC",
            around.frame(&udp(v6(2).into(), v6(3).into())),
            Verdict::DestinationMac,
        ),
        (
            "VLAN tag",
            own.clone().vlan(5).frame(&udp(v4(2).into(), v4(3).into())),
            Verdict::VlanTagged,
        ),
        (
            "source route",
            own.frame(&routed.packet(&Payload::udp(1, 2, b""))),
            Verdict::SourceRoute,
        ),
        (
            "address of another network",
            own.frame(&udp(v4(2).into(), v4(4).into())),
            Verdict::NoDestination,
        ),
    ];
    for (name, frame, reason) in cases {
        let before = drops(dataplane, pod, reason)?;
        socket.send(&frame)?;
        eventually_sync(PATIENCE, || {
            let counted = drops(dataplane, pod, reason)? > before;
            ensure!(counted, "{name}: no drop for {}", reason.as_str());
            Ok(())
        })?;
    }
    println!("spoofed frames are dropped with their reasons");
    Ok(())
}

/// Checks that the counters of both ends of a redirected packet agree.
pub(crate) fn every_packet_is_counted(dataplane: &Dataplane, pods: &Pods) -> Result<()> {
    for (network, name) in NETWORKS {
        let (mut sent, mut received) = (0, 0);
        for pod in pods.all.iter().filter(|pod| pod.network == network) {
            for (direction, verdict, count) in dataplane.forwarded(EndpointId(pod.id))? {
                match (direction, verdict) {
                    (Direction::FromPod, Verdict::Redirected) => sent += count.packets,
                    (Direction::ToPod, Verdict::Redirected) => received += count.packets,
                    _ => {}
                }
            }
        }
        ensure!(sent > 0 && sent == received, "{name}: {sent} sent, {received} received");
        println!("{name}: {sent} packets redirected inside the network");
    }
    Ok(())
}

/// Checks that a withdrawn endpoint neither sends nor receives packets.
pub(crate) fn withdrawn(dataplane: &Dataplane, pods: &Pods) -> Result<()> {
    let (gone, peer) = (pods.named("blue-3")?, pods.named("blue-2")?);
    dataplane.withdraw(EndpointId(gone.id))?;
    for (from, to) in [(peer, gone), (gone, peer)] {
        for address in addresses(to.host) {
            let token = new_token();
            let answer = tcp_get_to(&from.inside, SocketAddr::new(address, PORT), &token, SILENCE);
            ensure!(
                answer == Err(NoAnswer::Timeout),
                "{} got {answer:?} of {address}",
                from.name
            );
            ensure!(!to.servers.saw(&token), "{} was reached", to.name);
        }
    }
    ensure!(
        drops(dataplane, peer, Verdict::NoDestination)? > 0,
        "no drop for the missing pod"
    );
    ensure!(
        drops(dataplane, gone, Verdict::EndpointNotReady)? > 0,
        "no drop of the missing pod"
    );
    println!("a withdrawn pod is silent");
    Ok(())
}
