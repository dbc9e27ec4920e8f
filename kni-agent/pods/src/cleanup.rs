//! Removes everything of ours from the node, with the agent stopped: what the store tells and what carries our marks.

use kni_netlink as netlink;
use kni_netlink::{Netlink, Netns};
use kni_store::{Contents, Store};

use super::{
    AttachError,
    error::{chain, kernel_of_node},
    provider,
};

/// Removes interfaces, namespaces, routes and rules. Pods lose their interfaces. Succeeds when there is nothing.
pub async fn cleanup(store: Option<&Store>) -> Result<(), AttachError> {
    let contents = match store {
        Some(store) => store.load().map_err(|error| AttachError::Store(chain(&error)))?,
        None => Contents::default(),
    };
    let netlink = Netlink::for_teardown().map_err(|error| kernel_of_node("connecting to rtnetlink", &error))?;
    take_back(&contents, &netlink).await?;
    let recorded = recorded_links(&contents);
    let marked = netlink
        .list_our_links()
        .await
        .map_err(|error| kernel_of_node("listing interfaces", &error))?;
    let links: Vec<(u32, &str)> = recorded
        .iter()
        .map(|(index, name)| (*index, name.as_str()))
        .chain(marked.iter().map(|link| (link.ifindex, link.name.as_str())))
        .collect();
    netlink
        .delete_links(&links)
        .await
        .map_err(|error| kernel_of_node("deleting interfaces", &error))?;
    for record in &contents.namespaces {
        netlink::netns::remove(&record.path)
            .await
            .map_err(|error| kernel_of_node("removing a network namespace", &error))?;
    }
    netlink
        .remove_rules()
        .await
        .map_err(|error| kernel_of_node("removing routing rules", &error))?;
    for route in netlink
        .list_our_routes()
        .await
        .map_err(|error| kernel_of_node("listing routes", &error))?
    {
        netlink
            .del_pod_route(route.destination.addr(), route.ifindex)
            .await
            .map_err(|error| kernel_of_node("removing a route", &error))?;
    }
    Ok(())
}

/// What is no veth pair of ours, while its namespaces are still there. What plugins refuse to undo stops nothing else.
async fn take_back(contents: &Contents, netlink: &Netlink) -> Result<(), AttachError> {
    let home = Netns::current().map_err(|error| kernel_of_node("opening the node's namespace", &error))?;
    for sandbox in &contents.sandboxes {
        for attachment in &sandbox.attachments {
            if let Err(error) = provider::dismantle_inside(&home, netlink, sandbox, attachment).await {
                tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, ifname = %attachment.ifname, error,
                    "cannot take an interface away");
            }
        }
    }
    provider::return_all(netlink)
        .await
        .map_err(|error| kernel_of_node("bringing devices back", &error))
}

fn recorded_links(contents: &Contents) -> Vec<(u32, String)> {
    let attached = contents
        .sandboxes
        .iter()
        .flat_map(|sandbox| &sandbox.attachments)
        .filter(|attachment| attachment.kind.is_ebpf())
        .map(|attachment| (attachment.host_ifindex, attachment.host_ifname.to_string()));
    let warm = contents
        .namespaces
        .iter()
        .filter_map(|record| record.warm.as_ref())
        .map(|warm| (warm.host_ifindex, warm.host_ifname.to_string()));
    let removals = contents
        .removals
        .iter()
        .map(|removal| (removal.host_ifindex, removal.host_ifname.to_string()));
    attached.chain(warm).chain(removals).collect()
}
