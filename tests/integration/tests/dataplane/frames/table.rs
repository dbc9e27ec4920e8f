//! Provides the node of the tests, and their table of cases.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Result, ensure};
use kni_common::Verdict;
use kni_integration::{
    frames::{Ip, Link, Mac, Payload, TcpFlags},
    model::{Backend, Endpoint, Seen, Service},
    programs::{Lockstep, hex},
};

/// Two networks without access to the node, and the default network; all with the same subnets.
pub(crate) const BLUE: u32 = 1;
pub(crate) const RED: u32 = 2;
pub(crate) const DEFAULT: u32 = 3;
/// Endpoints: two in each network, with the same addresses.
pub(crate) const BLUE_A: u32 = 1;
pub(crate) const BLUE_B: u32 = 2;
pub(crate) const RED_A: u32 = 3;
pub(crate) const RED_B: u32 = 4;
pub(crate) const DEFAULT_A: u32 = 5;
pub(crate) const DEFAULT_B: u32 = 6;
/// In the default network, without IPv6.
pub(crate) const V4_ONLY: u32 = 7;
/// Has an interface but no published endpoint.
pub(crate) const FREE: u32 = 8;

pub(crate) const A4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
pub(crate) const B4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 3);
pub(crate) const A6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
pub(crate) const B6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 3);
/// An unused address in the subnets.
pub(crate) const UNUSED4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 200);
pub(crate) const UNUSED6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x200);
/// An address outside the subnets.
pub(crate) const OUTSIDE4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
pub(crate) const OUTSIDE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);

/// A virtual address in each network's range, unused until a test adds a service.
pub(crate) const VIRTUAL4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
pub(crate) const VIRTUAL6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10);

/// Maximum number of reported wrong verdicts.
const MOST_WRONG: usize = 100;

/// Both families of the first and the second endpoint of each network.
pub(crate) const FAMILIES: [(IpAddr, IpAddr); 2] = [(IpAddr::V4(A4), IpAddr::V4(B4)), (IpAddr::V6(A6), IpAddr::V6(B6))];

pub(crate) fn last(id: u32) -> u8 {
    u8::try_from(id).expect("a small number")
}

pub(crate) fn mac(id: u32) -> Mac {
    [2, 0, 0, 0, 0, last(id)]
}

pub(crate) fn host_mac(id: u32) -> Mac {
    [2, 0, 0, 0, 1, last(id)]
}

/// The virtual address of the same family.
pub(crate) fn virtual_like(like: IpAddr) -> IpAddr {
    if like.is_ipv4() {
        VIRTUAL4.into()
    } else {
        VIRTUAL6.into()
    }
}

/// An address outside of the same family.
pub(crate) fn outside_like(like: IpAddr) -> IpAddr {
    if like.is_ipv4() {
        OUTSIDE4.into()
    } else {
        OUTSIDE6.into()
    }
}

/// The name of the family.
pub(crate) fn family(of: IpAddr) -> &'static str {
    if of.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// A service port without special settings.
pub(crate) fn service(id: u32, backends: &[Backend]) -> Service {
    Service {
        id,
        backends: backends.to_vec(),
        ..Service::default()
    }
}

/// The Ethernet header of frames from the pod.
pub(crate) fn from(id: u32) -> Link {
    Link::new(mac(id), host_mac(id))
}

/// The Ethernet header of frames from the node to the pod.
pub(crate) fn to(id: u32) -> Link {
    Link::new(host_mac(id), mac(id))
}

pub(crate) fn endpoint(id: u32) -> Endpoint {
    let network = id.div_ceil(2).min(DEFAULT);
    let (ipv4, ipv6) = match id {
        BLUE_A | RED_A | DEFAULT_A => (A4, Some(A6)),
        BLUE_B | RED_B | DEFAULT_B => (B4, Some(B6)),
        _ => (Ipv4Addr::new(10, 0, 0, last(id)), None),
    };
    Endpoint {
        network,
        ipv4: Some(ipv4),
        ipv6,
        mac: mac(id),
        host_mac: host_mac(id),
        host_access: network == DEFAULT,
    }
}

/// A datagram between port 4000 and port 53.
pub(crate) fn udp(source: impl Into<IpAddr>, destination: impl Into<IpAddr>) -> Vec<u8> {
    ip(source, destination).packet(&Payload::udp(4000, 53, b"data"))
}

/// A segment between port 4000 and port 80.
pub(crate) fn tcp(source: impl Into<IpAddr>, destination: impl Into<IpAddr>, flags: TcpFlags) -> Vec<u8> {
    ip(source, destination).packet(&Payload::tcp(4000, 80, flags))
}

pub(crate) fn ip(source: impl Into<IpAddr>, destination: impl Into<IpAddr>) -> Ip {
    Ip::new(source.into(), destination.into())
}

/// Runs cases and records their results.
pub(crate) struct Table<'a> {
    pub(crate) step: &'a mut Lockstep,
    rows: Vec<[String; 4]>,
    wrong: usize,
}

/// Runs `work` on a table over the whole node and prints it; fails if any verdict differs from the expected one.
pub(crate) fn table(name: &str, work: impl FnOnce(&mut Table<'_>) -> Result<()> + Send) -> Result<()> {
    Lockstep::inside(name, 4096, |step| {
        let subnets = ["10.0.0.0/24".parse()?, "fd00::/64".parse()?];
        let services = ["10.96.0.0/16".parse()?, "fd00:96::/64".parse()?];
        for network in [BLUE, RED, DEFAULT] {
            step.set_all_routes(network, &subnets, &services, network == DEFAULT)?;
        }
        for id in BLUE_A..=V4_ONLY {
            step.publish(id, &endpoint(id))?;
        }
        let mut table = Table {
            step,
            rows: Vec::new(),
            wrong: 0,
        };
        let done = work(&mut table);
        table.print(name);
        done?;
        ensure!(table.wrong == 0, "{} cases of {name} got another verdict", table.wrong);
        table.step.compare_counters()?;
        table.step.compare_hits()?;
        table.step.compare_tables()
    })
}

impl Table<'_> {
    /// A frame from the pod without an existing flow.
    pub(crate) fn fresh(&mut self, name: &str, id: u32, frame: &[u8], expected: Verdict) -> Result<Vec<u8>> {
        self.step.flush()?;
        self.case(name, Seen::from_pod(id), frame, expected)
    }

    /// A frame from the pod.
    pub(crate) fn sent(&mut self, name: &str, id: u32, frame: &[u8], expected: Verdict) -> Result<Vec<u8>> {
        self.case(name, Seen::from_pod(id), frame, expected)
    }

    /// A frame from the pod that must be redirected to `receiver`.
    pub(crate) fn reaches(&mut self, name: &str, id: u32, frame: &[u8], receiver: u32) -> Result<()> {
        let out = self.case(name, Seen::from_pod(id), frame, Verdict::Redirected)?;
        let header = [mac(receiver), host_mac(receiver)].concat();
        ensure!(out[..12] == header, "{name}: not redirected to endpoint {receiver}");
        ensure!(out[12..] == frame[12..], "{name}: more than the MAC addresses changed");
        Ok(())
    }

    /// A frame from the node itself to the pod.
    pub(crate) fn received(&mut self, name: &str, id: u32, frame: &[u8], expected: Verdict) -> Result<Vec<u8>> {
        self.case(name, Seen::to_pod(id, 0), frame, expected)
    }

    /// A frame to the pod that the node received through the interface with that index.
    pub(crate) fn forwarded(
        &mut self,
        name: &str,
        ingress: u32,
        id: u32,
        frame: &[u8],
        expected: Verdict,
    ) -> Result<Vec<u8>> {
        self.case(name, Seen::to_pod(id, ingress), frame, expected)
    }

    /// A frame from the pod that must reach `receiver` as exactly this packet.
    pub(crate) fn becomes(
        &mut self,
        name: &str,
        id: u32,
        frame: &[u8],
        receiver: u32,
        packet: &[u8],
    ) -> Result<Vec<u8>> {
        let out = self.case(name, Seen::from_pod(id), frame, Verdict::Redirected)?;
        let expected = to(receiver).frame(packet);
        ensure!(
            out == expected,
            "{name}: endpoint {receiver} should get\n{}, not\n{}",
            hex(&expected),
            hex(&out)
        );
        Ok(out)
    }

    /// A frame at any position.
    pub(crate) fn at(&mut self, name: &str, seen: Seen, frame: &[u8], expected: Verdict) -> Result<Vec<u8>> {
        self.case(name, seen, frame, expected)
    }

    /// A frame that must be dropped for that reason with an answer to its sender, which is returned.
    pub(crate) fn refused(&mut self, name: &str, id: u32, frame: &[u8], reason: Verdict) -> Result<Vec<u8>> {
        let out = self.case(name, Seen::from_pod(id), frame, reason)?;
        ensure!(out != frame, "{name}: nobody was told");
        ensure!(
            out[..12] == to(id).frame(&[])[..12],
            "{name}: the answer is not for the sender"
        );
        Ok(out)
    }

    /// A frame that must be dropped for that reason without an answer.
    pub(crate) fn silent(&mut self, name: &str, id: u32, frame: &[u8], reason: Verdict) -> Result<()> {
        let out = self.case(name, Seen::from_pod(id), frame, reason)?;
        ensure!(out == frame, "{name}: somebody was told");
        Ok(())
    }

    fn case(&mut self, name: &str, seen: Seen, frame: &[u8], expected: Verdict) -> Result<Vec<u8>> {
        let direction = seen.direction;
        let (got, frame) = match self.step.run_counted(seen, frame) {
            Ok((outcome, delta)) => {
                // A redirected packet is also counted at the receiver.
                let own = delta.keys().filter(|(_, seen, _)| *seen == direction);
                let verdicts: Vec<&str> = own.map(|(.., verdict)| verdict.as_str()).collect();
                (verdicts.join("+"), outcome.frame)
            }
            Err(error) => (format!("{error:#}"), frame.to_vec()),
        };
        if got != expected.as_str() {
            self.wrong += 1;
        }
        let place = format!("{} {}", direction.as_str(), seen.endpoint);
        self.rows
            .push([name.to_owned(), place, expected.as_str().to_owned(), got]);
        ensure!(self.wrong < MOST_WRONG, "{MOST_WRONG} cases got another verdict");
        Ok(frame)
    }

    fn print(&self, name: &str) {
        println!("{name}: {} cases", self.rows.len());
        println!("{:<66} | {:<10} | {:<22} | got", "case", "seen by", "expected");
        for [case, place, expected, got] in &self.rows {
            println!("{case:<66} | {place:<10} | {expected:<22} | {got}");
        }
    }
}
