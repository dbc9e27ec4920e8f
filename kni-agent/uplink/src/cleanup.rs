//! Removes everything from the uplink that the agent has added, while the agent is stopped.

use kni_dataplane as dataplane;
use kni_netlink::Netlink;
use kni_store::Store;

use super::UplinkError;

/// Removes marked and recorded addresses, and filters. Links are removed with their pins. Succeeds if there are none.
pub async fn cleanup(store: &Store) -> Result<(), UplinkError> {
    let record = store.uplink();
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
