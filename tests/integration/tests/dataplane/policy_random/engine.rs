//! Evaluates the engine's tables as the programs do, for the comparison with the oracle.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use kni_common::{address::from_ip, event::PolicyTrail};
use kni_integration::oracle::World;
use kni_model::{Enforcement, PolicyStep, PolicyTables, policy::PolicyDirection};
use kni_policy::{PolicyEngine, evaluate};

use super::{
    generate::Question,
    objects::{Numbers, iana, number_of, policy},
};

/// The engine and its inputs.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    engine: PolicyEngine,
    pods: Vec<kni_model::SandboxId>,
}

impl Beside {
    /// Changes the engine's inputs to those of the world; returns the planned steps.
    pub(crate) fn become_(&mut self, world: &World, numbers: &Numbers) -> Result<Vec<PolicyStep>> {
        let policies: Result<_> = world.policies.iter().map(policy).collect();
        self.engine.set_policies(policies?);
        self.engine.set_namespaces(world.namespaces.clone());
        for sandbox in self.pods.drain(..) {
            self.engine.remove_pod(&sandbox);
        }
        for pod in numbers.pods(world)? {
            self.pods.push(pod.sandbox.clone());
            self.engine.put_pod(pod);
        }
        let steps = self.engine.plan();
        self.engine.confirm();
        ensure!(
            self.engine.plan().is_empty(),
            "a second plan has steps, though nothing changed"
        );
        Ok(steps)
    }

    /// The tables' decisions on the source's sending and the destination's receiving, with the rules; `None` for an end
    /// that is not a local endpoint.
    pub(crate) fn evaluate(&self, question: &Question, numbers: &Numbers) -> [Option<(bool, PolicyTrail)>; 2] {
        let one = |own: IpAddr, other: IpAddr, direction| {
            let set = self.enforcement(question, own, numbers)?.policy;
            let identity = match self.enforcement(question, other, numbers) {
                Some(of) if other.is_ipv4() => of.identity4,
                Some(of) => of.identity6,
                None => longest_prefix(self.tables(), number_of(question.network), other),
            };
            let protocol = iana(question.protocol, own.is_ipv4());
            Some(evaluate(
                self.tables(),
                set,
                direction,
                identity,
                protocol,
                question.port,
            ))
        };
        [
            one(question.from, question.to, PolicyDirection::Egress),
            one(question.to, question.from, PolicyDirection::Ingress),
        ]
    }

    /// The engine.
    pub(crate) fn engine(&self) -> &PolicyEngine {
        &self.engine
    }

    /// The current tables.
    pub(crate) fn tables(&self) -> &PolicyTables {
        self.engine.tables()
    }

    fn enforcement(&self, question: &Question, address: IpAddr, numbers: &Numbers) -> Option<Enforcement> {
        let endpoint = numbers.endpoint(question.network, address)?;
        let in_force = self.tables().endpoints.get(&endpoint).copied();
        Some(in_force.unwrap_or_default())
    }
}

/// The identity of an address without a local endpoint: that of the longest prefix in `IDENTITIES`, 0 without one.
fn longest_prefix(tables: &PolicyTables, network: u32, address: IpAddr) -> u32 {
    let wanted = [&network.to_be_bytes()[..], &from_ip(address)].concat();
    let rows = tables.identities.iter().filter(|(key, _)| {
        let has = [&key.data.network[..], &key.data.address].concat();
        let bit = |bytes: &[u8], n: usize| bytes[n / 8] >> (7 - n % 8) & 1;
        (0..key.prefix_length as usize).all(|n| bit(&has, n) == bit(&wanted, n))
    });
    let best = rows.max_by_key(|(key, _)| key.prefix_length);
    best.map_or(0, |(_, identity)| *identity)
}
