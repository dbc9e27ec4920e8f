//! Reserves the resources of an attach (addresses, endpoint numbers, a prewarmed pair) and records them, all or
//! nothing.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use kni_ipam::{IpamError, Lease, LeaseError};
use kni_model::{Attachment, Bandwidth, InterfaceKind, NetnsIdentity, NetworkSpec, Phase, Sandbox};
use kni_store::{Change, NamespaceRecord};

use super::{Sandboxes, host_ports};
use crate::{
    clock::since_boot,
    error::{AttachError, ErrorKind, Subject},
    interfaces::{Attempt, Ends, Offers},
    namespaces::bound,
    plan::{self, PlannedInterface},
    registry::{Locked, Slots},
    rests::lease_owner,
};

impl Sandboxes {
    /// Leases addresses and endpoint numbers and records the sandbox as Pending, in one transaction.
    pub(super) fn reserve(&self, attempt: Attempt<'_>, offers: &Offers) -> Result<Sandbox, AttachError> {
        let Attempt {
            request,
            netns,
            subject,
        } = attempt;
        let facts = self.joining_facts(request)?;
        let mut state = self.registry.lock();
        // Planned and authorized again, under the lock that also protects the networks: what is recorded was allowed.
        let planned = plan::plan(request, &state.networks)?;
        self.authorize(&state, &facts, request, &planned)?;
        let network = planned.first().map(|plan| &plan.network.spec.name);
        host_ports::refuse_tunnel(self.overlay_port, network, &request.port_mappings, subject)?;
        host_ports::refuse_taken(&state, request, subject)?;
        let fits = planned.first().is_some_and(PlannedInterface::fits_prewarmed);
        let namespace = state.namespace_of(netns.id()).cloned();
        let warm = namespace.as_ref().and_then(|record| record.warm.clone());
        let mut prewarmed = warm.filter(|_| fits).map(Ends::from);
        let mut reserved = Reserved {
            state: &mut state,
            attachments: Vec::new(),
            first_is_prewarmed: prewarmed.is_some(),
        };
        for plan in &planned {
            let kind = self.interfaces.kind_of(reserved.state, request, plan, offers);
            let added = kind.and_then(|kind| reserved.add(attempt, plan, kind, prewarmed.take()));
            if let Err(error) = added {
                reserved.give_back();
                return Err(error);
            }
        }
        if let Some(primary) = reserved.attachments.first_mut() {
            primary.bandwidth = request.bandwidth;
        }
        let sandbox = pending(attempt, reserved.attachments.clone());
        let first_is_prewarmed = reserved.first_is_prewarmed;
        let taken = namespace.map(|record| {
            let bound = bound(reserved.state, &request.sandbox, &record).unwrap_or(record);
            let warm = bound.warm.filter(|_| !first_is_prewarmed);
            NamespaceRecord { warm, ..bound }
        });
        let change = taken.iter().fold(Change::new().sandbox(&sandbox), Change::namespace);
        if let Err(error) = reserved.state.commit(change) {
            reserved.give_back();
            return Err(error);
        }
        if let Some(record) = taken {
            state.namespaces.insert(record.path.clone(), record);
        }
        state.sandboxes.insert(sandbox.id.clone(), Arc::new(sandbox.clone()));
        Ok(sandbox)
    }
}

fn pending(attempt: Attempt<'_>, attachments: Vec<Attachment>) -> Sandbox {
    let Attempt { request, netns, .. } = attempt;
    Sandbox {
        id: request.sandbox.clone(),
        pod: request.pod.clone(),
        phase: Phase::Pending,
        netns: request.netns.clone(),
        netns_identity: netns.id(),
        labels: request.labels.clone(),
        port_mappings: request.port_mappings.clone(),
        container_ports: request.container_ports.clone(),
        attachments,
        cni: request.cni.clone(),
        parent: request.parent.clone(),
    }
}

/// Reserved resources that are not recorded yet.
struct Reserved<'a, 'b> {
    state: &'a mut Locked<'b>,
    attachments: Vec<Attachment>,
    first_is_prewarmed: bool,
}

impl Reserved<'_, '_> {
    /// Reserves one interface.
    fn add(
        &mut self,
        attempt: Attempt<'_>,
        plan: &PlannedInterface,
        kind: InterfaceKind,
        prewarmed: Option<Ends>,
    ) -> Result<(), AttachError> {
        let Attempt { request, subject, .. } = attempt;
        let spec = &plan.network.spec;
        let Lease { ipv4, ipv6 } = if kind.is_leased() {
            let owner = lease_owner(&request.pod, &request.sandbox);
            let beside = self.addresses_in(attempt.netns.id());
            let ipam = &mut self.state.ipam;
            let lease = ipam.lease_beside(&beside, &spec.name, &owner, &plan.ips, since_boot());
            lease.map_err(|error| ipam_error(subject, plan.ips_field, error))?
        } else {
            Lease { ipv4: None, ipv6: None }
        };
        let new = |slots: &mut Slots| Some(Ends::of(&kind, &plan.ifname, slots.take()?));
        let Some(ends) = prewarmed.or_else(|| new(&mut self.state.slots)) else {
            let leased = ipv4.map(IpAddr::V4).into_iter().chain(ipv6.map(IpAddr::V6));
            self.state.return_unused(&spec.name, leased);
            let capacity = self.state.slots.capacity();
            self.state.hurry_removals();
            return Err(subject.error(ErrorKind::EndpointsExhausted { capacity }));
        };
        self.attachments.push(Attachment {
            endpoint: ends.endpoint,
            network: spec.name.clone(),
            definition: plan.definition.clone(),
            network_id: plan.network.id,
            ifname: plan.ifname.clone(),
            ifindex: ends.ifindex,
            host_ifname: ends.host_ifname,
            host_ifindex: ends.host_ifindex,
            mac: plan.mac.unwrap_or(ends.mac),
            host_mac: ends.host_mac,
            ipv4,
            ipv6,
            mtu: spec.mtu,
            default_route: plan.default_route,
            host_access: spec.default && kind.is_ebpf(),
            routes: reached(spec, ipv4.is_some(), ipv6.is_some()),
            xdp: spec.xdp,
            kind,
            bandwidth: Bandwidth::default(),
        });
        Ok(())
    }

    /// The addresses that the pod has by now.
    fn addresses_in(&self, netns: NetnsIdentity) -> Vec<IpAddr> {
        let attached = self.state.attachments();
        let attached = attached.filter(|(sandbox, _)| sandbox.netns_identity == netns);
        let attached = attached.map(|(_, attachment)| attachment);
        attached
            .chain(&self.attachments)
            .flat_map(Attachment::addresses)
            .collect()
    }

    /// Releases everything; a prewarmed pair, if it was the first, stays with its namespace.
    fn give_back(&mut self) {
        for (index, attachment) in self.attachments.iter().enumerate() {
            if attachment.kind.is_leased() {
                self.state.return_unused(&attachment.network, attachment.addresses());
            }
            if !(self.first_is_prewarmed && index == 0) {
                self.state.slots.free(attachment.endpoint);
            }
        }
    }
}

/// Destinations behind an interface of a network, in addition to the default routes, for its address families.
fn reached(spec: &NetworkSpec, ipv4: bool, ipv6: bool) -> Vec<IpNet> {
    let all = spec.subnets.iter().chain(&spec.service_subnets).map(IpNet::trunc);
    all.filter(|net| if net.addr().is_ipv4() { ipv4 } else { ipv6 })
        .collect()
}

fn ipam_error(subject: &Subject, field: &'static str, error: IpamError) -> AttachError {
    let reason = error.to_string();
    subject.error(match error {
        IpamError::UnknownNetwork { network } => ErrorKind::UnknownNetwork(network),
        IpamError::Exhausted { network, .. } => ErrorKind::AddressesExhausted {
            reason: format!(
                "{reason}; the pod is attached when another pod of the network leaves the node; more subnets in the \
                 PodNetwork's spec.subnets give more addresses"
            ),
            network,
        },
        // Nothing has to be done: the runtime repeats the call.
        IpamError::AllRest { network, .. } => ErrorKind::AddressesExhausted { network, reason },
        IpamError::AddressInUse { network, .. } | IpamError::AddressRests { network, .. } => {
            ErrorKind::AddressUnavailable {
                network,
                reason,
                in_use: true,
            }
        }
        IpamError::AddressNotInNetwork {
            network,
            address,
            reason: LeaseError::OtherNode,
        } => ErrorKind::AddressElsewhere {
            network,
            address,
            field,
            holder: None,
        },
        IpamError::AddressNotInNetwork { network, .. } | IpamError::TooManyAddresses { network, .. } => {
            ErrorKind::AddressUnavailable {
                network,
                reason,
                in_use: false,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt as _;
    use kni_model::NetworkName;
    use kni_netlink::Netns;
    use kni_store::Store;
    use tokio::sync::Notify;

    use super::*;
    use crate::registry::Registry;

    fn is_notified(notify: &Notify) -> bool {
        notify.notified().now_or_never().is_some()
    }

    #[test]
    fn an_attach_without_a_free_number_returns_its_address_and_hurries_removals() {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::new(Store::open(folder.path()).unwrap(), 1, false);
        let mut state = registry.lock();
        let (name, known) = plan::tests::known("main", 1, true, true);
        state.ipam.set_network(&known.network.spec);
        let address = "10.0.0.9".parse().unwrap();
        let plan = PlannedInterface {
            ifname: "eth0".parse().unwrap(),
            network: known.network,
            definition: None,
            ips: vec![address],
            ips_field: "kni.dev/ips",
            mac: None,
            default_route: true,
        };
        let request = plan::tests::request(None, &[]);
        let subject = Subject::from(&request);
        let attempt = Attempt {
            request: &request,
            netns: &Netns::current().unwrap(),
            subject: &subject,
        };
        let mut reserved = Reserved {
            state: &mut state,
            attachments: Vec::new(),
            first_is_prewarmed: false,
        };
        reserved.state.slots.take().unwrap();
        let refused = reserved.add(attempt, &plan, InterfaceKind::Veth, None).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::EndpointsExhausted { capacity: 1 }));
        assert!(is_notified(&registry.reaper) && is_notified(&registry.awaited));
        let another = state.ipam.lease(&name, "another pod", &[address], Duration::ZERO);
        assert_eq!(another.unwrap().ipv4.map(IpAddr::V4), Some(address));
    }

    #[test]
    fn an_address_outside_the_blocks_of_the_node_is_refused_with_its_field() {
        let network: NetworkName = "red".parse().unwrap();
        let of = |reason| IpamError::AddressNotInNetwork {
            network: network.clone(),
            address: IpAddr::from([10, 0, 0, 9]),
            reason,
        };
        let elsewhere = ipam_error(&Subject::node(), "kni.dev/ips", of(LeaseError::OtherNode));
        assert!(matches!(
            elsewhere.kind(),
            ErrorKind::AddressElsewhere {
                field: "kni.dev/ips",
                holder: None,
                ..
            }
        ));
        let never = ipam_error(&Subject::node(), "kni.dev/ips", of(LeaseError::Gateway));
        assert!(matches!(
            never.kind(),
            ErrorKind::AddressUnavailable { in_use: false, .. }
        ));
    }
}
