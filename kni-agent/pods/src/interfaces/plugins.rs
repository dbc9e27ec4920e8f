//! Makes interfaces through CNI plugins: their calls, and the recorded parts of their results.

use std::net::IpAddr;

use kni_model::{
    AttachRequest, Attachment, InterfaceKind,
    provider::{CniInterface, CniSource},
};
use kni_netlink::{Link, Netns};
use kni_plugins::{self as plugins, Call, CniError, Configuration, Outcome, Plugins};

use super::{
    context::{Attempt, Build},
    offers::Offers,
};
use crate::{
    error::{AttachError, ErrorKind, Subject},
    kernel::Kernel,
    plan::PlannedInterface,
    registry::Registry,
};

/// Why most agents refuse networks of plugins.
pub(crate) const NO_BACKEND: &str = "provider CNI needs an agent that runs with --cni-backend";

/// The configuration and the call of a planned interface. Reads the configuration.
pub(super) async fn offer(
    plugins: Option<&Plugins>,
    attempt: Attempt<'_>,
    plan: &PlannedInterface,
    position: usize,
    source: &CniSource,
) -> Result<(Configuration, Call), AttachError> {
    let Attempt { request, subject, .. } = attempt;
    let network = &plan.network.spec.name;
    let plugins = plugins.cloned();
    let plugins = plugins.ok_or_else(|| subject.provider(network, NO_BACKEND, false))?;
    let source = source.clone();
    let found = tokio::task::spawn_blocking(move || plugins.find(&source)).await;
    let configuration = found
        .map_err(|ended| subject.ended(&ended))?
        .map_err(|error| refused(&error, |reason, retryable| subject.provider(network, reason, retryable)))?;
    let container = match &request.cni {
        Some(cni) => cni.container.clone(),
        None => request.sandbox.to_string(),
    };
    let call = Call {
        container,
        netns: request.netns.clone(),
        ifname: plan.ifname.clone(),
        pod: request.pod.clone(),
        port_mappings: if position == 0 {
            request.port_mappings.clone()
        } else {
            Vec::new()
        },
        ips: plan.ips.clone(),
        mac: plan.mac,
        hints: request.hints.clone(),
    };
    Ok((configuration, call))
}

fn refused(error: &CniError, refuse: impl FnOnce(String, bool) -> AttachError) -> AttachError {
    refuse(kni_model::error_chain(error), error.is_transient())
}

/// The record before the first plugin runs.
pub(super) fn record(
    plugins: Option<&Plugins>,
    request: &AttachRequest,
    plan: &PlannedInterface,
    offers: &Offers,
) -> Result<InterfaceKind, AttachError> {
    let network = &plan.network.spec.name;
    let Some(((configuration, _), plugins)) = offers.calls.get(&plan.ifname).zip(plugins) else {
        return Err(Subject::from(request).provider(network, "it became one of plugins just now", true));
    };
    Ok(InterfaceKind::Cni(CniInterface {
        configuration: configuration.name().to_owned(),
        cached: plugins.entry_path(network, &request.sandbox, &plan.ifname),
        addresses: Vec::new(),
        gateways: Vec::new(),
        routes: Vec::new(),
        veth: false,
    }))
}

pub(super) async fn make(
    kernel: &Kernel,
    plugins: Option<&Plugins>,
    build: &Build<'_>,
    mut interface: CniInterface,
    attachment: &mut Attachment,
) -> Result<(), AttachError> {
    let subject = build.subject;
    let offered = build.offers.calls.get(&attachment.ifname);
    let Some(((configuration, call), plugins)) = offered.zip(plugins) else {
        return Err(build.refused(attachment, NO_BACKEND, false));
    };
    tracing::debug!(pod = %subject.pod, sandbox = subject.sandbox, configuration = configuration.name(), "running plugins");
    let added = plugins.add(&interface.cached, configuration, call).await;
    let outcome =
        added.map_err(|error| refused(&error, |reason, retryable| build.refused(attachment, reason, retryable)))?;
    let inside = build.enter().await?;
    let step = "reading the interface that plugins made";
    inside.set_loopback_up().await.map_err(subject.failed(step))?;
    let link = inside
        .get_link(&attachment.ifname)
        .await
        .map_err(subject.failed(step))?
        .ok_or_else(|| {
            let reason = format!(
                "{}: its plugins made no interface {}",
                configuration.name(),
                attachment.ifname
            );
            build.refused(attachment, reason, false)
        })?;
    if !attachment.default_route {
        inside
            .remove_default_routes(link.ifindex)
            .await
            .map_err(subject.failed("leaving the default route to another interface"))?;
    }
    let host = host_end(kernel, &link, build.netns).await;
    let host = host.map_err(subject.failed(step))?;
    note(attachment, &mut interface, &outcome, &link, host.as_ref());
    let refused = refuse_other_addresses(subject, call, attachment, &interface);
    attachment.kind = InterfaceKind::Cni(interface);
    refused
}

/// The other end of a veth, if that is on the node.
async fn host_end(kernel: &Kernel, link: &Link, netns: &Netns) -> kni_netlink::Result<Option<Link>> {
    let Some(peer) = link.peer_ifindex.filter(|_| link.veth) else {
        return Ok(None);
    };
    let Some(host) = kernel.netlink.get_link(peer).await? else {
        return Ok(None);
    };
    // An index identifies an interface only within its namespace.
    let is_peer = host.veth && host.peer_ifindex == Some(link.ifindex) && host.peer_netnsid.is_some();
    let there = kernel.netlink.netns_id(netns).await?;
    Ok(Some(host).filter(|host| is_peer && host.peer_netnsid == there))
}

/// Records the kernel's values where the kernel has them, otherwise those of the plugins.
fn note(
    attachment: &mut Attachment,
    interface: &mut CniInterface,
    outcome: &Outcome,
    link: &Link,
    host: Option<&Link>,
) {
    attachment.ifindex = link.ifindex;
    attachment.mtu = link.mtu;
    attachment.mac = link.mac.or(outcome.mac).unwrap_or(attachment.mac);
    interface.addresses = outcome.addresses.iter().map(|given| given.address).collect();
    interface.gateways = outcome.addresses.iter().filter_map(|given| given.gateway).collect();
    interface.routes.clone_from(&outcome.routes);
    for address in &interface.addresses {
        match address.addr() {
            IpAddr::V4(v4) => attachment.ipv4 = attachment.ipv4.or(Some(v4)),
            IpAddr::V6(v6) => attachment.ipv6 = attachment.ipv6.or(Some(v6)),
        }
    }
    let named = host.and_then(|host| Some((host, host.name.parse().ok()?)));
    if let Some((host, name)) = named {
        interface.veth = true;
        attachment.host_ifname = name;
        attachment.host_ifindex = host.ifindex;
        attachment.host_mac = host.mac.unwrap_or(attachment.host_mac);
    }
}

/// Plugins that do not declare the capability `ips` ignore requested addresses.
fn refuse_other_addresses(
    subject: &Subject,
    call: &Call,
    attachment: &Attachment,
    interface: &CniInterface,
) -> Result<(), AttachError> {
    let given = |wanted: &&IpAddr| interface.addresses.iter().any(|given| given.addr() == **wanted);
    match call.ips.iter().find(|wanted| !given(wanted)) {
        Some(address) => Err(subject.error(ErrorKind::AddressUnavailable {
            network: attachment.network.clone(),
            reason: format!("the plugins of {} do not give {address}", interface.configuration),
            in_use: false,
        })),
        None => Ok(()),
    }
}

/// Runs the plugins' delete.
pub(super) async fn take_away(interface: &CniInterface, netns: Option<&Netns>) -> Result<(), CniError> {
    plugins::delete(&interface.cached, netns.map(Netns::path)).await
}

/// Runs the plugins' delete for interfaces that are in no record: the node restarted, and the state of plugins is on
/// disk. Continues after errors.
pub(crate) async fn delete_unrecorded(plugins: &Plugins, registry: &Registry) {
    let entries = match plugins.entries() {
        Ok(entries) => entries,
        Err(error) => {
            tracing::error!(%error, "cannot read the entries of plugin calls");
            return;
        }
    };
    for entry in entries {
        let has_it = |kind: &InterfaceKind| match kind {
            InterfaceKind::Cni(interface) => interface.cached == entry,
            InterfaceKind::Veth | InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) => {
                false
            }
        };
        let known = registry
            .lock()
            .attachments()
            .any(|(_, attachment)| has_it(&attachment.kind));
        if known {
            continue;
        }
        tracing::info!(entry = %entry.display(), "deleting a plugin interface that is in no record");
        if let Err(error) = plugins::delete(&entry, None).await {
            tracing::error!(%error, "cannot delete it yet");
        }
    }
}
