//! Tests TCX programs of other owners at KNI's interfaces, attached before and after KNI's: all of them work.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction, IFINDEX_BASE, Verdict};
use kni_integration::{
    Namespaces, eventually_sync,
    foreign::{ForeignProgram, Position, Side},
    frames::Mac,
    model::Endpoint,
    node::NODE_V4,
    programs::{Lockstep, Programs},
    require,
    traffic::{Servers, tcp_get},
};
use kni_model::EndpointId;

const PORT: u16 = 8080;
const TIMEOUT: Duration = Duration::from_mins(1);
/// Endpoints of this test; the lower ones already have interfaces.
const A: u32 = 9;
const B: u32 = 10;

fn text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn endpoint(id: u32) -> Result<Endpoint> {
    let last = u8::try_from(id)?;
    Ok(Endpoint {
        network: 3,
        ipv4: Some([10, 0, 0, last].into()),
        ipv6: None,
        mac: [2, 0, 0, 0, 0, last],
        host_mac: [2, 0, 0, 0, 1, last],
        host_access: true,
    })
}

/// A pod with one interface and a default route to its gateway, and the node's route to it.
fn pod(node: &Namespaces, id: u32) -> Result<Namespaces> {
    let config = endpoint(id)?;
    let (address, mac, host_mac) = (
        config.ipv4.context("an address")?,
        text(config.mac),
        text(config.host_mac),
    );
    let inside = Namespaces::fresh_net(&format!("pod-{id}"))?;
    let (host, index, netns) = (format!("kni{id}"), IFINDEX_BASE + id, inside.net_path());
    node.ip(&[
        &format!(
            "link add {host} index {index} address {host_mac} type veth peer name eth0 address {mac} netns {}",
            netns.display()
        ),
        &format!("link set {host} addrgenmode none up"),
    ])?;
    inside.ip(&[
        "link set eth0 addrgenmode none up",
        &format!("address add {address}/32 dev eth0"),
        "route add 169.254.1.1 dev eth0",
        "route add default via 169.254.1.1 dev eth0",
        &format!("neighbour replace 169.254.1.1 lladdr {host_mac} dev eth0 nud permanent"),
    ])?;
    node.ip(&[
        &format!("route add {address} dev {host}"),
        &format!("neighbour replace {address} lladdr {mac} dev {host} nud permanent"),
    ])?;
    Ok(inside)
}

/// One program at each end of each chain of an interface.
struct Neighbours {
    programs: Vec<((Side, Position), ForeignProgram)>,
}

impl Neighbours {
    fn seen(&self, side: Side, position: Position) -> Result<u64> {
        let found = self.programs.iter().find(|(place, _)| *place == (side, position));
        found.context("attached everywhere")?.1.seen()
    }
}

fn forwarded(step: &Lockstep, id: u32, direction: Direction, verdict: Verdict) -> Result<u64> {
    let rows = step.programs().dataplane().forwarded(EndpointId(id))?;
    let mut rows = rows.into_iter();
    let row = rows.find(|(seen, what, _)| (*seen, *what) == (direction, verdict));
    Ok(row.map_or(0, |(.., count)| count.packets))
}

impl Neighbours {
    fn attach(id: u32) -> Result<Self> {
        let mut programs = Vec::new();
        for side in [Side::Ingress, Side::Egress] {
            for position in [Position::First, Position::Last] {
                let program = ForeignProgram::attach(IFINDEX_BASE + id, side, position)?;
                programs.push(((side, position), program));
            }
        }
        Ok(Self { programs })
    }
}

/// Two pods whose interfaces have KNI's programs and foreign ones. `earlier`: the foreign ones are attached before
/// KNI's, which are then added after them.
fn attach_all(step: &mut Lockstep, earlier: bool) -> Result<[Neighbours; 2]> {
    step.set_routes(3, &["10.0.0.0/24".parse()?], true)?;
    let mut attach = |id: u32| -> Result<Neighbours> {
        let foreign = if earlier { Some(Neighbours::attach(id)?) } else { None };
        let dataplane = step.programs().dataplane();
        dataplane.attach(&format!("kni{id}"), EndpointId(id))?;
        step.publish(id, &endpoint(id)?)?;
        foreign.map_or_else(|| Neighbours::attach(id), Ok)
    };
    Ok([attach(A)?, attach(B)?])
}

fn all_work(earlier: bool) -> Result<()> {
    Programs::inside("neighbours", 4096, |programs| {
        let node = Namespaces::current("neighbours")?;
        let mut step = Lockstep::new(programs)?;
        let pods = [pod(&node, A)?, pod(&node, B)?];
        let foreign = attach_all(&mut step, earlier)?;
        let servers = Servers::start(&pods[1], "pod-b", PORT)?;
        let ask = |from: &Namespaces| tcp_get(from, [10, 0, 0, 10].into(), PORT, TIMEOUT);

        let answer = ask(&pods[0]).context("from pod to pod")?;
        ensure!(answer.identity == servers.identity(), "{answer:?}");
        redirected(&step, &foreign, earlier)?;

        let before: Vec<u64> = foreign[1]
            .programs
            .iter()
            .map(|(_, program)| program.seen())
            .collect::<Result<_>>()?;
        let answer = ask(&node).context("from the node to the pod")?;
        ensure!(
            answer.identity == servers.identity() && answer.client.ip().to_string() == NODE_V4,
            "{answer:?}"
        );
        through_the_stack(&step, &foreign[1], &before)
    })
}

/// Redirected packets leave the chain: neither programs after KNI's nor the egress chain of the other interface see
/// them. This applies to redirects of any program at the hook.
fn redirected(step: &Lockstep, foreign: &[Neighbours; 2], earlier: bool) -> Result<()> {
    let sent = forwarded(step, A, Direction::FromPod, Verdict::Redirected)?;
    let first = foreign[0].seen(Side::Ingress, Position::First)?;
    ensure!(sent > 0, "our program counted nothing");
    ensure!(first >= sent, "the first program saw {first} of {sent} packets");
    // KNI's program is the last one if it was attached last. The last packets of the connection may still be in
    // transit.
    let last = eventually_sync(TIMEOUT, || {
        let last = foreign[0].seen(Side::Ingress, Position::Last)?;
        let first = foreign[0].seen(Side::Ingress, Position::First)?;
        let expected = if earlier { first } else { 0 };
        ensure!(
            last == expected,
            "the last foreign program saw {last} packets, not {expected}"
        );
        Ok(last)
    })?;
    let egress = foreign[1].seen(Side::Egress, Position::First)?;
    ensure!(egress == 0, "redirected packets met the egress chain");
    println!("of {sent} redirected packets the first foreign program saw {first}, the last one {last}");
    Ok(())
}

/// Between node and pod: both chains, all programs.
fn through_the_stack(step: &Lockstep, foreign: &Neighbours, before: &[u64]) -> Result<()> {
    let delivered = forwarded(step, B, Direction::ToPod, Verdict::Delivered)?;
    let answered = forwarded(step, B, Direction::FromPod, Verdict::PassedToStack)?;
    ensure!(
        delivered > 0 && answered > 0,
        "our programs counted {delivered} and {answered}"
    );
    for ((place, program), before) in foreign.programs.iter().zip(before) {
        let seen = program.seen()? - before;
        let ours = if place.0 == Side::Egress { delivered } else { answered };
        println!("{place:?} saw {seen} of {ours} packets between node and pod");
        ensure!(seen >= ours, "{place:?} saw {seen} of {ours} packets");
    }
    Ok(())
}

#[test]
fn programs_that_were_there_before_keep_working() -> Result<()> {
    require!(root, netns, bpf, ip);
    all_work(true)
}

#[test]
fn programs_that_come_later_work() -> Result<()> {
    require!(root, netns, bpf, ip);
    all_work(false)
}
