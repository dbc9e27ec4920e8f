//! Compares the programs with the oracle: sends real frames through them on maps filled by the engine's steps, and runs
//! their explanations.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction, Verdict, event::Explanation};
use kni_dataplane::{EndpointConfig, NetworkRoutes, RouteEgress};
use kni_integration::{
    frames::{Ip, Link, Mac, Payload, TcpFlags},
    model::Seen,
    oracle::{Pod, Protocol, World},
    programs::{Programs, action_of},
};
use kni_model::{EndpointId, MacAddr, NetworkId, PolicyTables};

use super::{
    case::Case,
    engine::Beside,
    generate::{NETWORKS, Question},
    objects::{Numbers, iana, number_of},
};

/// `lo` as the receiving interface: the packet does not come from the node itself.
const ELSEWHERE: u32 = 1;
/// Source ports: none of the generator's destination ports, so that no request resembles a reply to another one.
const SOURCE_PORTS: std::ops::Range<u16> = 10_000..60_000;

/// Programs, engine and endpoints.
pub(crate) struct Rig {
    programs: Programs,
    pub(crate) beside: Beside,
    published: Vec<EndpointId>,
    source_port: u16,
}

/// The deciding program, and its decision.
pub(crate) struct Decided {
    pub(crate) verdict: Verdict,
    pub(crate) explanation: Explanation,
}

impl Rig {
    pub(crate) fn new(programs: Programs) -> Result<Self> {
        for network in NETWORKS {
            // No subnet belongs to the network: pods of other nodes are reached like external addresses.
            let routes = NetworkRoutes {
                subnets: Vec::new(),
                service_subnets: Vec::new(),
                egress: RouteEgress::Stack,
            };
            let id = NetworkId::try_from(number_of(network))?;
            programs.dataplane().set_routes(id, &routes)?;
        }
        Ok(Self {
            programs,
            beside: Beside::default(),
            published: Vec::new(),
            source_port: SOURCE_PORTS.start,
        })
    }

    /// Applies the world to the maps, by the steps from the previous world. The first world of a lineage starts with
    /// empty tables and new endpoints.
    pub(crate) fn become_(&mut self, case: &Case<'_>) -> Result<()> {
        if case.is_first {
            self.clear()?;
        }
        let steps = self.beside.become_(case.world, &case.numbers)?;
        self.programs.dataplane().apply_policy(&steps)?;
        if case.is_first {
            for (endpoint, config) in configs(case.world, &case.numbers)? {
                self.programs.dataplane().publish(&config)?;
                self.published.push(endpoint);
            }
            let found = self.programs.dataplane().policy_tables()?;
            ensure!(
                found == *self.beside.tables(),
                "the maps do not hold what the engine believes:\n{found:#?}"
            );
        }
        Ok(())
    }

    /// Removes everything; no rows of policies may remain.
    pub(crate) fn clear(&mut self) -> Result<()> {
        for endpoint in self.published.drain(..) {
            self.programs.dataplane().withdraw(endpoint)?;
        }
        let steps = self.beside.become_(&World::default(), &Numbers::default())?;
        self.programs.dataplane().apply_policy(&steps)?;
        let left = self.programs.dataplane().policy_tables()?;
        ensure!(
            left == PolicyTables::default(),
            "rows are left of a world that is gone:\n{left:#?}"
        );
        Ok(())
    }

    /// The decision of the programs; `None` without a local endpoint. Runs the explanation first, then the frame, and
    /// compares them.
    pub(crate) fn decide(&mut self, question: &Question, numbers: &Numbers) -> Result<Option<Decided>> {
        let [from, to] = [question.from, question.to].map(|ip| numbers.endpoint(question.network, ip));
        let (direction, endpoint, ingress) = match (from, to) {
            (Some(from), _) => (Direction::FromPod, from, 0),
            (None, Some(to)) => (Direction::ToPod, to, ELSEWHERE),
            (None, None) => return Ok(None),
        };
        self.send(question, direction, endpoint, ingress).map(Some)
    }

    /// The same packet as if sent by the node itself.
    pub(crate) fn sent_by_node(&mut self, question: &Question, numbers: &Numbers) -> Result<Option<Decided>> {
        match numbers.endpoint(question.network, question.to) {
            Some(to) => self.send(question, Direction::ToPod, to, 0).map(Some),
            None => Ok(None),
        }
    }

    fn send(
        &mut self,
        question: &Question,
        direction: Direction,
        endpoint: EndpointId,
        ingress: u32,
    ) -> Result<Decided> {
        let frame = self.frame(question, direction, endpoint);
        let seen = Seen {
            direction,
            endpoint: endpoint.0,
            ingress,
        };
        let explanation = self.programs.explain(seen, &frame)?;
        let verdict = Verdict::from_code(explanation.event.verdict).context("no verdict")?;
        let ran = self.programs.run_as(seen, &frame, 0)?;
        ensure!(
            ran.action == action_of(verdict),
            "{question:?}: explained as {}, but the program answers {}",
            verdict.as_str(),
            ran.action.cast_signed()
        );
        Ok(Decided { verdict, explanation })
    }

    fn frame(&mut self, question: &Question, direction: Direction, endpoint: EndpointId) -> Vec<u8> {
        self.source_port += 1;
        if self.source_port == SOURCE_PORTS.end {
            self.source_port = SOURCE_PORTS.start;
        }
        let source = self.source_port;
        let (pod, host) = (pod_mac(endpoint), host_mac(endpoint));
        let link = if direction == Direction::FromPod {
            Link::new(pod, host)
        } else {
            Link::new(host, pod)
        };
        let payload = match question.protocol {
            Protocol::Tcp => Payload::tcp(source, question.port, TcpFlags::SYN),
            Protocol::Udp => Payload::udp(source, question.port, b"?"),
            Protocol::Sctp => Payload::sctp_init(source, question.port),
            Protocol::Icmp => Payload::echo_request(question.from.is_ipv4(), source, 1, b"?"),
        };
        link.frame(&Ip::new(question.from, question.to).packet(&payload))
    }
}

/// The expected result of a question.
pub(crate) fn expected(
    question: &Question,
    numbers: &Numbers,
    (may_send, may_receive): (bool, bool),
) -> Option<Verdict> {
    let [from, to] = [question.from, question.to].map(|ip| numbers.endpoint(question.network, ip).is_some());
    match (from, to) {
        (false, false) => None,
        (true, _) if !may_send => Some(Verdict::PolicyEgress),
        (true, false) => Some(Verdict::PassedToStack),
        (_, true) if !may_receive => Some(Verdict::PolicyIngress),
        (true, true) => Some(Verdict::Redirected),
        (false, true) => Some(Verdict::Delivered),
    }
}

/// Whether the event identifies the packet and its ends.
pub(crate) fn describes(event: &Explanation, question: &Question, numbers: &Numbers) -> bool {
    let event = &event.event;
    let ip = |bytes| kni_common::address::to_ip(bytes);
    let own = [question.from, question.to].map(|ip| numbers.endpoint(question.network, ip).map_or(0, |id| id.0));
    event.network == number_of(question.network)
        && ip(event.source) == question.from
        && ip(event.destination) == question.to
        && event.protocol == u32::from(iana(question.protocol, question.from.is_ipv4()))
        && own.contains(&event.endpoint)
}

fn configs(world: &World, numbers: &Numbers) -> Result<Vec<(EndpointId, EndpointConfig)>> {
    let mut configs = Vec::new();
    for pod in &world.pods {
        configs.extend(of_pod(pod, numbers)?);
    }
    Ok(configs)
}

fn of_pod(pod: &Pod, numbers: &Numbers) -> Result<Vec<(EndpointId, EndpointConfig)>> {
    let mut configs = Vec::new();
    for interface in &pod.interfaces {
        let first = interface.addresses.first().context("an address")?;
        let Some(endpoint) = numbers.endpoint(&interface.network, *first) else {
            continue;
        };
        let mut config = EndpointConfig {
            endpoint,
            network: NetworkId::try_from(number_of(&interface.network))?,
            ipv4: None,
            ipv6: None,
            mac: MacAddr(pod_mac(endpoint)),
            host_mac: MacAddr(host_mac(endpoint)),
            host_access: true,
            xdp: false,
            plugin: None,
            shaped: false,
        };
        for address in &interface.addresses {
            match address {
                IpAddr::V4(v4) => config.ipv4 = Some(*v4),
                IpAddr::V6(v6) => config.ipv6 = Some(*v6),
            }
        }
        configs.push((endpoint, config));
    }
    Ok(configs)
}

fn pod_mac(endpoint: EndpointId) -> Mac {
    [2, 0, 0, 0, 1, u8::try_from(endpoint.0).expect("few endpoints")]
}

fn host_mac(endpoint: EndpointId) -> Mac {
    [2, 0, 0, 0, 2, u8::try_from(endpoint.0).expect("few endpoints")]
}
