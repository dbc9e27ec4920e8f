//! Removes everything that the agent made from the node, with the agent stopped: recorded interfaces and those that
//! carry its marks.

use kni_model::{Sandbox, error_chain};
use kni_netlink::{self as netlink, Netlink, Netns};
use kni_store::Contents;

use crate::{
    error::{AttachError, Subject},
    interfaces::{deferred_removal, remove_inside, return_all, source_routing},
};

/// Removes interfaces, namespaces, routes and rules, recorded ones and those that carry the agent's marks. Pods lose
/// their interfaces. Succeeds when there is nothing.
pub async fn cleanup(contents: Contents) -> Result<(), AttachError> {
    let node = Subject::node();
    let netlink = Netlink::for_teardown().map_err(node.failed("connecting to rtnetlink"))?;
    remove_source_routing(&contents).await;
    remove_other_kinds(&contents, &netlink).await?;
    let recorded = recorded_links(&contents);
    let marked = netlink.list_our_links().await;
    let marked = marked.map_err(node.failed("listing interfaces"))?;
    let links: Vec<(u32, &str)> = recorded
        .iter()
        .map(|(index, name)| (*index, name.as_str()))
        .chain(marked.iter().map(|link| (link.ifindex, link.name.as_str())))
        .collect();
    let deleted = netlink.delete_links(&links).await;
    deleted.map_err(node.failed("deleting interfaces"))?;
    for record in &contents.namespaces {
        let removed = netlink::netns::remove(&record.path).await;
        removed.map_err(node.failed("removing a network namespace"))?;
    }
    let removed = netlink.remove_rules().await;
    removed.map_err(node.failed("removing routing rules"))?;
    let routes = netlink.list_our_routes().await;
    for route in routes.map_err(node.failed("listing routes"))? {
        let deleted = netlink.del_pod_route(route.destination.addr(), route.ifindex).await;
        deleted.map_err(node.failed("removing a route"))?;
    }
    Ok(())
}

/// Removes the rules by source address: those in namespaces of other owners would stay. The routes go with the
/// interfaces.
async fn remove_source_routing(contents: &Contents) {
    for sandbox in &contents.sandboxes {
        let attachments = sandbox.attachments.iter();
        let gone = attachments.filter_map(|attachment| source_routing::source_routing(attachment, None));
        if let Err(error) = source_routing::remove(sandbox, gone.collect()).await {
            tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, error = error_chain(&error),
                "cannot remove its rules by source address");
        }
    }
}

/// Removes interfaces other than veth pairs, while their namespaces still exist. A plugin that refuses delays no other
/// removal.
async fn remove_other_kinds(contents: &Contents, netlink: &Netlink) -> Result<(), AttachError> {
    let home = Netns::current().map_err(Subject::node().failed("opening the node's namespace"))?;
    for sandbox in &contents.sandboxes {
        for attachment in &sandbox.attachments {
            if let Err(error) = remove_inside(&home, netlink, sandbox, attachment).await {
                tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, ifname = %attachment.ifname, %error,
                    "cannot take an interface away");
            }
        }
    }
    let returned = return_all(netlink).await;
    returned.map_err(Subject::node().failed("returning devices"))
}

fn recorded_links(contents: &Contents) -> Vec<(u32, String)> {
    let removals = |sandbox: &Sandbox| {
        let attachments = sandbox.attachments.iter();
        let removals = attachments.filter_map(|attachment| deferred_removal(sandbox, attachment));
        removals.collect::<Vec<_>>()
    };
    let attached = contents.sandboxes.iter().flat_map(removals);
    let queued = attached.chain(contents.removals.iter().cloned());
    let queued = queued.map(|removal| (removal.host_ifindex, removal.host_ifname.to_string()));
    let prewarmed = contents.namespaces.iter().filter_map(|record| record.warm.as_ref());
    let prewarmed = prewarmed.map(|warm| (warm.host_ifindex, warm.host_ifname.to_string()));
    queued.chain(prewarmed).collect()
}
