//! Sends random frames of pods out of the node and random answers back: no two flows leave with one port towards one
//! server, a flow keeps its port, an answer reaches the pod that asked, and nothing else reaches a pod. Explanations
//! say before what the program then does.
//!
//! There is no exact model: the ports are chosen at random. `KNI_CASES` sets the number of frames (default 6 000, 20
//! 000 with `KNI_LONG=1`), `KNI_SEED` repeats the choices of a run except for the ports.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_common::{Direction, IFINDEX_BASE, Verdict};
use kni_dataplane::{EgressRow, EgressSource, NetworkRoutes, RouteEgress};
use kni_integration::{
    frames::{Ip, Link, Payload, TcpFlags},
    long,
    model::{Allowed, Asked, Endpoint, Enforced, Seen},
    programs::{Lockstep, Ran, action_of, counted, hex},
    require,
};
use kni_model::{EndpointId, NetworkId};

use super::{
    addresses::{host_mac, mac},
    beside,
    explained::number,
};

/// Pods: two in each of two networks, with the same addresses there.
const PODS: u32 = 4;
const UPLINK: u32 = IFINDEX_BASE + 8;
const NODE4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NODE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0xaa);
/// Few enough for all to be in use towards one port of a server.
const FIRST: u16 = 50_000;
const LAST: u16 = 50_007;
const OWN_PORTS: [u16; 4] = [4000, 4001, 50_000, 50_001];
const SERVER_PORTS: [u16; 2] = [53, 443];
/// Frames towards the same servers.
const ERA: u64 = 500;
/// More than the uplink's MTU.
const LARGE: usize = 1600;
/// A policy set that allows one of the servers' ports only, in some pods.
const SET: u32 = 1;
const PORT_SET: u32 = 10;

/// A flow as a pod knows it: pod, protocol, own port, server and its port.
type Own = (u32, u8, u16, IpAddr, u16);
/// A flow as its server knows it: protocol, server and its port, port of the node.
type Outside = (u8, IpAddr, u16, u16);

/// A flow that left.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own about the flow")]
struct Leaves {
    own: Own,
    port: u16,
    /// Ends that have sent their FIN: the pod, the server.
    finished: [bool; 2],
    /// Whether both ends have, or may have, closed it, or its pod has reset it: another flow may take its port.
    closed: bool,
    /// Whether its pod was published again since: nothing reaches it.
    void: bool,
    /// Whether the pod has opened it again with another port: late answers may still reach it.
    superseded: bool,
    replied: bool,
}

struct Node<'a> {
    step: &'a mut Lockstep,
    by_port: HashMap<Outside, Leaves>,
    /// Flows that may have a port although their packet was dropped: too large, or at its last hop.
    hidden: HashSet<Own>,
    /// The number of the servers of now: ports towards former ones stay in use.
    era: u32,
    kinds: BTreeMap<String, u64>,
}

/// A packet has left with the port of a closed flow.
const CLOSED: &str = "a closed flow's port";

#[test]
fn masqueraded_flows_have_a_port_of_their_own() -> Result<()> {
    require!(root, netns, bpf, ip);
    let cases = number("KNI_CASES")?.unwrap_or(if long() { 20_000 } else { 6_000 });
    let seed = number("KNI_SEED")?.unwrap_or_else(|| kni_integration::default_seed(1));
    println!("{cases} frames, KNI_SEED={seed}");
    let kinds = Lockstep::inside("masqueraded", 131_072, |step| {
        let mut rng = Rng::with_seed(seed);
        let mut node = Node {
            step,
            by_port: HashMap::new(),
            hidden: HashSet::new(),
            era: 0,
            kinds: BTreeMap::new(),
        };
        node.begin()?;
        for case in 0..cases {
            node.era = u32::try_from(case / ERA)?;
            match rng.u32(0..400) {
                0 => node.publish_again(&mut rng)?,
                1..=220 => node.sends(&mut rng)?,
                _ => node.answers(&mut rng)?,
            }
        }
        Ok(node.kinds)
    })
    .with_context(|| format!("KNI_SEED={seed} KNI_CASES={cases}"))?;
    for (kind, count) in &kinds {
        println!("{kind:<40} {count:>7}");
    }
    for kind in [
        "left: a new port",
        "left: the same port",
        "left: a closed flow's port",
        "masquerade_ports",
        "too_big",
        "time_exceeded",
        "policy_egress",
        "answered: to its pod",
        "answered: to no pod",
    ] {
        ensure!(kinds.contains_key(kind), "never: {kind}");
    }
    Ok(())
}

fn own_address(id: u32, v4: bool) -> IpAddr {
    let host = 2 + u16::try_from(id % 2).expect("a small number");
    if v4 {
        Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 0, 0, 0)) + u32::from(host)).into()
    } else {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host).into()
    }
}

fn pod(id: u32) -> Endpoint {
    let address = |v4| own_address(id, v4);
    let (IpAddr::V4(ipv4), IpAddr::V6(ipv6)) = (address(true), address(false)) else {
        unreachable!("one address of each family")
    };
    Endpoint {
        network: id.div_ceil(2),
        ipv4: Some(ipv4),
        ipv6: Some(ipv6),
        mac: mac(id),
        host_mac: host_mac(id),
        host_access: false,
    }
}

fn server(rng: &mut Rng, era: u32, v4: bool) -> IpAddr {
    let number = 2 * era + rng.u32(0..2);
    if v4 {
        Ipv4Addr::from(u32::from(Ipv4Addr::new(203, 0, 113, 0)) + number).into()
    } else {
        let first = u128::from(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0));
        Ipv6Addr::from(first + u128::from(number)).into()
    }
}

fn flags(rng: &mut Rng) -> TcpFlags {
    let some = [
        TcpFlags::SYN,
        TcpFlags::SYN,
        TcpFlags::ACK,
        TcpFlags::ACK,
        TcpFlags::SYN_ACK,
        TcpFlags::FIN_ACK,
        TcpFlags::FIN_ACK,
        TcpFlags::RST,
    ];
    some[rng.usize(0..some.len())]
}

fn pick(rng: &mut Rng, from: &[u16]) -> u16 {
    from[rng.usize(0..from.len())]
}

/// Ports of a TCP or UDP packet without options and extension headers.
fn ports_in(frame: &[u8], v4: bool) -> Result<(u16, u16)> {
    let at = if v4 { 34 } else { 54 };
    let bytes = frame.get(at..at + 4).context("ports")?;
    Ok((
        u16::from_be_bytes([bytes[0], bytes[1]]),
        u16::from_be_bytes([bytes[2], bytes[3]]),
    ))
}

/// Source and destination of a packet.
fn addresses_in(frame: &[u8], v4: bool) -> Result<(IpAddr, IpAddr)> {
    let bytes = |at: usize, length: usize| frame.get(at..at + length).context("addresses");
    Ok(if v4 {
        let ip = |at| anyhow::Ok(Ipv4Addr::from(<[u8; 4]>::try_from(bytes(at, 4)?)?).into());
        (ip(26)?, ip(30)?)
    } else {
        let ip = |at| anyhow::Ok(Ipv6Addr::from(<[u8; 16]>::try_from(bytes(at, 16)?)?).into());
        (ip(22)?, ip(38)?)
    })
}

impl Node<'_> {
    fn begin(&mut self) -> Result<()> {
        self.step.configure(beside::LIFETIMES, 0, 0)?;
        self.step.set_second(beside::SECOND)?;
        let dataplane = self.step.programs().dataplane();
        dataplane.set_uplink(Some(UPLINK))?;
        for network in 1..=PODS / 2 {
            dataplane.set_routes(
                NetworkId::try_from(network)?,
                &NetworkRoutes {
                    subnets: vec!["10.0.0.0/24".parse()?, "fd00::/64".parse()?],
                    service_subnets: Vec::new(),
                    egress: RouteEgress::Masquerade { host_access: false },
                },
            )?;
        }
        let https = kni_integration::model::PortRow {
            protocol: None,
            port: (0, 0),
            ordinal: 0,
            allow: false,
        };
        let allowed = [6, 17].map(|protocol| kni_integration::model::PortRow {
            protocol: Some(protocol),
            port: (443, 16),
            ordinal: 1,
            allow: true,
        });
        self.step.set_ports(PORT_SET, &[&[https][..], &allowed].concat())?;
        self.step.allow(SET, 0, Asked::Egress, Allowed::Ports(PORT_SET), 7)?;
        self.step.allow(SET, 0, Asked::External, Allowed::Everything, 0)?;
        for id in 1..=PODS {
            self.publish(id)?;
        }
        let restricted = Enforced {
            policy: SET,
            ..Enforced::default()
        };
        self.step.enforce(PODS, restricted)
    }

    fn publish(&mut self, id: u32) -> Result<()> {
        let source = EgressSource {
            ipv4: Some(NODE4),
            ipv6: Some(NODE6),
            first: FIRST,
            last: LAST,
            shared_v4: false,
            shared_v6: false,
        };
        let dataplane = self.step.programs().dataplane();
        dataplane.set_masquerade(EndpointId(id), &EgressRow::From(source))?;
        self.step.publish(id, &pod(id))
    }

    /// The row of a pod gets another owner with the same addresses.
    fn publish_again(&mut self, rng: &mut Rng) -> Result<()> {
        let id = rng.u32(1..=PODS);
        self.publish(id)?;
        for leaves in self.by_port.values_mut().filter(|leaves| leaves.own.0 == id) {
            leaves.void = true;
        }
        self.hidden.retain(|own| own.0 != id);
        Ok(())
    }

    fn count(&mut self, kind: String) {
        *self.kinds.entry(kind).or_default() += 1;
    }

    fn sends(&mut self, rng: &mut Rng) -> Result<()> {
        let id = rng.u32(1..=PODS);
        let v4 = rng.bool();
        let tcp = rng.bool();
        let own_port = pick(rng, &OWN_PORTS);
        let own = (
            id,
            if tcp { 6 } else { 17 },
            own_port,
            server(rng, self.era, v4),
            pick(rng, &SERVER_PORTS),
        );
        let data = vec![7; if rng.u32(0..20) == 0 { LARGE } else { rng.usize(0..30) }];
        let flags = flags(rng);
        let payload = if tcp {
            Payload::Tcp {
                source_port: own_port,
                destination_port: own.4,
                flags,
                sequence: 1,
                data,
            }
        } else {
            Payload::udp(own_port, own.4, &data)
        };
        let hop_limit = if rng.u32(0..20) == 0 { 1 } else { 64 };
        let packet = Ip::new(own_address(id, v4), own.3).hop_limit(hop_limit);
        let frame = Link::new(mac(id), host_mac(id)).frame(&packet.packet(&payload));
        let seen = Seen::from_pod(id);
        let explained = self.step.programs().explain(seen, &frame)?.event.verdict;
        let before = counted(self.step.programs())?;
        let ran = self.step.programs().run_as(seen, &frame, 0)?;
        let told = || format!("{own:?} {flags:?}: {} -> {}", hex(&frame), hex(&ran.frame));
        let mut after = counted(self.step.programs())?;
        after.retain(|key, count| before.get(key) != Some(count));
        let mut verdicts = after.keys().map(|(.., verdict)| *verdict);
        let verdict = verdicts.next().context("not counted")?;
        ensure!(verdicts.next().is_none(), "counted {after:?}: {}", told());
        // Whether its port may have been that of a closed flow.
        let (kind, was_taken) = if verdict == Verdict::Masqueraded {
            self.left(own, tcp.then_some(flags), v4, &ran).with_context(told)?
        } else {
            ensure!(verdict.is_drop(), "{}: {}", verdict.as_str(), told());
            let has_port = [Verdict::TooBig, Verdict::TimeExceeded].contains(&verdict);
            if has_port {
                self.hidden.insert(own);
            }
            ("", has_port)
        };
        let explained = Verdict::from_code(explained).context("a verdict")?;
        // The last packets of a closed flow get a moment, which may have passed since: now its port is free.
        let later = explained == Verdict::MasqueradePorts && was_taken;
        ensure!(
            explained == verdict || later,
            "explained as {}, but it was {}: {}",
            explained.as_str(),
            verdict.as_str(),
            told()
        );
        let separator = if kind.is_empty() { "" } else { ": " };
        self.count(format!("{}{separator}{kind}", verdict.as_str()));
        Ok(())
    }

    /// Checks a packet that left. Returns also whether a closed flow had its port, or may have had it.
    fn left(&mut self, own: Own, flags: Option<TcpFlags>, v4: bool, ran: &Ran) -> Result<(&'static str, bool)> {
        let (id, protocol, _, server, server_port) = own;
        let (source, destination) = addresses_in(&ran.frame, v4)?;
        let (port, to) = ports_in(&ran.frame, v4)?;
        let node: IpAddr = if v4 { NODE4.into() } else { NODE6.into() };
        ensure!(
            (source, destination, to) == (node, server, server_port),
            "from {source} to {destination}:{to}"
        );
        ensure!((FIRST..=LAST).contains(&port), "port {port}");
        let outside = (protocol, server, server_port, port);
        let before = self.by_port.get(&outside).copied();
        let is_former = |leaves: &&Leaves| leaves.own == own && !leaves.closed && !leaves.void && !leaves.superseded;
        let former = self.by_port.values().find(is_former);
        let former = former.map(|leaves| (leaves.port, leaves.replied));
        let opens = flags == Some(TcpFlags::SYN);
        let kind = match before {
            Some(leaves) if leaves.own == own => "the same port",
            Some(leaves) => {
                ensure!(leaves.closed, "the port of {leaves:?}");
                CLOSED
            }
            None => "a new port",
        };
        if let Some((kept, replied)) = former {
            let is_reopened = opens && replied || self.hidden.contains(&own);
            ensure!(kept == port || is_reopened, "{id} had the port {kept} and has {port}");
        }
        let is_towards = |other: &Own| (other.1, other.3, other.4) == (protocol, server, server_port);
        let was_taken = before.map_or_else(|| self.hidden.iter().any(is_towards), |leaves| leaves.closed);
        let same = before.filter(|leaves| leaves.own == own && !leaves.void && !(opens && leaves.closed));
        if same.is_none() {
            for leaves in self.by_port.values_mut().filter(|leaves| leaves.own == own) {
                leaves.superseded = true;
            }
        }
        let mut leaves = same.unwrap_or(Leaves {
            own,
            port,
            finished: [false; 2],
            // It may have existed before, and this packet may have closed it.
            closed: self.hidden.contains(&own),
            void: false,
            superseded: false,
            replied: false,
        });
        leaves.superseded = false;
        leaves.turn(0, flags.filter(|_| same.is_some()));
        self.by_port.insert(outside, leaves);
        Ok((kind, was_taken))
    }

    /// An answer, or something that looks like one.
    fn answers(&mut self, rng: &mut Rng) -> Result<()> {
        let v4 = rng.bool();
        let tcp = rng.bool();
        let protocol = if tcp { 6 } else { 17 };
        let outside = (
            protocol,
            server(rng, self.era, v4),
            pick(rng, &SERVER_PORTS),
            rng.u16(FIRST - 1..LAST + 2),
        );
        let (_, server, server_port, port) = outside;
        let flags = flags(rng);
        let payload = if tcp {
            Payload::tcp(server_port, port, flags)
        } else {
            Payload::udp(server_port, port, b"answer")
        };
        let node: IpAddr = if v4 { NODE4.into() } else { NODE6.into() };
        let link = Link::new([2, 9, 9, 9, 9, 1], [2, 9, 9, 9, 9, 2]);
        let frame = link.frame(&Ip::new(server, node).packet(&payload));
        let ran = self
            .step
            .programs()
            .run_as(Seen::by(Direction::FromUplink, 7), &frame, 0)?;
        let owner = self.by_port.get(&outside).copied();
        let told = || {
            format!(
                "{outside:?} {flags:?} of {owner:?}: {} -> {}",
                hex(&frame),
                hex(&ran.frame)
            )
        };
        let reached = ran.action == action_of(Verdict::Redirected);
        // A packet that opens a connection is no answer.
        let opens = tcp && flags == TcpFlags::SYN;
        let awaited = owner.filter(|leaves| !leaves.void && !opens);
        if !reached {
            ensure!(
                awaited.is_none_or(|leaves| leaves.closed || leaves.superseded),
                "an answer does not reach its pod: {}",
                told()
            );
            self.count("answered: to no pod".to_owned());
            return Ok(());
        }
        // No flow is known to have the port, or only a closed one, whose port may have got a new owner.
        let (_, to) = ports_in(&ran.frame, v4)?;
        let is_other = |leaves: Leaves| leaves.closed && (ran.frame[..6] != mac(leaves.own.0) || to != leaves.own.2);
        if owner.is_none_or(|leaves| leaves.void || is_other(leaves)) && !opens {
            return self.reached(outside, v4, &ran).with_context(told);
        }
        let leaves = awaited.with_context(|| format!("reaches a pod: {}", told()))?;
        let (id, _, own_port, ..) = leaves.own;
        ensure!(ran.frame[..6] == mac(id), "another pod: {}", told());
        let ends = addresses_in(&ran.frame, v4)?;
        ensure!(ends == (server, own_address(id, v4)), "{ends:?}: {}", told());
        let ports = ports_in(&ran.frame, v4)?;
        ensure!(ports == (server_port, own_port), "{ports:?}: {}", told());
        let leaves = self.by_port.get_mut(&outside).expect("found above");
        leaves.turn(1, tcp.then_some(flags));
        leaves.replied = true;
        self.count("answered: to its pod".to_owned());
        Ok(())
    }
}

impl Node<'_> {
    /// Checks an answer to a port that was never seen: a pod's packet that got it was dropped.
    fn reached(&mut self, (protocol, server, server_port, _): Outside, v4: bool, ran: &Ran) -> Result<()> {
        let (_, destination) = addresses_in(&ran.frame, v4)?;
        let (_, own_port) = ports_in(&ran.frame, v4)?;
        let pod = (1..=PODS).find(|id| ran.frame[..6] == mac(*id)).context("no pod")?;
        ensure!(destination == own_address(pod, v4), "another address");
        let own = (pod, protocol, own_port, server, server_port);
        ensure!(self.hidden.contains(&own), "it reaches pod {pod}");
        self.count("answered: to the pod of a dropped packet".to_owned());
        Ok(())
    }
}

impl Leaves {
    /// Follows the state: the pod is the first end, the server the second one. A reset from outside may be forged.
    fn turn(&mut self, from: usize, flags: Option<TcpFlags>) {
        match flags {
            Some(TcpFlags::FIN_ACK) => self.finished[from] = true,
            Some(TcpFlags::RST) if from == 0 => self.closed = true,
            _ => {}
        }
        self.closed |= self.finished == [true; 2];
    }
}
