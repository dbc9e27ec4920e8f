//! The seam between attachments and who makes their interfaces: offer, make, check and take away, by kind.

mod device;
mod guard;
mod macvlan;
mod plugins;
mod tap;

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use ipnet::IpNet;
use kni_model::{
    AttachRequest, Attachment, IfName, InterfaceKind, MacAddr, NetworkName, Provider, Sandbox, provider::LentDevice,
};
use kni_netlink as netlink;
use kni_netlink::{InterfaceFacts, Netlink, Netns, PlainConfig};
use kni_plugins::{Call, Configuration};

pub(super) use self::device::return_all;
use super::{
    AttachError, Inner,
    error::{Subject, chain},
    plan::PlannedInterface,
    state::State,
};

/// What providers have for a request: looked up before the state is locked, used under the lock and after it.
#[derive(Debug, Default)]
pub(super) struct Offers {
    /// Devices of the node, or why each cannot be lent.
    devices: BTreeMap<IfName, Result<LentDevice, String>>,
    /// What plugins are to be told, by interface.
    calls: BTreeMap<IfName, (Configuration, Call)>,
}

/// Whether the interface of an attachment is still there: its host end under its own name and index, or for kinds
/// without one, the interface inside the pod. One system call for the former, about 0.1 ms for the latter.
pub(super) fn exists(sandbox: &Sandbox, attachment: &Attachment) -> bool {
    attachment.kind.is_ebpf() && netlink::host_link_exists(&attachment.host_ifname, attachment.host_ifindex)
        || !attachment.kind.is_ebpf() && facts(sandbox, attachment).is_some()
}

/// What is wrong with an interface that has no row in the dataplane.
pub(super) fn problems(sandbox: &Sandbox, attachment: &Attachment) -> Vec<String> {
    let Attachment { ifname, kind, .. } = attachment;
    let Some(facts) = facts(sandbox, attachment) else {
        return vec![format!("interface {ifname} does not exist in the pod")];
    };
    let mut problems = Vec::new();
    if !facts.up {
        problems.push(format!("interface {ifname} is down"));
    }
    // The guest of a tap device has the addresses.
    if !matches!(kind, InterfaceKind::Tap(_)) {
        let missing = attachment
            .addresses()
            .filter(|address| !facts.addresses.contains(address));
        problems.extend(missing.map(|address| format!("interface {ifname} does not have address {address}")));
    }
    if kind.is_plugins() && !netlink::host_link_exists(&attachment.host_ifname, attachment.host_ifindex) {
        problems.push(format!("host interface {} does not exist", attachment.host_ifname));
    }
    problems
}

fn facts(sandbox: &Sandbox, attachment: &Attachment) -> Option<InterfaceFacts> {
    let inside = netlink::look_inside(&sandbox.netns, sandbox.netns_identity)?;
    inside
        .into_iter()
        .find(|facts| facts.name == attachment.ifname.as_str())
}

impl Inner {
    /// Asks the providers of a request what they have. Changes nothing.
    pub(super) async fn offers(
        &self,
        request: &AttachRequest,
        planned: &[PlannedInterface],
        netns: &Netns,
        subject: &Subject,
    ) -> Result<Offers, AttachError> {
        let mut offers = Offers::default();
        for (position, plan) in planned.iter().enumerate() {
            match &plan.network.spec.provider {
                Provider::Ebpf => continue,
                Provider::HostDevice(devices) => {
                    for device in &devices.devices {
                        let found = self.lendable(device).await;
                        offers.devices.insert(device.clone(), found);
                    }
                }
                Provider::Cni(source) => {
                    let prepared = self.prepare_call(request, plan, position, source).await?;
                    offers.calls.insert(plan.ifname.clone(), prepared);
                }
                Provider::Macvlan(_) | Provider::Tap(_) => {}
            }
            // What is undone is found by its name inside: it must not be somebody else's.
            self.refuse_taken_name(request, netns, &plan.ifname, subject).await?;
        }
        Ok(offers)
    }

    async fn refuse_taken_name(
        &self,
        request: &AttachRequest,
        netns: &Netns,
        ifname: &IfName,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let inside = self.enter(netns, subject).await?;
        let present = inside.get_link(ifname).await;
        match present.map_err(subject.failed("looking for the interface"))? {
            None => Ok(()),
            Some(_) => Err(AttachError::Conflict {
                pod: request.pod.clone(),
                sandbox: request.sandbox.clone(),
                reason: format!(
                    "network namespace {} has an interface {ifname} already",
                    request.netns.display()
                ),
            }),
        }
    }

    /// Makes the interface of an attachment that is no veth pair of ours.
    pub(super) async fn make(
        &self,
        sandbox: &Sandbox,
        attachment: &mut Attachment,
        netns: &Netns,
        offers: &Offers,
        metric: u32,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        match attachment.kind.clone() {
            // Made by its own path, which is older and faster.
            InterfaceKind::Veth => Ok(()),
            InterfaceKind::Macvlan(macvlan) => self.make_macvlan(&macvlan, attachment, netns, metric, subject).await,
            InterfaceKind::HostDevice(lent) => self.lend(&lent, attachment, netns, metric, subject).await,
            InterfaceKind::Tap(tap) => self.make_tap(&tap, attachment, netns, subject).await,
            InterfaceKind::Cni(interface) => {
                self.run_plugins(sandbox, interface, attachment, netns, offers, subject)
                    .await
            }
        }
    }

    /// Takes an interface away, as far as that must be done before its addresses are free: all of it, but for a veth
    /// pair of ours, which the reaper deletes later. Idempotent; tells what stands in the way.
    pub(super) async fn dismantle(&self, sandbox: &Sandbox, attachment: &Attachment) -> Result<(), String> {
        if attachment.kind.is_ebpf() || matches!(attachment.kind, InterfaceKind::Cni(_)) {
            self.stop_traffic(attachment)?;
        }
        dismantle_inside(&self.home, &self.teardown_netlink, sandbox, attachment).await?;
        self.end_guard(attachment)
    }

    /// Addresses and routes of an interface on a link that others share.
    async fn configure_plain(
        &self,
        attachment: &Attachment,
        inside: &Netlink,
        metric: u32,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let (subnets, gateways) = {
            let state = self.state();
            let spec = state.networks.get(&attachment.network).map(|known| &known.network.spec);
            spec.map(|spec| (spec.subnets.clone(), spec.provider.gateways().to_vec()))
                .unwrap_or_default()
        };
        let on_link = |address: IpAddr| {
            let subnet = subnets.iter().find(|subnet| subnet.contains(&address));
            subnet.map_or(IpNet::from(address), |subnet| {
                IpNet::new(address, subnet.prefix_len()).unwrap_or(IpNet::from(address))
            })
        };
        let has_family = |gateway: &IpAddr| attachment.addresses().any(|ip| ip.is_ipv4() == gateway.is_ipv4());
        let gateways = gateways
            .into_iter()
            .filter(|gateway| attachment.default_route && has_family(gateway));
        let config = PlainConfig {
            ifindex: attachment.ifindex,
            mtu: attachment.mtu,
            addresses: attachment.addresses().map(on_link).collect(),
            gateways: gateways.collect(),
            route_metric: metric,
        };
        inside
            .configure_plain(&config)
            .await
            .map_err(subject.failed("configuring the pod interface"))
    }

    async fn enter(&self, netns: &Netns, subject: &Subject) -> Result<Netlink, AttachError> {
        Netlink::in_namespace(netns)
            .await
            .map_err(subject.failed("entering the network namespace"))
    }
}

/// What [`Inner::dismantle`] does without the dataplane, for an agent that runs and for one that does not.
pub(super) async fn dismantle_inside(
    home: &Netns,
    netlink: &Netlink,
    sandbox: &Sandbox,
    attachment: &Attachment,
) -> Result<(), String> {
    let kind = &attachment.kind;
    if kind.is_ebpf() {
        return Ok(());
    }
    let netns = find_namespace(sandbox).await;
    match kind {
        InterfaceKind::Veth => Ok(()),
        InterfaceKind::Cni(interface) => plugins::undo(interface, netns.as_ref()).await,
        InterfaceKind::HostDevice(lent) => device::bring_back(home, netlink, lent, netns.as_ref())
            .await
            .map_err(|error| format!("device {}: {error}", lent.device)),
        InterfaceKind::Macvlan(macvlan) => {
            // One with the whole parent for itself has the parent's address.
            let mac = (macvlan.mode != kni_model::provider::MacvlanMode::Passthru).then_some(attachment.mac);
            delete_inside(netns.as_ref(), attachment, "macvlan", mac).await
        }
        InterfaceKind::Tap(_) => delete_inside(netns.as_ref(), attachment, "tun", None).await,
    }
}

/// With its namespace it is gone as well.
async fn delete_inside(
    netns: Option<&Netns>,
    attachment: &Attachment,
    kind: &str,
    mac: Option<MacAddr>,
) -> Result<(), String> {
    let Some(netns) = netns else { return Ok(()) };
    let delete = async {
        let inside = Netlink::in_namespace(netns).await?;
        inside.delete_if(attachment.ifname.as_str(), kind, mac).await
    };
    match delete.await {
        Ok(_was_there) => Ok(()),
        Err(error) => Err(chain(&error)),
    }
}

/// The namespace of a sandbox, by its path or, where that is gone already, by a process that lives in it.
async fn find_namespace(sandbox: &Sandbox) -> Option<Netns> {
    let (path, wanted) = (sandbox.netns.clone(), sandbox.netns_identity);
    let found = tokio::task::spawn_blocking(move || {
        let open = |path: &Path| netlink::netns::open(path).ok().filter(|netns| netns.id() == wanted);
        open(&path).or_else(|| {
            let processes = std::fs::read_dir("/proc").ok()?;
            let mut paths = processes
                .filter_map(Result::ok)
                .map(|entry| entry.path().join("ns/net"));
            paths.find_map(|path| open(&path))
        })
    });
    found.await.ok().flatten()
}

/// What the record of an interface says before it is made.
pub(super) fn kind_of(
    state: &State,
    inner: &Inner,
    request: &AttachRequest,
    plan: &PlannedInterface,
    offers: &Offers,
) -> Result<InterfaceKind, AttachError> {
    match &plan.network.spec.provider {
        Provider::Ebpf => Ok(InterfaceKind::Veth),
        Provider::Macvlan(macvlan) => Ok(InterfaceKind::Macvlan(macvlan.clone())),
        Provider::Tap(tap) => Ok(InterfaceKind::Tap(tap.clone())),
        Provider::HostDevice(devices) => device::choose(state, request, plan, devices, offers),
        Provider::Cni(_) => plugins::record(inner, request, plan, offers),
    }
}

/// A provider cannot do its part for a pod.
fn refused(request: &AttachRequest, network: &NetworkName, reason: String, again: bool) -> AttachError {
    AttachError::Provider {
        pod: request.pod.clone(),
        sandbox: request.sandbox.to_string(),
        network: network.clone(),
        reason,
        again,
    }
}

/// As [`refused`], once the sandbox is recorded.
fn failed(subject: &Subject, attachment: &Attachment, reason: String, again: bool) -> AttachError {
    AttachError::Provider {
        pod: subject.pod.clone(),
        sandbox: subject.sandbox.clone(),
        network: attachment.network.clone(),
        reason,
        again,
    }
}
