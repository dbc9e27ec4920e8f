//! Builds and reads `AddressBlock` objects.

use ipnet::IpNet;
use kni_api::{AddressBlock, AddressBlockSpec, LEASES_FINALIZER, NETWORK_LABEL};
use kni_ipam::blocks::{object_name, parse_object_name};
use kube::ResourceExt as _;

use super::{NetworkRef, NodeRef};

/// The object by which a node claims a unit. The node's name is no label, as it may be longer than a label's value.
pub fn address_block(node: &NodeRef, network: &NetworkRef, unit: &IpNet) -> AddressBlock {
    let spec = AddressBlockSpec {
        network: network.name.to_string(),
        network_uid: network.uid.clone(),
        cidr: unit.to_string(),
        node_name: node.name.clone(),
        node_uid: node.uid.clone(),
    };
    let mut object = AddressBlock::new(&object_name(&network.name, unit), spec);
    object
        .labels_mut()
        .insert(NETWORK_LABEL.to_owned(), network.name.to_string());
    object.metadata.finalizers = Some(vec![LEASES_FINALIZER.to_owned()]);
    object
}

/// The range of an object, by its name; `None` if the name is not canonical.
pub fn range_of(object: &AddressBlock) -> Option<IpNet> {
    parse_object_name(&object.name_any()).map(|(_, range)| range)
}
