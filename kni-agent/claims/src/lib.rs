//! Claims address blocks for a node at the API server, and releases them.
//! Layer: service.
//!
//! A block belongs to the node whose `AddressBlock` was created first: the name of the object is the range, so a second
//! creation is refused. A node that was deleted and registered again has another UID, which it writes into its blocks.
//!
//! Whether a request had an effect is never derived from the lack of a reply. [`Claims::claim`] and
//! [`Claims::release`] may be repeated with the same block at any time: they read what is there. Between an error and
//! the next success the caller does not lease from the block.

mod error;
mod object;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use ipnet::IpNet;
use kni_api::{AddressBlock, LEASES_FINALIZER};
use kni_model::NetworkName;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, VersionMatch},
};
use serde_json::json;

pub use error::ClaimError;
pub use object::{address_block, range_of};

/// Maximum number of concurrent requests for one network.
const AT_ONCE: usize = 16;

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
    /// Its uid: a node that is registered again under its name takes over the blocks of before.
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

/// The result of the creation of an object.
enum Created {
    /// It is the node's, with the version of its object.
    Ours { version: u64 },
    /// The owner.
    Taken(String),
}

impl Created {
    fn ours(object: &AddressBlock) -> Self {
        Self::Ours {
            version: version_of(object),
        }
    }
}

/// 0 if it is no number.
fn version_of(object: &AddressBlock) -> u64 {
    let version = object.resource_version().and_then(|version| version.parse().ok());
    version.unwrap_or_default()
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

    /// Whether an object is about an earlier node of this node's name: the node was deleted and registered again.
    pub fn is_of_earlier_node(&self, object: &AddressBlock) -> bool {
        object.spec.node_name == self.node.name && object.spec.node_uid != self.node.uid
    }

    /// Takes over the objects of earlier nodes of this node's name, and returns all of them as they are now. After an
    /// error any of them may be as before.
    pub async fn adopt_all(&self, objects: Vec<AddressBlock>) -> (Vec<AddressBlock>, Result<(), ClaimError>) {
        let (earlier, mut present): (Vec<_>, Vec<_>) =
            objects.into_iter().partition(|object| self.is_of_earlier_node(object));
        let mut done = Ok(());
        let adoptions: Vec<_> = earlier.into_iter().map(|object| self.adopt(object)).collect();
        let mut adoptions = stream::iter(adoptions).buffer_unordered(AT_ONCE);
        while let Some((object, adopted)) = adoptions.next().await {
            present.push(object);
            if adopted.is_err() {
                done = adopted;
            }
        }
        (present, done)
    }

    /// Takes over a block of an earlier node of this node's name, with one write: the range is free at no time. Returns
    /// the object as it is now; one that has changed meanwhile is left for the next attempt.
    async fn adopt(&self, object: AddressBlock) -> (AddressBlock, Result<(), ClaimError>) {
        let patch = json!({
            "metadata": { "uid": object.uid(), "resourceVersion": object.resource_version() },
            "spec": { "nodeUID": self.node.uid },
        });
        let (api, name) = (self.blocks(), object.name_any());
        match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(adopted) => (adopted, Ok(())),
            Err(error) if is_code(&error, 404) || is_code(&error, 409) => (object, Ok(())),
            Err(error) => (object, Err(ClaimError::of("taking over a block", error))),
        }
    }

    /// Claims a unit of the network's subnets. After an error its owner is unknown: claim or release it again.
    pub async fn claim(&self, network: &NetworkRef, unit: &IpNet) -> Result<Claim, ClaimError> {
        let (mut claims, done) = self.claim_all(network, std::slice::from_ref(unit)).await;
        done?;
        claims.remove(unit).ok_or_else(|| ClaimError::Unsettled {
            network: network.name.to_string(),
        })
    }

    /// Claims units of the network's subnets, with one request for each and one for all of them. The owners of units
    /// that are not in the result are unknown, as after an error of [`Self::claim`].
    pub async fn claim_all(
        &self,
        network: &NetworkRef,
        units: &[IpNet],
    ) -> (BTreeMap<IpNet, Claim>, Result<(), ClaimError>) {
        let mut claims = BTreeMap::new();
        let mut done = Ok(());
        let (mut created, mut newest) = (Vec::new(), 0);
        let creations: Vec<_> = units
            .iter()
            .map(|unit| async move { (*unit, self.create(network, unit).await) })
            .collect();
        let mut creations = stream::iter(creations).buffer_unordered(AT_ONCE);
        while let Some((unit, result)) = creations.next().await {
            match result {
                Ok(Created::Ours { version }) => {
                    created.push(unit);
                    newest = version.max(newest);
                }
                Ok(Created::Taken(by)) => {
                    claims.insert(unit, Claim::Taken(by));
                }
                Err(error) => done = Err(error),
            }
        }
        if !created.is_empty() {
            match self.confirm(network, &created, newest).await {
                Ok(confirmed) => claims.extend(confirmed),
                Err(error) => done = Err(error),
            }
        }
        (claims, done)
    }

    /// Settles claims of an earlier process whose objects are there and valid: what [`Self::claim_all`] does after it
    /// has created them, with one request for all objects of a network.
    pub async fn confirm_objects(
        &self,
        network: &NetworkRef,
        objects: &[&AddressBlock],
    ) -> Result<BTreeMap<IpNet, Claim>, ClaimError> {
        let units: Vec<IpNet> = objects.iter().filter_map(|object| range_of(object)).collect();
        let newest = objects.iter().map(|object| version_of(object)).max();
        self.confirm(network, &units, newest.unwrap_or_default()).await
    }

    /// Creates the object of a unit.
    async fn create(&self, network: &NetworkRef, unit: &IpNet) -> Result<Created, ClaimError> {
        let object = address_block(&self.node, network, unit);
        match self.blocks().create(&PostParams::default(), &object).await {
            Ok(created) => Ok(Created::ours(&created)),
            Err(error) if is_code(&error, 404) => Err(ClaimError::NotServed),
            Err(kube::Error::Api(status)) if status.code == 409 && status.reason == "AlreadyExists" => {
                match self.blocks().get_opt(&object.name_any()).await {
                    Ok(Some(there)) => self.present(network, there).await,
                    Ok(None) => Ok(Created::Taken("a node that has just released it".to_owned())),
                    Err(error) => Err(ClaimError::of("reading a block", error)),
                }
            }
            Err(error) => Err(ClaimError::of("creating a block", error)),
        }
    }

    /// Whether a block that was there already is the node's.
    async fn present(&self, network: &NetworkRef, mut there: AddressBlock) -> Result<Created, ClaimError> {
        if self.is_of_earlier_node(&there) && there.spec.network_uid == network.uid {
            let (adopted, done) = self.adopt(there).await;
            done?;
            there = adopted;
        }
        if self.is_valid(&there, network) {
            return Ok(Created::ours(&there));
        }
        Ok(Created::Taken(owner(&there)))
    }

    /// Compares the units of created objects with blocks of earlier networks. Those that overlap are released. `newest`
    /// is the highest version of the objects.
    async fn confirm(
        &self,
        network: &NetworkRef,
        created: &[IpNet],
        newest: u64,
    ) -> Result<BTreeMap<IpNet, Claim>, ClaimError> {
        // A network that was deleted and made again may have had units of another size. Both sides create first and
        // look then, so at least one of two concurrent claims sees the other one: that whose objects are newer.
        let earlier = self.earlier_blocks(network, newest).await?;
        let mut claims = BTreeMap::new();
        for unit in created {
            let mut earlier = earlier.iter();
            let before = earlier.find(|object| range_of(object).is_some_and(|range| overlap(&range, unit)));
            claims.insert(*unit, before.map(owner).map_or(Claim::Ours, Claim::Taken));
        }
        let taken = claims.iter().filter(|(_, claim)| **claim != Claim::Ours);
        let taken: Vec<IpNet> = taken.map(|(unit, _)| *unit).collect();
        self.release_all(&network.name, &taken).await?;
        Ok(claims)
    }

    /// The ranges of all blocks of networks of this name, as of now.
    pub async fn taken(&self, network: &NetworkName) -> Result<Vec<IpNet>, ClaimError> {
        let all = ListParams::default().fields(&format!("spec.network={network}"));
        let listed = self.blocks().list(&all).await;
        let listed = listed.map_err(|error| ClaimError::of("listing the blocks of a network", error))?;
        Ok(listed.items.iter().filter_map(range_of).collect())
    }

    /// The blocks of other nodes in earlier networks of the same name, as of `version` or later. The API server answers
    /// from its cache once that has the version, which it gets with the object of that version; how new its storage is
    /// does not matter.
    async fn earlier_blocks(&self, network: &NetworkRef, version: u64) -> Result<Vec<AddressBlock>, ClaimError> {
        let others = format!("spec.network={},spec.networkUID!={}", network.name, network.uid);
        let mut params = ListParams::default().fields(&others);
        if version > 0 {
            params = params.at(&version.to_string()).matching(VersionMatch::NotOlderThan);
        }
        let listed = self.blocks().list(&params).await;
        let listed = listed.map_err(|error| ClaimError::of("listing blocks of an earlier network", error))?;
        let mut earlier = listed.items;
        earlier.retain(|object| object.spec.node_name != self.node.name);
        Ok(earlier)
    }

    /// Releases a block from which the node does not lease, and in which no lease is left. On success the node owns
    /// nothing of it; it is free unless another node owned it.
    pub async fn release(&self, network: &NetworkName, unit: &IpNet) -> Result<(), ClaimError> {
        self.release_all(network, std::slice::from_ref(unit)).await
    }

    /// [`Self::release`] of several blocks. After an error any of them may be released or not.
    pub async fn release_all(&self, network: &NetworkName, units: &[IpNet]) -> Result<(), ClaimError> {
        if units.is_empty() {
            return Ok(());
        }
        // Deletion cannot be undone, so it comes first: whatever is lost after it, the block is never leased again
        // before it was claimed anew.
        let names = units.iter().map(|unit| kni_ipam::blocks::object_name(network, unit));
        let deletions: Vec<_> = names.map(|name| self.delete(name)).collect();
        let deletions = stream::iter(deletions).buffer_unordered(AT_ONCE);
        let deleted: Vec<Option<(String, Option<String>)>> = deletions.try_collect().await?;
        let finalizers = deleted.into_iter().flatten();
        let finalizers: Vec<_> = finalizers
            .map(|(name, uid)| async move { self.drop_finalizer(&name, uid).await })
            .collect();
        stream::iter(finalizers).buffer_unordered(AT_ONCE).try_collect().await
    }

    /// Deletes the node's object of a name; returns its name and UID, if there was one.
    async fn delete(&self, name: String) -> Result<Option<(String, Option<String>)>, ClaimError> {
        let api = self.blocks();
        let there = match api.get_opt(&name).await {
            Ok(there) => there.filter(|object| object.spec.node_name == self.node.name),
            Err(error) => return Err(ClaimError::of("reading a block", error)),
        };
        let Some(object) = there else { return Ok(None) };
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
        Ok(Some((name, object.uid())))
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
