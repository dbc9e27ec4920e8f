//! Takes what an attach needs (addresses, endpoint numbers, a pair made ahead) and records it, all or nothing.

use std::sync::Arc;

use ipnet::IpNet;
use kni_common::IFINDEX_BASE;
use kni_ipam::{IpamError, Lease};
use kni_model::{AttachRequest, Attachment, IfName, InterfaceKind, MacAddr, NetworkSpec, Phase, Sandbox};
use kni_netlink::Netns;
use kni_store::{Change, NamespaceRecord, WarmInterface};

use super::{
    AttachError, Inner, host_ports,
    plan::{self, PlannedInterface},
    provider::{self, Offers},
    state::State,
};

impl Inner {
    /// Leases addresses and endpoint numbers and records the sandbox as Pending, all or nothing.
    pub(super) fn reserve(
        &self,
        request: &AttachRequest,
        netns: &Netns,
        offers: &Offers,
    ) -> Result<Sandbox, AttachError> {
        let mut state = self.state();
        // Again, under the lock that the networks change under.
        let planned = plan::plan(request, &state.networks)?;
        host_ports::refuse_taken(&state, request)?;
        let namespace = state.namespace_of(netns.id()).cloned();
        let first_is_pair = planned.first().is_some_and(|plan| plan.network.spec.provider.is_ebpf());
        let mut warm = namespace
            .as_ref()
            .filter(|_| first_is_pair)
            .and_then(|record| record.warm.clone());
        let uses_warm = warm.is_some();
        let mut attachments: Vec<Attachment> = Vec::new();
        for plan in &planned {
            let kind = provider::kind_of(&state, self, request, plan, offers);
            let reserved = kind.and_then(|kind| reserve_one(&mut state, request, plan, kind, warm.take()));
            match reserved {
                Ok(attachment) => attachments.push(attachment),
                Err(error) => {
                    give_back(&mut state, &attachments, uses_warm);
                    return Err(error);
                }
            }
        }
        if let Some(primary) = attachments.first_mut() {
            primary.bandwidth = request.bandwidth;
        }
        let sandbox = Sandbox {
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
        };
        let taken = namespace
            .filter(|_| uses_warm)
            .map(|record| NamespaceRecord { warm: None, ..record });
        let mut change = Change::new().sandbox(&sandbox);
        if let Some(record) = &taken {
            change = change.namespace(record);
        }
        if let Err(error) = self.commit(change) {
            give_back(&mut state, &sandbox.attachments, uses_warm);
            return Err(error);
        }
        if let Some(record) = taken {
            state.namespaces.insert(record.path.clone(), record);
        }
        state.sandboxes.insert(sandbox.id.clone(), Arc::new(sandbox.clone()));
        Ok(sandbox)
    }
}

fn reserve_one(
    state: &mut State,
    request: &AttachRequest,
    plan: &PlannedInterface,
    kind: InterfaceKind,
    warm: Option<WarmInterface>,
) -> Result<Attachment, AttachError> {
    let spec = &plan.network.spec;
    let owner = format!("pod {} (sandbox {})", request.pod, request.sandbox);
    let Lease { ipv4, ipv6 } = if kind.is_leased() {
        let lease = state.ipam.lease(&spec.name, &owner, &plan.ips);
        lease.map_err(|error| ipam_error(request, error))?
    } else {
        Lease { ipv4: None, ipv6: None }
    };
    let is_pair = kind.is_ebpf();
    let (own_mac, host_ifname) = made_of(&kind, &plan.ifname);
    let attachment = Attachment {
        endpoint: kni_model::EndpointId(0),
        network: spec.name.clone(),
        network_id: plan.network.id,
        ifname: plan.ifname.clone(),
        ifindex: 0,
        host_ifname,
        host_ifindex: 0,
        mac: plan.mac.or(own_mac).unwrap_or_else(super::interface::random_mac),
        host_mac: super::interface::random_mac(),
        ipv4,
        ipv6,
        mtu: spec.mtu,
        default_route: plan.default_route,
        host_access: spec.default && is_pair,
        routes: reached(spec, ipv4.is_some(), ipv6.is_some()),
        xdp: spec.xdp,
        kind,
        bandwidth: kni_model::Bandwidth::default(),
    };
    let placed = match warm {
        Some(warm) => Some(Attachment {
            endpoint: warm.endpoint,
            ifindex: warm.ifindex,
            host_ifname: warm.host_ifname,
            host_ifindex: warm.host_ifindex,
            mac: plan.mac.unwrap_or(warm.mac),
            host_mac: warm.host_mac,
            ..attachment
        }),
        // The number alone: it has no host end of ours.
        None if !is_pair => state.slots.take().map(|endpoint| Attachment { endpoint, ..attachment }),
        None => state.slots.take().and_then(|endpoint| {
            Some(Attachment {
                endpoint,
                host_ifname: super::interface::host_ifname(endpoint)?,
                host_ifindex: IFINDEX_BASE + endpoint.0,
                ..attachment
            })
        }),
    };
    placed.ok_or_else(|| {
        if ipv4.is_some() || ipv6.is_some() {
            state.ipam.release(&spec.name, ipv4, ipv6);
        }
        AttachError::EndpointsExhausted {
            pod: request.pod.clone(),
            sandbox: request.sandbox.clone(),
            capacity: state.slots.capacity(),
        }
    })
}

/// What a pod reaches through an interface of a network, beside the default routes: of the families it has.
fn reached(spec: &NetworkSpec, ipv4: bool, ipv6: bool) -> Vec<IpNet> {
    let all = spec.subnets.iter().chain(&spec.service_subnets).map(IpNet::trunc);
    all.filter(|net| if net.addr().is_ipv4() { ipv4 } else { ipv6 })
        .collect()
}

/// The MAC address that a kind brings with it, and what its interface is made of.
fn made_of(kind: &InterfaceKind, ifname: &IfName) -> (Option<MacAddr>, IfName) {
    match kind {
        InterfaceKind::Macvlan(macvlan) => (None, macvlan.parent.clone()),
        InterfaceKind::HostDevice(lent) => (Some(lent.mac), lent.device.clone()),
        InterfaceKind::Veth | InterfaceKind::Tap(_) | InterfaceKind::Cni(_) => (None, ifname.clone()),
    }
}

/// Returns what `reserve` took; the warm interface, if it was the first, stays with its namespace.
fn give_back(state: &mut State, attachments: &[Attachment], first_is_warm: bool) {
    for (index, attachment) in attachments.iter().enumerate() {
        state
            .ipam
            .release(&attachment.network, attachment.ipv4, attachment.ipv6);
        if !(first_is_warm && index == 0) {
            state.slots.free(attachment.endpoint);
        }
    }
}

fn ipam_error(request: &AttachRequest, error: IpamError) -> AttachError {
    let (pod, sandbox) = (request.pod.clone(), request.sandbox.clone());
    let reason = error.to_string();
    match error {
        IpamError::UnknownNetwork { network } => AttachError::UnknownNetwork { pod, network },
        IpamError::Exhausted { network, .. } => AttachError::AddressesExhausted {
            pod,
            sandbox,
            network,
            reason,
        },
        IpamError::AddressInUse { network, .. } => AttachError::AddressUnavailable {
            pod,
            sandbox,
            network,
            reason,
            in_use: true,
        },
        IpamError::AddressNotInNetwork { network, .. } | IpamError::TooManyAddresses { network, .. } => {
            AttachError::AddressUnavailable {
                pod,
                sandbox,
                network,
                reason,
                in_use: false,
            }
        }
    }
}
