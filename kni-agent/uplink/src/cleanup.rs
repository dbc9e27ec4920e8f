//! Takes from the uplink what the agent has put there, with the agent stopped.

use kni_dataplane as dataplane;
use kni_netlink::Netlink;
use kni_store::Store;

use super::UplinkError;

/// Removes the addresses that are marked or recorded, and filters. Links go with their pins. Succeeds when there is nothing.
pub async fn cleanup(store: &Store) -> Result<(), UplinkError> {
    let record = store.load()?.uplink;
    let netlink = Netlink::for_teardown()?;
    for found in netlink.list_addresses().await?.iter().filter(|found| found.ours) {
        netlink.del_egress_address(found.ifindex, found.address).await?;
    }
    if record.ifname.is_empty() {
        return Ok(());
    }
    let is_it = |ifindex| ifindex == record.ifindex;
    let link = netlink.get_link(record.ifname.as_str()).await?;
    if link.is_some_and(|link| is_it(link.ifindex)) {
        dataplane::remove_uplink_filters(&record.ifname);
        for address in &record.addresses {
            netlink.del_egress_address(record.ifindex, *address).await?;
        }
    }
    Ok(())
}
