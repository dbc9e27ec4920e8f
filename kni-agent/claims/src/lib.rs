//! Claims address blocks for a node at the API server, and releases them.
//! Layer: service.
//!
//! A block belongs to the node whose `AddressBlock` was created first: the name of the object is the range, so a second
//! creation is refused. Agents of the previous release know only `PodNetwork.status.blocks`, a list in which a range
//! occurs once; a block is entered there as well, and belongs to the node only with both.
//!
//! Whether a request had an effect is never derived from the lack of a reply. [`Claims::claim`] and
//! [`Claims::release`] may be repeated with the same block at any time: they read what is there. Between an error and
//! the next success the caller does not lease from the block.

mod error;
mod object;
mod status;

use futures::future::join;
use ipnet::IpNet;
use kni_api::{AddressBlock, LEASES_FINALIZER};
use kni_model::NetworkName;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::json;

pub use error::ClaimError;
pub use object::{address_block, range_of};
use status::{Entered, StatusBlocks};

/// A network, by name and uid.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NetworkRef {
    /// Its name.
    pub name: NetworkName,
    /// Its uid: another network of the same name has other blocks.
    pub uid: String,
}

/// A node, by name and uid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRef {
    /// Its name.
    pub name: String,
    /// Its uid: another node of the same name has other blocks.
    pub uid: String,
}

/// The result of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// The block belongs to the node.
    Ours,
    /// The block, or a part of it, does not: the owner, as text for operators.
    Taken(String),
}

/// The claims of one node. Sends requests only when called.
#[derive(Clone)]
pub struct Claims {
    client: Client,
    node: NodeRef,
}

impl Claims {
    /// The claims of `node`.
    pub fn new(client: Client, node: NodeRef) -> Self {
        Self { client, node }
    }

    /// The node.
    pub fn node(&self) -> &NodeRef {
        &self.node
    }

    fn blocks(&self) -> Api<AddressBlock> {
        Api::all(self.client.clone())
    }

    fn status(&self) -> StatusBlocks<'_> {
        StatusBlocks {
            client: &self.client,
            node: &self.node.name,
        }
    }

    /// The objects for blocks of nodes with this node's name, as of now: not from a cache of the API server. `None` if
    /// the API server does not know the kind.
    pub async fn own(&self) -> Result<Option<Vec<AddressBlock>>, ClaimError> {
        let own = ListParams::default().fields(&format!("spec.nodeName={}", self.node.name));
        match self.blocks().list(&own).await {
            Ok(listed) => Ok(Some(listed.items)),
            Err(error) if is_code(&error, 404) => Ok(None),
            Err(error) => Err(ClaimError::of("listing the node's blocks", error)),
        }
    }

    /// Whether an object is about this node and this network, and not being deleted.
    pub fn is_valid(&self, object: &AddressBlock, network: &NetworkRef) -> bool {
        let spec = &object.spec;
        spec.network == network.name.as_str()
            && spec.network_uid == network.uid
            && spec.node_name == self.node.name
            && spec.node_uid == self.node.uid
            && object.metadata.deletion_timestamp.is_none()
    }

    /// Claims a unit of the network's subnets. After an error its owner is unknown: claim or release it again.
    pub async fn claim(&self, network: &NetworkRef, unit: &IpNet) -> Result<Claim, ClaimError> {
        let object = address_block(&self.node, network, unit);
        match self.blocks().create(&PostParams::default(), &object).await {
            Ok(_created) => {}
            // An agent of the previous release would claim it by the status alone.
            Err(error) if is_code(&error, 404) => return self.enter(network, unit).await,
            Err(kube::Error::Api(status)) if status.code == 409 && status.reason == "AlreadyExists" => {
                match self.blocks().get_opt(&object.name_any()).await {
                    Ok(Some(there)) if self.is_valid(&there, network) => {}
                    Ok(Some(there)) => return Ok(Claim::Taken(owner(&there))),
                    Ok(None) => return Ok(Claim::Taken("a node that has just released it".to_owned())),
                    Err(error) => return Err(ClaimError::of("reading a block", error)),
                }
            }
            Err(error) => return Err(ClaimError::of("creating a block", error)),
        }
        // A network that was deleted and made again may have had units of another size. Both sides create first and
        // look then, so at least one of two concurrent claims sees the other one.
        let (entered, earlier) = join(self.enter(network, unit), self.owner_before(network, unit)).await;
        let taken = match (entered?, earlier?) {
            (Claim::Ours, None) => return Ok(Claim::Ours),
            (Claim::Taken(by), _) | (Claim::Ours, Some(by)) => by,
        };
        self.release(&network.name, unit).await?;
        Ok(Claim::Taken(taken))
    }

    async fn enter(&self, network: &NetworkRef, unit: &IpNet) -> Result<Claim, ClaimError> {
        match self.status().enter(network, unit).await? {
            Entered::Ours => Ok(Claim::Ours),
            Entered::Taken(by) => Ok(Claim::Taken(by)),
        }
    }

    /// The owner of a block that overlaps `unit`, of an earlier network of the same name.
    async fn owner_before(&self, network: &NetworkRef, unit: &IpNet) -> Result<Option<String>, ClaimError> {
        let others = format!("spec.network={},spec.networkUID!={}", network.name, network.uid);
        let listed = self.blocks().list(&ListParams::default().fields(&others)).await;
        let listed = listed.map_err(|error| ClaimError::of("listing blocks of an earlier network", error))?;
        let overlapping = listed.items.iter().find(|object| {
            let range = range_of(object);
            object.spec.node_name != self.node.name && range.is_some_and(|range| overlap(&range, unit))
        });
        Ok(overlapping.map(owner))
    }

    /// Releases a block from which the node does not lease, and in which no lease is left. On success the node owns
    /// nothing of it; it is free unless another node owned it.
    pub async fn release(&self, network: &NetworkName, unit: &IpNet) -> Result<(), ClaimError> {
        let api = self.blocks();
        let name = kni_ipam::blocks::object_name(network, unit);
        let there = match api.get_opt(&name).await {
            Ok(there) => there.filter(|object| object.spec.node_name == self.node.name),
            Err(error) => return Err(ClaimError::of("reading a block", error)),
        };
        let Some(object) = there else {
            return self.status().remove(network, unit).await;
        };
        // Deletion cannot be undone, so it comes first: whatever is lost after it, the block is never leased again
        // before it was claimed anew.
        if object.metadata.deletion_timestamp.is_none() {
            let params = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: object.uid(),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            match api.delete(&name, &params).await {
                Ok(_deleted) => {}
                Err(error) if is_code(&error, 404) => {}
                Err(error) => return Err(ClaimError::of("deleting a block", error)),
            }
        }
        self.status().remove(network, unit).await?;
        self.drop_finalizer(&name, object.uid()).await
    }

    /// Removes the finalizer of a deleted object, unless another one has its name.
    async fn drop_finalizer(&self, name: &str, uid: Option<String>) -> Result<(), ClaimError> {
        let api = self.blocks();
        let read = api.get_opt(name).await;
        let read = read.map_err(|error| ClaimError::of("reading a block", error))?;
        let Some(object) = read.filter(|object| object.uid() == uid) else {
            return Ok(());
        };
        let others: Vec<&String> = object
            .finalizers()
            .iter()
            .filter(|name| *name != LEASES_FINALIZER)
            .collect();
        let patch = json!({"metadata": {
            "uid": object.uid(), "resourceVersion": object.resource_version(), "finalizers": others,
        }});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(_patched) => Ok(()),
            Err(error) if is_code(&error, 404) => Ok(()),
            Err(error) => Err(ClaimError::of("removing the finalizer of a block", error)),
        }
    }
}

fn owner(object: &AddressBlock) -> String {
    let name = object.name_any();
    format!("node {} (AddressBlock {name})", object.spec.node_name)
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

fn is_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}
