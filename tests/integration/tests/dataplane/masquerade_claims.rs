//! Tests that two CPUs never give one masquerade port to two flows with the same server.

use std::{
    hint,
    net::{IpAddr, Ipv4Addr},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use anyhow::{Result, ensure};
use kni_common::{Direction, IFINDEX_BASE};
use kni_dataplane::{EgressRow, EgressSource, EndpointConfig, NetworkRoutes, NodeConfig, RouteEgress};
use kni_integration::{
    frames::{Ip, Link, Mac, Payload},
    long,
    one_cpu::pin,
    programs::{Masqueraded, Programs, publish_unrestricted},
    require,
};
use kni_model::{EndpointId, MacAddr, NetworkId};
use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};

const SERVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 80);
const NODE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// The address of both pods, each in a network of its own.
const POD: Ipv4Addr = Ipv4Addr::new(10, 10, 0, 11);
/// The only port.
const PORT: u16 = 61_000;
const SERVER_PORT: u16 = 53;
const OWN_PORT: u16 = 4000;
const REDIRECTED: u32 = 7;
/// The interface of the uplink.
const UPLINK: u32 = IFINDEX_BASE + 8;

const fn mac(id: u8) -> Mac {
    [2, 0, 0, 0, 0, id]
}

const fn host_mac(id: u8) -> Mac {
    [2, 0, 0, 0, 1, id]
}

/// Publishes an endpoint with the only address and port to leave with, in a network of the same number.
fn publish(programs: &Programs, id: u8) -> Result<()> {
    let (dataplane, endpoint) = (programs.dataplane(), EndpointId(id.into()));
    let network = NetworkId::try_from(u32::from(id))?;
    dataplane.set_routes(
        network,
        &NetworkRoutes {
            subnets: vec!["10.10.0.0/16".parse()?],
            service_subnets: Vec::new(),
            egress: RouteEgress::Masquerade { host_access: false },
        },
    )?;
    let source = EgressSource {
        ipv4: Some(NODE),
        ipv6: None,
        first: PORT,
        last: PORT,
        shared_v4: false,
        shared_v6: false,
    };
    dataplane.set_masquerade(endpoint, &EgressRow::From(source))?;
    publish_unrestricted(
        dataplane,
        &EndpointConfig {
            endpoint,
            network,
            ipv4: Some(POD),
            ipv6: None,
            mac: MacAddr(mac(id)),
            host_mac: MacAddr(host_mac(id)),
            host_access: false,
            xdp: false,
            plugin: None,
            shaped: false,
        },
    )
}

/// The first packet of a flow of a pod to the server.
fn question(id: u8) -> Vec<u8> {
    let packet = Ip::new(IpAddr::V4(POD), IpAddr::V4(SERVER));
    let packet = packet.packet(&Payload::udp(OWN_PORT, SERVER_PORT, &[id]));
    Link::new(mac(id), host_mac(id)).frame(&packet)
}

/// The CPUs that the calling thread may use.
pub(crate) fn cpus() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let is_allowed = |cpu: &usize| allowed.is_set(*cpu).unwrap_or(false);
    Ok((0..CpuSet::count()).filter(is_allowed).collect())
}

/// Lets both threads continue once the other one has come for the `round`th time, too.
fn meet(at: &AtomicUsize, round: usize) {
    at.fetch_add(1, Ordering::AcqRel);
    for spins in 0_u32.. {
        if at.load(Ordering::Acquire) >= 2 * (round + 1) {
            return;
        }
        if spins % 4096 == 4095 {
            // The other thread's CPU may be busy with something else.
            thread::yield_now();
        }
        hint::spin_loop();
    }
}

/// The first packets of both pods at the same time, `rounds` times. `prepare` is called before each round; the result
/// is how often neither, one and both of them left.
fn race(programs: &[Programs; 2], rounds: usize, mut prepare: impl FnMut() -> Result<()> + Send) -> Result<[usize; 3]> {
    let (start, end) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let left = AtomicUsize::new(0);
    let cpus = cpus()?;
    ensure!(cpus.len() > 1, "one CPU has no races");
    let run = |id: u8, before: &mut dyn FnMut() -> Result<()>| -> Result<[usize; 3]> {
        let mut result = pin(cpus[usize::from(id) - 1]);
        let frame = question(id);
        let mut results = [0; 3];
        for round in 0..rounds {
            result = result.and_then(|()| before());
            meet(&start, round);
            match programs[usize::from(id) - 1].run(Direction::FromPod, id.into(), &frame) {
                Ok(ran) => {
                    left.fetch_add(usize::from(ran.action == REDIRECTED), Ordering::AcqRel);
                }
                Err(error) => result = result.and(Err(error)),
            }
            meet(&end, round);
            if id == 1 {
                results[left.swap(0, Ordering::AcqRel)] += 1;
            }
        }
        result.map(|()| results)
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| run(1, &mut prepare));
        let second = scope.spawn(|| run(2, &mut || Ok(())));
        second.join().expect("a racer does not panic")?;
        first.join().expect("a racer does not panic")
    })
}

#[test]
fn two_cpus_never_claim_one_port() -> Result<()> {
    require!(root, netns, bpf, ip);
    let rounds = if long() { 500_000 } else { 30_000 };
    Programs::inside("claims", 1024, |programs| {
        for id in [1, 2] {
            publish(&programs, id)?;
        }
        let mut rows = Masqueraded::open(&programs.dataplane().pin_path())?;
        // Each thread has programs of its own, with the same tables.
        let both = [programs, Programs::open(1024)?];
        both[0].dataplane().configure(&NodeConfig {
            flows_per_endpoint: 0,
            ..NodeConfig::default()
        })?;
        both[0].dataplane().set_uplink(Some(UPLINK))?;
        let found = race(&both, rounds / 3, || rows.clear())?;
        println!("a port that no flow had: [neither, one, both] left {found:?} times");
        ensure!(found == [0, rounds / 3, 0], "exactly one flow gets the port: {found:?}");
        // Of an endpoint that is no more. The times of rows differ, as those of rows in life do.
        let mut since = 0_u32;
        let packet = (SERVER, SERVER_PORT, NODE, PORT);
        let found = race(&both, rounds, || {
            rows.clear()?;
            since = since.wrapping_add(1);
            rows.put_dead(packet, 17, EndpointId(3), since)
        })?;
        println!("a port whose flow is dead: [neither, one, both] left {found:?} times");
        ensure!(found == [0, rounds, 0], "exactly one flow gets the port: {found:?}");
        // A CPU that is between the take-over and the write: the row looks as before to others, and is not free.
        rows.clear()?;
        rows.put_claimed(packet, 17, EndpointId(3), 1)?;
        let ran = both[0].run(Direction::FromPod, 1, &question(1))?;
        ensure!(
            ran.action != REDIRECTED,
            "a row that is being taken over is taken by another flow"
        );
        Ok(())
    })
}
