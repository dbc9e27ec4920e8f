//! Times the `from_pod` that a running agent loaded (`BPF_PROG_TEST_RUN`), so that an agent of another layout can be
//! measured: the kernel runs the program itself, which any process may have loaded.

use std::{net::IpAddr, path::Path as FilePath, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::frames::{Ip, Link, Mac, Payload, TcpFlags, parse_mac};
use kni_proto::runtime::{Interface, ListInterfacesRequest};

use crate::{
    bpf::{self, Program},
    cpu::pin,
    paths::ours::{Ours, Setup},
};

/// The timed packets: their names in the JSON and in the table. Each index belongs to [`packet`].
pub(super) const CASES: [(&str, &str); 6] = [
    ("tcp_v4", "established, IPv4 TCP"),
    ("udp_v4", "established, IPv4 UDP"),
    ("tcp_v6", "established, IPv6 TCP"),
    ("udp_v6", "established, IPv6 UDP"),
    ("new_flow_v4", "new flow, IPv4 TCP SYN"),
    ("new_flow_v6", "new flow, IPv6 TCP SYN"),
];

const TC_ACT_REDIRECT: u32 = 7;
/// A flow of many packets takes some time; less than any lifetime.
const PAUSE: Duration = Duration::from_millis(2500);

/// An end of the timed flows.
struct End {
    mac: Mac,
    addresses: [IpAddr; 2],
    port: u16,
    context: Vec<u8>,
}

/// The program of a running agent, and two of its pods.
pub(super) struct Timed {
    program: Program,
    empty: Program,
    ends: [End; 2],
    cpu: usize,
    node: Ours,
}

impl Timed {
    /// Starts an agent with two pods whose flows have no limit.
    pub(super) fn start(agent: &FilePath, embedded: bool, cpu: usize) -> Result<Self> {
        let node = Ours::start(agent, embedded, &Setup::TIMED)?;
        let listed = node.interfaces()?;
        let interface = |name: &str| {
            let mut of = listed.iter().filter(|one| one.pod_namespace == "bench");
            of.find(|one| one.pod_name == name).context("an interface")
        };
        let (client, server) = (interface("client")?, interface("server")?);
        let loaded = client.programs.iter().find(|program| program.name == "from_pod");
        let program = loaded.context("no program at the interface")?.id;
        let mac = |text: &str| parse_mac(text).context("a MAC address");
        // The kernel runs a program repeatedly on one packet, which the program rewrites: here each pod's gateway gets
        // the address of the other pod, so that rewriting restores the original packet.
        let [client_mac, server_mac] = [mac(&client.mac)?, mac(&server.mac)?];
        bpf::replace_in_arrays(program, mac(&client.host_mac)?, server_mac)?;
        bpf::replace_in_arrays(program, mac(&server.host_mac)?, client_mac)?;
        Ok(Self {
            program: Program::of(program)?,
            empty: Program::empty()?,
            ends: [
                End::new(client, client_mac, 40_000)?,
                End::new(server, server_mac, 8080)?,
            ],
            cpu,
            node,
        })
    }

    /// Establishes the timed flows. They expire unless they are measured within some seconds, and then every few
    /// minutes.
    pub(super) fn establish(&self) -> Result<()> {
        for v4 in [true, false] {
            for (from, flags) in [(0, TcpFlags::SYN), (1, TcpFlags::SYN_ACK)] {
                self.run(from, &self.frame(from, v4, Some(flags)), 1)?;
            }
        }
        for _ in 0..2 {
            for (v4, from, flags) in [true, false].into_iter().flat_map(|v4| {
                let both = |flags| [(v4, 0, flags), (v4, 1, flags)];
                [both(Some(TcpFlags::ACK)), both(None)].concat()
            }) {
                self.run(from, &self.frame(from, v4, flags), 1)?;
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// A packet of an end to the other one: TCP with these flags, or UDP.
    fn frame(&self, from: usize, v4: bool, flags: Option<TcpFlags>) -> Vec<u8> {
        let (own, other) = (&self.ends[from], &self.ends[1 - from]);
        let payload = match flags {
            Some(flags) => Payload::Tcp {
                source_port: own.port,
                destination_port: other.port,
                flags,
                sequence: 1,
                data: vec![0; 32],
            },
            None => Payload::udp(own.port, other.port, &[0; 32]),
        };
        let family = usize::from(!v4);
        let packet = Ip::new(own.addresses[family], other.addresses[family]).packet(&payload);
        Link::new(own.mac, other.mac).frame(&packet)
    }

    /// The packet of a case.
    fn packet(&self, case: usize) -> Vec<u8> {
        let flags = match case {
            0 | 2 => Some(TcpFlags::ACK),
            1 | 3 => None,
            _ => Some(TcpFlags::SYN),
        };
        self.frame(0, [0, 1, 4].contains(&case), flags)
    }

    fn run(&self, from: usize, frame: &[u8], repeat: u32) -> Result<Duration> {
        let context = &self.ends[from].context;
        let ran = self.node.enter(|| -> Result<_> {
            pin(self.cpu)?;
            self.program.run(frame, context, repeat)
        })??;
        ensure!(
            ran.0 == TC_ACT_REDIRECT,
            "the program returns {}, which is no redirect",
            ran.0
        );
        Ok(ran.1)
    }

    /// Nanoseconds of a case, minus those of an empty program.
    pub(super) fn nanoseconds(&self, case: usize, repeat: u32) -> Result<f64> {
        let frame = self.packet(case);
        if case < 4 {
            // After a new flow, it is an established one again.
            for (from, flags) in [(1, TcpFlags::SYN_ACK), (0, TcpFlags::ACK), (1, TcpFlags::ACK)] {
                for v4 in [true, false] {
                    self.run(from, &self.frame(from, v4, Some(flags)), 1)?;
                }
            }
        }
        self.run(0, &frame, 1)?;
        let full = self.run(0, &frame, repeat)?;
        let context = &self.ends[0].context;
        let base = self.node.enter(|| -> Result<_> {
            pin(self.cpu)?;
            self.empty.run(&frame, context, repeat)
        })??;
        Ok((full.as_secs_f64() - base.1.as_secs_f64()) * 1e9)
    }
}

impl End {
    fn new(interface: &Interface, mac: Mac, port: u16) -> Result<Self> {
        const SIZE: usize = 192;
        const IFINDEX: usize = 40;
        let address = |family: &str| {
            let found = interface.addresses.iter().find(|address| address.family == family);
            anyhow::Ok(found.context("an address")?.ip.parse()?)
        };
        let mut context = vec![0; SIZE];
        context[IFINDEX..IFINDEX + 4].copy_from_slice(&interface.host_ifindex.to_ne_bytes());
        Ok(Self {
            mac,
            addresses: [address("IPv4")?, address("IPv6")?],
            port,
            context,
        })
    }
}

impl Ours {
    /// All interfaces that the agent lists.
    fn interfaces(&self) -> Result<Vec<Interface>> {
        let mut client = self.client();
        let answer = self.wait(client.list_interfaces(ListInterfacesRequest::default()))?;
        Ok(answer.into_inner().interfaces)
    }
}
