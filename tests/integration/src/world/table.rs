//! Defines the truth table: all questions about the world and their outcomes.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use crate::oracle::{self, Protocol};

/// The two networks that every pod of the world has joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Net {
    /// The pods' primary interfaces; policies are `NetworkPolicy` objects.
    Default,
    /// Their secondary interfaces; policies are `MultiNetworkPolicy` objects.
    Named,
}

impl Net {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Default, Self::Named];

    /// The name of the network.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Named => "net1",
        }
    }
}

/// The kind of destination address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Via {
    /// The pod's own address.
    Address,
    /// The virtual address of a service with this pod as its only backend.
    ClusterIp,
}

impl Via {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Address, Self::ClusterIp];
}

/// "May `from` reach `to`?"
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    /// The network.
    pub net: Net,
    /// The kind of address.
    pub via: Via,
    /// IPv4 or IPv6.
    pub v4: bool,
    /// Transport.
    pub protocol: Protocol,
    /// Port of the destination, the same before and after the translation.
    pub port: u16,
    /// Index of the client pod.
    pub from: usize,
    /// Index of the server pod.
    pub to: usize,
}

/// The namespaces.
pub const NAMESPACES: [&str; 3] = ["x", "y", "z"];
/// The pods of each namespace.
pub const PODS: [&str; 3] = ["a", "b", "c"];
/// The ports of each pod's servers.
pub const PORTS: [u16; 2] = [80, 81];
/// Number of pods.
pub const MEMBERS: usize = NAMESPACES.len() * PODS.len();

/// Namespace and name of the pod with an index.
pub fn names_of(index: usize) -> (&'static str, &'static str) {
    (NAMESPACES[index / PODS.len()], PODS[index % PODS.len()])
}

/// `namespace/name` of the pod with an index.
pub fn full_name(index: usize) -> String {
    let (namespace, name) = names_of(index);
    format!("{namespace}/{name}")
}

/// The index of `namespace/name`.
///
/// # Panics
/// If there is none.
pub fn index_of(full: &str) -> usize {
    let found = (0..MEMBERS).find(|index| full_name(*index) == full);
    found.unwrap_or_else(|| panic!("no pod {full}"))
}

impl Question {
    /// Every pair over every protocol, port and family. Packets to a pod's own address never leave the pod, so pairs of
    /// a pod with itself are excluded for this kind of address.
    pub fn all(net: Net, via: Via) -> Vec<Self> {
        let mut all = Vec::new();
        for from in 0..MEMBERS {
            for to in (0..MEMBERS).filter(|to| via == Via::ClusterIp || *to != from) {
                for (protocol, port) in Protocol::TRANSPORTS
                    .into_iter()
                    .flat_map(|p| PORTS.map(|port| (p, port)))
                {
                    all.extend([true, false].map(|v4| Self {
                        net,
                        via,
                        v4,
                        protocol,
                        port,
                        from,
                        to,
                    }));
                }
            }
        }
        all
    }

    /// One question per pair: enough to detect whether a network is open.
    pub fn pairs(net: Net) -> Vec<Self> {
        let mut all = Self::all(net, Via::Address);
        all.retain(|question| question.v4 && question.protocol == Protocol::Tcp && question.port == PORTS[0]);
        all
    }

    /// Whether `from` is this pod, or with `x/` a pod of this namespace; `*` matches every pod.
    pub fn is_from(&self, who: &str) -> bool {
        is(self.from, who)
    }

    /// [`Self::is_from`] for `to`.
    pub fn is_to(&self, who: &str) -> bool {
        is(self.to, who)
    }

    /// The policies' decision.
    pub fn ask(&self, world: &oracle::World) -> bool {
        let end = |index: usize| {
            let (namespace, name) = names_of(index);
            let mut pods = world.pods.iter();
            let pod = pods.find(|pod| pod.namespace == namespace && pod.name == name);
            let pod = pod.unwrap_or_else(|| panic!("the world has no {namespace}/{name}"));
            let interface = pod.on(self.net.name()).expect("every pod is on both networks");
            let address = interface.addresses.iter().find(|ip| ip.is_ipv4() == self.v4);
            oracle::Peer::Pod(pod, interface, *address.expect("every interface has both families"))
        };
        world.allowed(end(self.from), end(self.to), self.protocol, self.port)
    }
}

fn is(index: usize, who: &str) -> bool {
    let full = full_name(index);
    who == "*" || full == who || (who.ends_with('/') && full.starts_with(who))
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} -> {} {}/{} IPv{} {} {}",
            full_name(self.from),
            full_name(self.to),
            self.protocol.name(),
            self.port,
            if self.v4 { 4 } else { 6 },
            self.net.name(),
            match self.via {
                Via::Address => "by address",
                Via::ClusterIp => "by ClusterIP",
            }
        )
    }
}

/// The outcome of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The expected pod gave the expected answer.
    Answered,
    /// No packet arrived, as after a drop.
    Silent,
    /// Any other outcome, neither allowed nor denied.
    Odd(String),
}

/// Outcomes by question.
pub type Table = BTreeMap<Question, Outcome>;

/// Questions with an unexpected outcome and its description; allowed ones must be answered, denied ones must be silent.
pub fn differences(expected: &BTreeMap<Question, bool>, found: &Table) -> Vec<(Question, String)> {
    let mut differences = Vec::new();
    for (question, allowed) in expected {
        let wanted = if *allowed { Outcome::Answered } else { Outcome::Silent };
        match found.get(question) {
            Some(outcome) if *outcome == wanted => {}
            other => differences.push((
                *question,
                format!(
                    "{question}: {other:?}, but policy {}",
                    if *allowed { "allows it" } else { "denies it" }
                ),
            )),
        }
    }
    differences
}

/// The address of a family.
pub(super) fn of_family(addresses: &[IpAddr], v4: bool) -> Option<IpAddr> {
    addresses.iter().copied().find(|ip| ip.is_ipv4() == v4)
}
