//! Counts the instructions that `from_pod` executes for a packet, in an interpreter whose results are compared with the
//! kernel's: a bound on the cost of a packet that no other load on the machine changes.

mod nodes;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction, IFINDEX_BASE};
use kni_dataplane::EndpointConfig;
use kni_integration::{
    frames::{Ip, Link, Mac, Payload, TcpFlags},
    interpreter::{Arrival, Counts, Executed, Interpreter},
    programs::{Programs, object, publish_unrestricted, routes},
    require,
};
use kni_model::{EndpointId, MacAddr, NetworkId};

/// The most that a packet may cost: instructions, and loads from and stores to the stack. Lower them when the programs
/// get better; a higher number needs a reason.
const BOUNDS: [Bound; 10] = [
    bound("established, IPv4 TCP", 171, 20),
    bound("established, IPv4 UDP", 163, 20),
    bound("established, IPv6 TCP", 185, 24),
    bound("established, IPv6 UDP", 177, 24),
    bound("established, IPv4 TCP, in the next jiffy", 180, 20),
    bound("established, IPv6 TCP, in the next jiffy", 194, 24),
    bound("new flow, IPv4 TCP", 1041, 199),
    bound("new flow, IPv4 UDP", 1084, 214),
    bound("new flow, IPv6 TCP", 1133, 236),
    bound("new flow, IPv6 UDP", 1243, 268),
];

struct Bound {
    case: &'static str,
    instructions: u64,
    stack: u64,
}

const fn bound(case: &'static str, instructions: u64, stack: u64) -> Bound {
    Bound {
        case,
        instructions,
        stack,
    }
}

/// Sender and receiver.
const ENDPOINTS: [u32; 2] = [1, 2];
const V4: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 2), Ipv4Addr::new(10, 0, 0, 3)];
const V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2),
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 3),
];
const PORTS: [u16; 2] = [40_000, 80];
/// Some windows in which a datagram flow becomes a stream, and less than any lifetime: a flow of many packets takes
/// some time.
const PAUSE: u64 = 600;

fn mac(side: usize) -> Mac {
    [2, 0, 0, 0, 0, if side == 0 { 1 } else { 2 }]
}

fn host_mac(side: usize) -> Mac {
    [2, 0, 0, 0, 1, if side == 0 { 1 } else { 2 }]
}

fn publish(programs: &Programs) -> Result<()> {
    let network = NetworkId::try_from(7)?;
    let subnets = ["10.0.0.0/24".parse()?, "fd00::/64".parse()?];
    programs.dataplane().set_routes(network, &routes(&subnets, true))?;
    for (side, id) in ENDPOINTS.into_iter().enumerate() {
        let endpoint = EndpointConfig {
            endpoint: EndpointId(id),
            network,
            ipv4: Some(V4[side]),
            ipv6: Some(V6[side]),
            mac: MacAddr(mac(side)),
            host_mac: MacAddr(host_mac(side)),
            host_access: true,
            xdp: false,
            plugin: None,
            shaped: false,
        };
        publish_unrestricted(programs.dataplane(), &endpoint)?;
    }
    Ok(())
}

/// The kernel's programs beside the interpreter's, which started with the same maps.
struct Both<'a> {
    kernel: &'a Programs,
    interpreter: Interpreter,
}

impl Both<'_> {
    /// Sends a packet from a side to the other one through both, which must agree.
    fn send(&mut self, side: usize, v4: bool, payload: &Payload) -> Result<Counts> {
        let ends = if v4 { V4.map(IpAddr::V4) } else { V6.map(IpAddr::V6) };
        let packet = Ip::new(ends[side], ends[1 - side]).packet(payload);
        let frame = Link::new(mac(side), host_mac(side)).frame(&packet);
        let arrival = Arrival {
            ifindex: IFINDEX_BASE + ENDPOINTS[side],
            ..Arrival::default()
        };
        let Executed {
            action,
            frame: sent,
            counts,
        } = self.interpreter.run("from_pod", arrival, &frame)?;
        let kernel = self.kernel.run(Direction::FromPod, ENDPOINTS[side], &frame)?;
        ensure!(
            (kernel.action, &kernel.frame) == (action, &sent),
            "the interpreter returns {action} and {sent:02x?}, the kernel {kernel:02x?}"
        );
        ensure!(action == 7, "the packet was not redirected: {action}");
        Ok(counts)
    }

    /// The costs of a flow's packets: the first one, one of many, and one of many that is the first of its jiffy. The
    /// dearer direction counts.
    fn flow(&mut self, v4: bool, tcp: bool) -> Result<[Counts; 3]> {
        let payload = |side: usize, flags, length| {
            let (source_port, destination_port) = (PORTS[side], PORTS[1 - side]);
            let data = vec![b'x'; length];
            if tcp {
                Payload::Tcp {
                    source_port,
                    destination_port,
                    flags,
                    sequence: 1,
                    data,
                }
            } else {
                Payload::Udp {
                    source_port,
                    destination_port,
                    data,
                }
            }
        };
        let first = self.send(0, v4, &payload(0, TcpFlags::SYN, 0))?;
        self.send(1, v4, &payload(1, TcpFlags::SYN_ACK, 0))?;
        let data = [0, 1].map(|side| payload(side, TcpFlags::ACK, 100));
        for _ in 0..4 {
            self.interpreter.jiffies += PAUSE;
            for (side, data) in data.iter().enumerate() {
                self.send(side, v4, data)?;
            }
        }
        let mut same = Vec::new();
        let mut next = Vec::new();
        for (side, data) in data.iter().enumerate() {
            // Only one packet in a second also refreshes the flow's other side.
            self.interpreter.jiffies = self.interpreter.jiffies.next_multiple_of(256) + 1;
            self.send(side, v4, data)?;
            same.push(self.send(side, v4, data)?);
            self.interpreter.jiffies += 1;
            next.push(self.send(side, v4, data)?);
        }
        let dearer = |counts: Vec<Counts>| counts.into_iter().max_by_key(|counts| counts.instructions);
        let dearer = |counts| dearer(counts).context("two directions");
        Ok([first, dearer(same)?, dearer(next)?])
    }
}

#[test]
fn a_packet_costs_no_more_instructions_than_its_bound() -> Result<()> {
    require!(root, netns, bpf, ip);
    let measured = Programs::inside("instructions", 1024, |kernel| {
        publish(&kernel)?;
        let mut interpreter = Interpreter::new(object()?)?;
        interpreter.copy_pinned(&kernel.dataplane().pin_path())?;
        let kernel = &kernel;
        let mut both = Both { kernel, interpreter };
        let mut measured = Vec::new();
        for (v4, family) in [(true, "IPv4"), (false, "IPv6")] {
            for (tcp, protocol) in [(true, "TCP"), (false, "UDP")] {
                let [first, same, next] = both.flow(v4, tcp)?;
                measured.push((format!("new flow, {family} {protocol}"), first));
                measured.push((format!("established, {family} {protocol}"), same));
                measured.push((format!("established, {family} {protocol}, in the next jiffy"), next));
            }
        }
        Ok(measured)
    })?;
    check(&measured, &BOUNDS)
}

/// Compares what was measured with its bounds.
fn check(measured: &[(String, Counts)], bounds: &[Bound]) -> Result<()> {
    let mut exceeded = Vec::new();
    for (case, counts) in measured {
        println!("{case}: {counts}");
        let Some(bound) = bounds.iter().find(|bound| bound.case == case) else {
            continue;
        };
        let (instructions, stack) = (counts.instructions, counts.stack());
        if instructions > bound.instructions || stack > bound.stack {
            exceeded.push(format!(
                "{case}: {instructions} instructions and {stack} stack accesses, the bound is {} and {}",
                bound.instructions, bound.stack
            ));
        }
    }
    let known = |case: &str| measured.iter().any(|(measured, _)| measured == case);
    let unknown: Vec<&str> = bounds
        .iter()
        .map(|bound| bound.case)
        .filter(|case| !known(case))
        .collect();
    ensure!(unknown.is_empty(), "bounds for what was not measured: {unknown:?}");
    ensure!(
        exceeded.is_empty(),
        "the programs execute more than their bounds:\n{}",
        exceeded.join("\n")
    );
    Ok(())
}
