//! Interfaces that CNI plugins make: what they are told, and what of their answer the rest of the agent knows.

use std::net::IpAddr;

use kni_model::{
    AttachRequest, Attachment, InterfaceKind, Provider, Sandbox,
    provider::{CniInterface, CniSource},
};
use kni_netlink::{Link, Netns};
use kni_plugins as cni;
use kni_plugins::{Call, CniError, Configuration, Outcome};

use super::{Offers, PlannedInterface, Subject, failed, refused};
use crate::{AttachError, Inner, error::chain};

const NO_BACKEND: &str = "provider CNI needs an agent that runs with --cni-backend";

impl Inner {
    /// What the plugins of a planned interface will be told. Reads the configuration.
    pub(super) async fn prepare_call(
        &self,
        request: &AttachRequest,
        plan: &PlannedInterface,
        position: usize,
        source: &CniSource,
    ) -> Result<(Configuration, Call), AttachError> {
        let network = &plan.network.spec.name;
        let plugins = self.options.plugins.clone();
        let plugins = plugins.ok_or_else(|| refused(request, network, NO_BACKEND.to_owned(), false))?;
        let source = source.clone();
        let found = tokio::task::spawn_blocking(move || plugins.find(&source)).await;
        let configuration = found
            .map_err(|ended| crate::error::ended(&ended))?
            .map_err(|error| refused(request, network, chain(&error), error.is_transient()))?;
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

    pub(super) async fn run_plugins(
        &self,
        sandbox: &Sandbox,
        mut interface: CniInterface,
        attachment: &mut Attachment,
        netns: &Netns,
        offers: &Offers,
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let prepared = offers.calls.get(&attachment.ifname).zip(self.options.plugins.as_ref());
        let Some(((configuration, call), plugins)) = prepared else {
            return Err(failed(subject, attachment, NO_BACKEND.to_owned(), false));
        };
        tracing::debug!(pod = %sandbox.pod, sandbox = %sandbox.id, configuration = configuration.name(), "running plugins");
        let told = plugins.add(&interface.cached, configuration, call).await;
        let outcome =
            told.map_err(|error: CniError| failed(subject, attachment, chain(&error), error.is_transient()))?;
        let inside = self.enter(netns, subject).await?;
        let step = "looking at what plugins made";
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
                failed(subject, attachment, reason, false)
            })?;
        if !attachment.default_route {
            inside
                .remove_default_routes(link.ifindex)
                .await
                .map_err(subject.failed("leaving the default route to another interface"))?;
        }
        let host = self.host_end(&link, netns).await.map_err(subject.failed(step))?;
        note(attachment, &mut interface, &outcome, &link, host.as_ref());
        attachment.kind = InterfaceKind::Cni(interface);
        refuse_other_addresses(call, attachment, subject)
    }

    /// The other end of a veth, if that is on the node.
    async fn host_end(&self, link: &Link, netns: &Netns) -> kni_netlink::Result<Option<Link>> {
        let Some(peer) = link.peer_ifindex.filter(|_| link.veth) else {
            return Ok(None);
        };
        let Some(host) = self.netlink.get_link(peer).await? else {
            return Ok(None);
        };
        // An index means one interface in each namespace.
        let is_peer = host.veth && host.peer_ifindex == Some(link.ifindex) && host.peer_netnsid.is_some();
        let there = self.netlink.netns_id(netns).await?;
        Ok(Some(host).filter(|host| is_peer && host.peer_netnsid == there))
    }
}

/// What the record says before the first plugin runs.
pub(super) fn record(
    inner: &Inner,
    request: &AttachRequest,
    plan: &PlannedInterface,
    offers: &Offers,
) -> Result<InterfaceKind, AttachError> {
    let network = &plan.network.spec.name;
    let prepared = offers.calls.get(&plan.ifname).zip(inner.options.plugins.as_ref());
    let Some(((configuration, _), plugins)) = prepared else {
        return Err(refused(
            request,
            network,
            "it became one of plugins just now".to_owned(),
            true,
        ));
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

/// Takes the facts from the kernel where it has them, from the plugins where it has not.
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
    interface.addresses = outcome.addresses.iter().map(|told| told.address).collect();
    interface.gateways = outcome.addresses.iter().filter_map(|told| told.gateway).collect();
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

/// Plugins that do not declare the capability `ips` give what they like.
fn refuse_other_addresses(call: &Call, attachment: &Attachment, subject: &Subject) -> Result<(), AttachError> {
    let InterfaceKind::Cni(interface) = &attachment.kind else {
        return Ok(());
    };
    let missing = call
        .ips
        .iter()
        .find(|wanted| !interface.addresses.iter().any(|given| given.addr() == **wanted));
    match missing {
        Some(address) => Err(AttachError::AddressUnavailable {
            pod: subject.pod.clone(),
            sandbox: subject
                .sandbox
                .parse()
                .map_err(|error: kni_model::InvalidId| failed(subject, attachment, error.to_string(), false))?,
            network: attachment.network.clone(),
            reason: format!("the plugins of {} do not give {address}", interface.configuration),
            in_use: false,
        }),
        None => Ok(()),
    }
}

/// Lets the plugins undo what they made.
pub(super) async fn undo(interface: &CniInterface, netns: Option<&Netns>) -> Result<(), String> {
    let path = netns.map(Netns::path);
    cni::delete(&interface.cached, path)
        .await
        .map_err(|error| chain(&error))
}

impl Inner {
    /// Undoes what plugins made for attachments that nobody remembers: the node was started anew, and what plugins keep
    /// is on disk. Goes on after errors.
    pub(crate) async fn undo_forgotten(&self) {
        let Some(plugins) = self.options.plugins.clone() else {
            return;
        };
        let entries = match plugins.entries() {
            Ok(entries) => entries,
            Err(error) => {
                tracing::error!(%error, "cannot read what plugins made");
                return;
            }
        };
        for entry in entries {
            let known = self
                .state()
                .attachments()
                .any(|(_, attachment)| match &attachment.kind {
                    InterfaceKind::Cni(interface) => interface.cached == entry,
                    InterfaceKind::Veth
                    | InterfaceKind::Macvlan(_)
                    | InterfaceKind::HostDevice(_)
                    | InterfaceKind::Tap(_) => false,
                });
            if known {
                continue;
            }
            tracing::info!(entry = %entry.display(), "undoing what plugins made for an attachment that is in no record");
            if let Err(error) = cni::delete(&entry, None).await {
                tracing::error!(%error, "cannot undo it yet");
            }
        }
    }

    /// Whether the plugins of a network can be run, and what they declare.
    pub(crate) fn plugin_readiness(
        &self,
        provider: &Provider,
    ) -> Option<Result<std::collections::BTreeSet<String>, String>> {
        let Provider::Cni(source) = provider else { return None };
        match &self.options.plugins {
            Some(plugins) => Some(plugins.readiness(source).map_err(|error| error.to_string())),
            None => Some(Err(NO_BACKEND.to_owned())),
        }
    }
}
