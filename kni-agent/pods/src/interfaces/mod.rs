//! Makes, checks, adopts and removes the interfaces of attachments: one provider for each kind.

mod bandwidth;
mod context;
mod device;
mod dismantle;
mod ends;
mod macvlan;
mod offers;
mod plain;
mod plugin_veth;
mod plugins;
mod presence;
mod repair;
pub(crate) mod source_routing;
mod tap;
mod veth;
mod xdp;

use std::sync::Arc;

use kni_model::{AttachRequest, Attachment, InterfaceKind, Provider, Sandbox, error_chain};
use kni_netlink::Netns;
use kni_plugins::Plugins;

pub use self::presence::{host_end_exists, problems_without_row};
pub(crate) use self::{
    context::{Attempt, Build, Link},
    device::return_all,
    dismantle::{DismantleError, remove_inside},
    ends::{Ends, deferred_removal},
    offers::Offers,
    plugins::NO_BACKEND,
    presence::{exists, is_on_host},
    veth::{PREWARMED_MTU, Pair, make_pair},
};
use crate::{
    error::{AttachError, Subject},
    kernel::Kernel,
    plan::PlannedInterface,
    registry::{Registry, State},
};

/// The providers.
pub(crate) struct Interfaces {
    kernel: Arc<Kernel>,
    plugins: Option<Plugins>,
}

impl Interfaces {
    pub(crate) fn new(kernel: &Arc<Kernel>, plugins: Option<Plugins>) -> Self {
        Self {
            kernel: Arc::clone(kernel),
            plugins,
        }
    }

    /// Collects the providers' offers for a request. Changes nothing.
    pub(crate) async fn offers(
        &self,
        attempt: Attempt<'_>,
        planned: &[PlannedInterface],
    ) -> Result<Offers, AttachError> {
        let mut offers = Offers::default();
        for (position, plan) in planned.iter().enumerate() {
            match &plan.network.spec.provider {
                Provider::HostDevice(devices) => {
                    for device in &devices.devices {
                        let found = device::offer(&self.kernel, device).await;
                        offers.devices.insert(device.clone(), found);
                    }
                }
                Provider::Cni(source) => {
                    let offered = plugins::offer(self.plugins.as_ref(), attempt, plan, position, source).await?;
                    offers.calls.insert(plan.ifname.clone(), offered);
                }
                Provider::Ebpf | Provider::Macvlan(_) | Provider::Tap(_) => {}
            }
        }
        Ok(offers)
    }

    /// Sets loopback up. Idempotent.
    pub(crate) async fn set_loopback_up(&self, netns: &Netns, subject: &Subject) -> Result<(), AttachError> {
        let inside = context::enter(netns, subject).await?;
        let set = inside.set_loopback_up().await;
        set.map_err(subject.failed("setting the loopback interface up"))
    }

    /// Refuses interface names that the namespace already has, for every planned interface that `checked` selects.
    pub(crate) async fn refuse_taken_names(
        &self,
        attempt: Attempt<'_>,
        planned: &[PlannedInterface],
        checked: impl Fn(&PlannedInterface) -> bool,
    ) -> Result<(), AttachError> {
        let Attempt {
            request,
            netns,
            subject,
        } = attempt;
        let checked: Vec<&PlannedInterface> = planned.iter().filter(|plan| checked(plan)).collect();
        if checked.is_empty() {
            return Ok(());
        }
        let inside = context::enter(netns, subject).await?;
        for plan in checked {
            let present = inside.get_link(&plan.ifname).await;
            if present.map_err(subject.failed("looking for the interface"))?.is_some() {
                let (path, ifname) = (request.netns.display(), &plan.ifname);
                return Err(subject.conflict(format!("network namespace {path} has an interface {ifname} already")));
            }
        }
        Ok(())
    }

    /// The kind of a planned interface, as its record has it before it is made.
    pub(crate) fn kind_of(
        &self,
        state: &State,
        request: &AttachRequest,
        plan: &PlannedInterface,
        offers: &Offers,
    ) -> Result<InterfaceKind, AttachError> {
        match &plan.network.spec.provider {
            Provider::Ebpf => Ok(InterfaceKind::Veth),
            Provider::Macvlan(macvlan) => Ok(InterfaceKind::Macvlan(macvlan.clone())),
            Provider::Tap(tap) => Ok(InterfaceKind::Tap(tap.clone())),
            Provider::HostDevice(devices) => device::choose(state, request, plan, devices, offers),
            Provider::Cni(_) => plugins::record(self.plugins.as_ref(), request, plan, offers),
        }
    }

    /// Makes the interface of an attachment. One with the agent's own datapath carries packets after [`Self::publish`].
    pub(crate) async fn make(&self, build: &Build<'_>, attachment: &mut Attachment) -> Result<(), AttachError> {
        let kernel = &*self.kernel;
        match attachment.kind.clone() {
            InterfaceKind::Veth => veth::make(kernel, build, attachment).await,
            InterfaceKind::Macvlan(macvlan) => macvlan::make(kernel, build, &macvlan, attachment).await,
            InterfaceKind::HostDevice(moved) => device::make(kernel, build, &moved, attachment).await,
            InterfaceKind::Tap(tap) => tap::make(build, &tap, attachment).await,
            InterfaceKind::Cni(interface) => {
                plugins::make(kernel, self.plugins.as_ref(), build, interface, attachment).await
            }
        }
    }

    /// Writes the rows of the interfaces with the agent's own datapath, whose traffic begins with that (I1). Their
    /// policies must be enforced.
    pub(crate) fn publish(&self, attachments: &[Attachment], subject: &Subject) -> Result<(), AttachError> {
        for attachment in attachments.iter().filter(|made| made.kind.is_ebpf()) {
            veth::publish(&self.kernel, attachment, subject)?;
        }
        Ok(())
    }

    /// Attaches the programs to the host end that plugins made.
    pub(crate) async fn attach_plugin_veth(
        &self,
        attachment: &Attachment,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        plugin_veth::attach(&self.kernel, attachment, subject).await
    }

    /// Removes an interface, as far as its addresses require it before they are free.
    pub(crate) async fn dismantle(&self, sandbox: &Sandbox, attachment: &Attachment) -> Result<(), DismantleError> {
        dismantle::dismantle(&self.kernel, sandbox, attachment).await
    }

    /// Takes over an interface of an earlier agent. Problems of one do not stop the others: they stay visible in its
    /// health.
    pub(crate) async fn adopt(&self, sandbox: &Sandbox, attachment: &Attachment) {
        if !exists(sandbox, attachment) {
            tracing::warn!(pod = %sandbox.pod, sandbox = %sandbox.id, ifname = %attachment.host_ifname,
                "its interface is gone; waiting for the client to detach it");
            if let Err(error) = self.kernel.dataplane.withdraw(attachment.endpoint) {
                tracing::warn!(sandbox = %sandbox.id, error = error_chain(&error), "cannot withdraw it");
            }
            return;
        }
        match &attachment.kind {
            InterfaceKind::Veth => veth::adopt(&self.kernel, attachment, &Subject::from(sandbox)).await,
            InterfaceKind::Cni(interface) if interface.veth => {
                if let Err(error) = plugin_veth::adopt(&self.kernel, attachment) {
                    tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, ifname = %attachment.host_ifname,
                        error = error_chain(&error), "cannot adopt the interface that a plugin made");
                }
            }
            // These kinds do not depend on the agent.
            InterfaceKind::Macvlan(_)
            | InterfaceKind::HostDevice(_)
            | InterfaceKind::Tap(_)
            | InterfaceKind::Cni(_) => {}
        }
    }

    /// Runs the plugins' delete for interfaces that are in no record.
    pub(crate) async fn delete_unrecorded(&self, registry: &Registry) {
        if let Some(plugins) = &self.plugins {
            plugins::delete_unrecorded(plugins, registry).await;
        }
    }

    /// Restores devices that fell back to the node and are in no record.
    pub(crate) async fn return_strays(&self, registry: &Registry) -> Result<(), AttachError> {
        let returned = device::return_strays(&self.kernel, registry).await;
        returned.map_err(Subject::node().failed("returning devices"))
    }
}
