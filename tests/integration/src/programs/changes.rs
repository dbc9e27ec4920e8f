//! Changes the tables of the kernel and the model identically.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use kni_common::{
    address::{AddressKey, from_ip},
    config::Config,
    policy::{
        IdentityData, IdentityKey, PORTS_ALL, PORTS_NONE, PREFIX_ANY_PORT, PREFIX_ANY_PROTOCOL, PolicyKey, PolicyValue,
        PortData, PortKey, PortValue,
    },
    service::{BackendKey, BackendValue, SERVICE_DROP_IF_EMPTY, ServiceValue},
};
use kni_dataplane::{EndpointConfig, HostPort, NetworkRoutes, host_port_key};
use kni_model::{EndpointId, Enforcement, MacAddr, NetworkId, PolicyStep, ServiceStep};

use super::{Lockstep, tables::service_key};
use crate::model::{Allowed, Asked, Endpoint, Enforced, Flow, Front, Lifetimes, NodePort, PortRow, Service, key_of};

/// Rows of unused backend lists that are kept; four times as many backends fit as services.
const MOST_UNUSED: usize = 2000;

impl Lockstep {
    /// Publishes an endpoint with a new version; without policies if none were enforced before.
    pub fn publish(&mut self, id: u32, endpoint: &Endpoint) -> Result<()> {
        if self.model.world.enforced(id).is_none() {
            self.enforce(id, Enforced::default())?;
        }
        self.programs().dataplane().publish(&EndpointConfig {
            endpoint: EndpointId(id),
            network: NetworkId::try_from(endpoint.network)?,
            ipv4: endpoint.ipv4,
            ipv6: endpoint.ipv6,
            mac: MacAddr(endpoint.mac),
            host_mac: MacAddr(endpoint.host_mac),
            host_access: endpoint.host_access,
            // The behaviour of `from_pod` must not depend on it.
            xdp: true,
            plugin: None,
            shaped: false,
        })?;
        self.model.publish(id, endpoint.clone());
        self.remember_generation(id)
    }

    /// Enforces policies at an endpoint, published or not.
    pub fn enforce(&mut self, id: u32, enforced: Enforced) -> Result<()> {
        let Enforced {
            policy,
            identity4,
            identity6,
        } = enforced;
        let words = Enforcement {
            policy,
            identity4,
            identity6,
        };
        let step = PolicyStep::Enforce(vec![(EndpointId(id), words)]);
        self.programs().dataplane().apply_policy(&[step])?;
        self.model.world.enforce(id, enforced);
        if self.model.world.endpoint(id).is_some() {
            self.remember_generation(id)?;
        }
        Ok(())
    }

    fn remember_generation(&mut self, id: u32) -> Result<()> {
        let version = self.model.world.version(id).context("published just now")?;
        let epoch = self.model.world.epoch(id).context("published just now")?;
        let (generation, kernel_epoch) = self.tables.generations(id)?;
        self.generations.insert(version, generation);
        self.epochs.insert((id, epoch), kernel_epoch);
        Ok(())
    }

    /// Withdraws an endpoint.
    pub fn withdraw(&mut self, id: u32) -> Result<()> {
        self.programs().dataplane().withdraw(EndpointId(id))?;
        self.model.withdraw(id);
        Ok(())
    }

    /// Stops or resumes the traffic of an endpoint in place.
    pub fn set_ready(&mut self, id: u32, ready: bool) -> Result<()> {
        self.tables.set_ready(id, ready)?;
        self.model.world.set_ready(id, ready);
        Ok(())
    }

    /// Replaces the ports of the node that lead to ports of endpoints.
    pub fn lead_ports(&mut self, ports: &BTreeMap<NodePort, (u32, u16)>) -> Result<()> {
        let row = |(port, target): (&NodePort, &(u32, u16))| {
            let ((address, protocol, port), (endpoint, inner)) = (*port, *target);
            let target = HostPort {
                endpoint: EndpointId(endpoint),
                port: inner,
            };
            (host_port_key(address, protocol, port), target)
        };
        self.programs()
            .dataplane()
            .set_host_ports(&ports.iter().map(row).collect())?;
        self.model.world.set_ports(ports);
        Ok(())
    }

    /// Sets a network's routes.
    pub fn set_routes(&mut self, network: u32, subnets: &[IpNet], host_access: bool) -> Result<()> {
        self.set_all_routes(network, subnets, &[], host_access)
    }

    /// Sets the routes of a network, including ranges of virtual addresses.
    pub fn set_all_routes(
        &mut self,
        network: u32,
        subnets: &[IpNet],
        services: &[IpNet],
        host_access: bool,
    ) -> Result<()> {
        let routes = NetworkRoutes {
            service_subnets: services.to_vec(),
            ..super::routes(subnets, host_access)
        };
        let id = NetworkId::try_from(network)?;
        self.programs().dataplane().set_routes(id, &routes)?;
        // Flows through a stack without access now are evaluated again.
        if self.model.world.has_egress(network) && !host_access {
            self.model.remove_external(network);
        }
        self.model.world.set_routes(network, subnets, services, host_access);
        Ok(())
    }

    /// Writes a row of a policy set: the result for traffic from or to `identity`.
    pub fn allow(&mut self, set: u32, identity: u32, asked: Asked, allowed: Allowed, rule: u32) -> Result<()> {
        let key = PolicyKey {
            set,
            identity,
            direction: asked.code(),
        };
        let ports = match allowed {
            Allowed::Nothing => PORTS_NONE,
            Allowed::Everything => PORTS_ALL,
            Allowed::Ports(ports) => ports,
        };
        let step = PolicyStep::PutPolicy(vec![(key, PolicyValue { ports, rule })]);
        self.programs().dataplane().apply_policy(&[step])?;
        self.model.policies.rows.insert((set, identity, asked), (allowed, rule));
        Ok(())
    }

    /// Writes a port set.
    pub fn set_ports(&mut self, ports: u32, rows: &[PortRow]) -> Result<()> {
        let step = PolicyStep::PutPorts(rows.iter().map(|row| port_row(ports, row)).collect());
        self.programs().dataplane().apply_policy(&[step])?;
        self.model.policies.ports.insert(ports, rows.to_vec());
        Ok(())
    }

    /// Assigns an identity to the addresses of a prefix without local endpoints.
    pub fn identify(&mut self, network: u32, prefix: IpNet, identity: u32) -> Result<()> {
        let width = if prefix.addr().is_ipv4() { 96 } else { 0 };
        let key = IdentityKey {
            prefix_length: 32 + width + u32::from(prefix.prefix_len()),
            data: IdentityData {
                network: network.to_be_bytes(),
                address: from_ip(prefix.network()),
            },
        };
        let step = PolicyStep::PutIdentities(vec![(key, identity)]);
        self.programs().dataplane().apply_policy(&[step])?;
        self.model.policies.identities.insert((network, prefix), identity);
        self.model.world.renew_epochs(network);
        let members = self.model.world.members(network);
        members.into_iter().try_for_each(|id| self.remember_generation(id))
    }

    /// [`Self::serve`] at an address outside of the cluster, whose other ports are left alone.
    pub fn serve_outside(&mut self, front: Front, service: &Service) -> Result<()> {
        self.model.world.services.external.insert((front.0, front.1));
        self.serve(front, service)
    }

    /// Adds a service port, or replaces its backends. Known flows are unchanged.
    pub fn serve(&mut self, front: Front, service: &Service) -> Result<()> {
        self.lists += 1;
        let backends = self.lists;
        let rows = (0..).zip(&service.backends).map(|(slot, (address, port))| {
            let value = BackendValue {
                address: from_ip(*address),
                port: port.to_be_bytes(),
                zero: 0,
                check: 0,
            };
            (BackendKey { backends, slot }, value)
        });
        let rows: Vec<_> = rows.collect();
        let keys = rows.iter().map(|(key, _)| *key).collect();
        if let Some(before) = self.backends.insert(front, keys) {
            self.unused.extend(before);
        }
        let row = ServiceValue {
            service: service.id,
            backends,
            count: u32::try_from(service.backends.len())?,
            flags: if service.local_only { SERVICE_DROP_IF_EMPTY } else { 0 },
            affinity: service.affinity,
            check: 0,
        };
        let mut steps = vec![
            ServiceStep::PutBackends(rows),
            ServiceStep::PutServices(vec![(service_key(&front), row)]),
        ];
        if !self.model.world.services.external.contains(&(front.0, front.1)) {
            steps.push(ServiceStep::PutAddresses(vec![address_key(&front)]));
        }
        self.programs().dataplane().apply_services(&steps)?;
        self.model.world.services.fronts.insert(front, service.clone());
        self.remove_unused_backends()
    }

    /// Removes the rows of replaced lists, many at once because it waits for running programs.
    fn remove_unused_backends(&mut self) -> Result<()> {
        if self.unused.len() < MOST_UNUSED {
            return Ok(());
        }
        let step = ServiceStep::RemoveBackends(std::mem::take(&mut self.unused));
        Ok(self.programs().dataplane().apply_services(&[step])?)
    }

    /// Removes a service port, and its address with the last port.
    pub fn unserve(&mut self, front: Front) -> Result<()> {
        self.model.world.services.fronts.remove(&front);
        self.unused.extend(self.backends.remove(&front).into_iter().flatten());
        let mut steps = vec![ServiceStep::RemoveServices(vec![service_key(&front)])];
        if !self.model.world.services.has_address(front.0, front.1) {
            steps.push(ServiceStep::RemoveAddresses(vec![address_key(&front)]));
        }
        Ok(self.programs().dataplane().apply_services(&steps)?)
    }

    /// Sets the lifetimes of flows (in ticks), the flow limit of an endpoint, and whether new flows are reported.
    pub fn configure(&mut self, lifetimes: Lifetimes, flows_per_endpoint: u32, flow_events: u32) -> Result<()> {
        let config = Config {
            flow_events,
            flows_per_endpoint,
            tcp_new: lifetimes.tcp_new,
            tcp_established: lifetimes.tcp_established,
            tcp_closing: lifetimes.tcp_closing,
            other_new: lifetimes.other_new,
            udp_replied: lifetimes.udp_replied,
            udp_established: lifetimes.udp_established,
            sctp_established: lifetimes.sctp_established,
            other_established: lifetimes.other_established,
            ..self.tables.config()?
        };
        self.tables.set_config(config)?;
        self.learn_configuration()
    }

    /// Sets the ticks per second of the configuration, which the programs use only for the lifetime of fragments, 30 s.
    /// A run on a slow machine takes longer: with a large value, rows expire by [`Self::age`] alone.
    pub fn set_second(&mut self, ticks: u32) -> Result<()> {
        let config = Config {
            hz: ticks,
            ..self.tables.config()?
        };
        self.tables.set_config(config)?;
        self.learn_configuration()
    }

    /// Copies the active configuration to the model.
    pub(super) fn learn_configuration(&mut self) -> Result<()> {
        let config = self.tables.config()?;
        self.model.flows_per_endpoint = config.flows_per_endpoint;
        self.model.hz = config.hz;
        self.model.lifetimes = Lifetimes {
            tcp_new: config.tcp_new,
            tcp_established: config.tcp_established,
            tcp_closing: config.tcp_closing,
            other_new: config.other_new,
            udp_replied: config.udp_replied,
            udp_established: config.udp_established,
            sctp_established: config.sctp_established,
            other_established: config.other_established,
        };
        Ok(())
    }

    /// Resets the number of opened flows of every endpoint.
    pub fn clear_shares(&mut self) -> Result<()> {
        self.tables.clear_shares()?;
        self.model.opened.clear();
        Ok(())
    }

    /// Advances the age of all entries by ticks.
    pub fn age(&mut self, ticks: u32) -> Result<()> {
        self.tables.age(ticks.into())?;
        self.model.age(ticks.into());
        Ok(())
    }

    /// Evicts one direction of a flow, as a full table does.
    pub fn evict(&mut self, flow: &Flow) -> Result<()> {
        self.tables.evict(flow)?;
        self.model
            .flows
            .remove(&key_of(*flow).0)
            .context("a flow that is known")?;
        Ok(())
    }

    /// Clears the tables that packets fill.
    pub fn flush(&mut self) -> Result<()> {
        self.tables.flush()?;
        self.model.flows.clear();
        self.model.fragments.clear();
        self.model.world.services.last.clear();
        Ok(())
    }
}

fn port_row(ports: u32, row: &PortRow) -> (PortKey, PortValue) {
    let (port, bits) = row.port;
    let prefix_length = match row.protocol {
        None => PREFIX_ANY_PROTOCOL,
        Some(_) => PREFIX_ANY_PORT + bits,
    };
    let key = PortKey {
        prefix_length,
        data: PortData {
            ports: ports.to_be_bytes(),
            protocol: row.protocol.unwrap_or(0),
            zero: 0,
            port: port.to_be_bytes(),
        },
    };
    let value = PortValue {
        ordinal: row.ordinal,
        allow: row.allow.into(),
    };
    (key, value)
}

fn address_key(front: &Front) -> AddressKey {
    AddressKey {
        network: front.0,
        address: from_ip(front.1),
    }
}
