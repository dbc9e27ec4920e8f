//! Checks policy and services by rows of their tables and real packets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use kni_common::{
    address::{AddressKey, from_ip},
    policy::{EGRESS, INGRESS, PORTS_ALL, PolicyKey, PolicyValue},
    service::{BackendKey, BackendValue, ServiceKey, ServiceValue},
};
use kni_dataplane::{Dataplane, NetworkRoutes};
use kni_integration::{
    programs,
    traffic::{NoAnswer, new_token, tcp_get_to, udp_ask_to},
};
use kni_model::{EndpointId, Enforcement, NetworkId, PolicyStep, ServiceStep};

use super::{
    checks::{PATIENCE, SILENCE},
    pods::{PORT, Pod, Pods, addresses, subnets},
};

/// A policy set, and the identity of the one peer that it allows.
const SET: u32 = 20;
const FRIEND: u32 = 5;
/// The virtual addresses of the service, in ranges of their own, and its port.
const VIRTUAL4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const VIRTUAL6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10);
const VIRTUAL_PORT: u16 = 80;
const TCP: u16 = 6;
const UDP: u16 = 17;

/// Asks by TCP and UDP; the answer is of `expected`, or there is none.
fn ask(from: &Pod, to: SocketAddr, expected: Option<&Pod>) -> Result<()> {
    let timeout = if expected.is_some() { PATIENCE } else { SILENCE };
    for (what, answer) in [
        ("TCP", tcp_get_to(&from.inside, to, &new_token(), timeout)),
        ("UDP", udp_ask_to(&from.inside, to, &new_token(), timeout)),
    ] {
        let answer = answer.map(|answer| answer.identity);
        let expected = expected.map(|pod| pod.name.clone()).ok_or(NoAnswer::Timeout);
        ensure!(
            answer == expected,
            "{} asked {to} by {what}: {answer:?}, not {expected:?}",
            from.name
        );
    }
    Ok(())
}

/// Checks that a pod with a policy accepts its one allowed peer and no other, and every peer again without it.
pub(crate) fn policy(dataplane: &Dataplane, pods: &Pods) -> Result<()> {
    let (guarded, friend, stranger) = (pods.named("red-2")?, pods.named("red-3")?, pods.named("red-4")?);
    let enforce = |pod: &Pod, policy, identity| {
        let enforcement = Enforcement {
            policy,
            identity4: identity,
            identity6: identity,
        };
        PolicyStep::Enforce(vec![(EndpointId(pod.id), enforcement)])
    };
    let rows = [INGRESS, EGRESS].map(|direction| {
        let key = PolicyKey {
            set: SET,
            identity: FRIEND,
            direction,
        };
        (
            key,
            PolicyValue {
                ports: PORTS_ALL,
                rule: 1,
            },
        )
    });
    let all = |expected: [Option<&Pod>; 2]| -> Result<()> {
        for (peer, expected) in [friend, stranger].into_iter().zip(expected) {
            for address in addresses(guarded.host) {
                ask(peer, SocketAddr::new(address, PORT), expected)?;
            }
            for address in addresses(peer.host) {
                ask(guarded, SocketAddr::new(address, PORT), expected.map(|_| peer))?;
            }
        }
        Ok(())
    };
    all([Some(guarded), Some(guarded)]).context("without a policy")?;
    dataplane.apply_policy(&[enforce(friend, 0, FRIEND), enforce(guarded, SET, 0)])?;
    all([None, None]).context("with a policy that allows nothing")?;
    dataplane.apply_policy(&[PolicyStep::PutPolicy(rows.to_vec())])?;
    dataplane.apply_policy(&[enforce(guarded, SET, 0)])?;
    all([Some(guarded), None]).context("with a policy that allows one peer")?;
    dataplane.apply_policy(&[enforce(guarded, 0, 0), enforce(friend, 0, 0)])?;
    dataplane.apply_policy(&[PolicyStep::RemovePolicy(rows.iter().map(|(key, _)| *key).collect())])?;
    all([Some(guarded), Some(guarded)]).context("after the policy")?;
    println!("a policy lets its one peer through, in both directions");
    Ok(())
}

/// Checks that a virtual address of one network leads to its backend, and nowhere in another network.
pub(crate) fn services(dataplane: &Dataplane, pods: &Pods) -> Result<()> {
    let (client, backend, other) = (pods.named("blue-2")?, pods.named("blue-3")?, pods.named("red-2")?);
    let ranges = ["10.96.0.0/24".parse()?, "fd00:96::/64".parse()?];
    for network in [client.network, other.network] {
        let routes = NetworkRoutes {
            service_subnets: ranges.to_vec(),
            ..programs::routes(&subnets(), false)
        };
        dataplane.set_routes(NetworkId::try_from(network)?, &routes)?;
    }
    let virtuals: [IpAddr; 2] = [VIRTUAL4.into(), VIRTUAL6.into()];
    let targets = addresses(backend.host);
    let mut steps = [Vec::new(), Vec::new(), Vec::new()];
    let mut list = 0;
    for (virt, target) in virtuals.into_iter().zip(targets) {
        for protocol in [TCP, UDP] {
            list += 1;
            let value = BackendValue {
                address: from_ip(target),
                port: PORT.to_be_bytes(),
                zero: 0,
                check: 0,
            };
            let row = ServiceValue {
                service: list,
                backends: list,
                count: 1,
                flags: 0,
                affinity: 0,
                check: 0,
            };
            let [backends, services, keys] = &mut steps;
            backends.push(ServiceStep::PutBackends(vec![(
                BackendKey {
                    backends: list,
                    slot: 0,
                },
                value,
            )]));
            services.push(ServiceStep::PutServices(vec![(
                key(client.network, virt, protocol),
                row,
            )]));
            keys.push(ServiceStep::PutAddresses(vec![AddressKey {
                network: client.network,
                address: from_ip(virt),
            }]));
        }
    }
    dataplane.apply_services(&steps.concat())?;
    for virt in virtuals {
        let at = SocketAddr::new(virt, VIRTUAL_PORT);
        ask(client, at, Some(backend))?;
        // Its own service: the answer comes back to it through the virtual address.
        ask(backend, at, Some(backend))?;
        ask(other, at, None)?;
    }
    println!("a service leads to its backend, in its network only");
    Ok(())
}

fn key(network: u32, address: IpAddr, protocol: u16) -> ServiceKey {
    ServiceKey {
        network,
        address: from_ip(address),
        port: VIRTUAL_PORT.to_be_bytes(),
        protocol,
    }
}
