//! Enters blocks into `PodNetwork.status.blocks`, where agents of the previous release look for free ones.
//!
//! The list has each range once, which the API server checks. Adding an item is therefore atomic without the resource
//! version of the object, and nodes do not contend for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ipnet::IpNet;
use kni_api::PodNetwork;
use kni_model::NetworkName;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{ClaimError, NetworkRef, overlap};

/// Maximum number of attempts to change the list.
const TRIES: u64 = 8;

/// The result of [`StatusBlocks::enter`] for a range.
pub(crate) enum Entered {
    Ours,
    /// By this owner.
    Taken(String),
}

/// The lists of all networks, as one node changes them.
pub(crate) struct StatusBlocks<'a> {
    pub(crate) client: &'a Client,
    pub(crate) node: &'a str,
}

impl StatusBlocks<'_> {
    /// Untyped: a field of a newer release must be kept.
    fn api(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<PodNetwork>(&()))
    }

    /// Enters ranges, but for those that a range of another node overlaps. All of them take one request, unless others
    /// change the list meanwhile.
    pub(crate) async fn enter(
        &self,
        network: &NetworkRef,
        ranges: &[IpNet],
    ) -> Result<BTreeMap<IpNet, Entered>, ClaimError> {
        let name = network.name.as_str();
        let mut done = BTreeMap::new();
        let mut left = ranges.to_vec();
        for attempt in 0..TRIES {
            if left.is_empty() {
                break;
            }
            let added = left.iter().map(|range| {
                let entry = json!({"cidr": range.to_string(), "node": self.node});
                json!({"op": "add", "path": "/status/blocks/-", "value": entry})
            });
            let test = json!({"op": "test", "path": "/metadata/uid", "value": network.uid});
            let patch = std::iter::once(test).chain(added).collect();
            let object = match self.patch(name, patch).await? {
                Some(object) => object,
                // One of the ranges is there, or there is no list yet.
                None => self.read(name).await?,
            };
            if object.uid().as_deref() != Some(&network.uid) {
                return Err(ClaimError::NetworkGone {
                    network: name.to_owned(),
                });
            }
            let taken = self.decide(&object, &mut left, &mut done);
            if !taken.is_empty() {
                self.remove(&network.name, &taken).await?;
            }
            if !left.is_empty() && object.data.pointer("/status/blocks").is_none() {
                self.begin(object, &left).await?;
            }
            if !left.is_empty() {
                pause(attempt).await;
            }
        }
        if left.is_empty() {
            return Ok(done);
        }
        Err(ClaimError::Contended {
            network: name.to_owned(),
        })
    }

    /// Moves the ranges about which the object decides from `left` to `done`; returns those of other nodes.
    fn decide(&self, object: &DynamicObject, left: &mut Vec<IpNet>, done: &mut BTreeMap<IpNet, Entered>) -> Vec<IpNet> {
        let entries = entries(object);
        let (own, others): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(_, node)| node == self.node);
        let own: BTreeSet<IpNet> = own.into_iter().map(|(cidr, _)| cidr).collect();
        let mut taken = Vec::new();
        left.retain(|range| {
            if let Some((_, node)) = others.iter().find(|(cidr, _)| overlap(cidr, range)) {
                let by = format!("node {node} (status of PodNetwork {})", object.name_any());
                done.insert(*range, Entered::Taken(by));
                taken.push(*range);
            } else if own.contains(range) {
                done.insert(*range, Entered::Ours);
            } else {
                return true;
            }
            false
        });
        taken
    }

    /// Removes the node's entries of ranges. Entries of others stay, and a network that is gone has none.
    pub(crate) async fn remove(&self, network: &NetworkName, ranges: &[IpNet]) -> Result<(), ClaimError> {
        let ours: Vec<Value> = ranges
            .iter()
            .map(|range| json!({"cidr": range.to_string(), "node": self.node}))
            .collect();
        for attempt in 0..TRIES {
            let object = match self.read(network.as_str()).await {
                Ok(object) => object,
                Err(ClaimError::NetworkGone { .. }) => return Ok(()),
                Err(error) => return Err(error),
            };
            let list = object.data.pointer("/status/blocks").and_then(Value::as_array);
            let found = list.into_iter().flatten().enumerate();
            let found: Vec<(usize, &Value)> = found.filter(|(_, item)| ours.contains(item)).collect();
            if found.is_empty() {
                return Ok(());
            }
            // With the resource version, a request that arrives late does not remove a later entry.
            let version = object.resource_version();
            let mut patch = vec![json!({"op": "test", "path": "/metadata/resourceVersion", "value": version})];
            // The last one first, so that the positions of the others stay.
            for (index, entry) in found.into_iter().rev() {
                let item = format!("/status/blocks/{index}");
                patch.push(json!({"op": "test", "path": item, "value": entry}));
                patch.push(json!({"op": "remove", "path": item}));
            }
            self.patch(network.as_str(), patch).await?;
            pause(attempt).await;
        }
        Err(ClaimError::Contended {
            network: network.to_string(),
        })
    }

    /// The changed object; `None` if the patch does not apply to the object as it is.
    async fn patch(&self, name: &str, patch: Vec<Value>) -> Result<Option<DynamicObject>, ClaimError> {
        let patch = serde_json::from_value(Value::Array(patch)).map_err(|error| ClaimError::Unknown {
            step: "building a patch",
            source: Box::new(kube::Error::SerdeError(error)),
        })?;
        let patched = self
            .api()
            .patch_status(name, &PatchParams::default(), &Patch::Json::<()>(patch))
            .await;
        match patched {
            Ok(object) => Ok(Some(object)),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => Ok(None),
            Err(error) => Err(ClaimError::of("changing the blocks of a network's status", error)),
        }
    }

    async fn read(&self, name: &str) -> Result<DynamicObject, ClaimError> {
        match self.api().get_opt(name).await {
            Ok(Some(object)) => Ok(object),
            Ok(None) => Err(ClaimError::NetworkGone {
                network: name.to_owned(),
            }),
            Err(error) => Err(ClaimError::of("reading a network", error)),
        }
    }

    /// Writes a list with the ranges, into an object without a list and only if the object has not changed.
    async fn begin(&self, mut object: DynamicObject, ranges: &[IpNet]) -> Result<(), ClaimError> {
        let name = object.name_any();
        let entries = ranges.iter();
        let list = entries
            .map(|range| json!({"cidr": range.to_string(), "node": self.node}))
            .collect();
        let status = object.data.get_mut("status").and_then(Value::as_object_mut);
        if let Some(status) = status {
            status.insert("blocks".to_owned(), list);
        } else if let Some(data) = object.data.as_object_mut() {
            data.insert("status".to_owned(), json!({ "blocks": list }));
        }
        match self.api().replace_status(&name, &PostParams::default(), &object).await {
            Ok(_written) => Ok(()),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(ClaimError::of("writing the first block of a network's status", error)),
        }
    }
}

/// The ranges in the status of a network, and their nodes.
fn entries(object: &DynamicObject) -> Vec<(IpNet, String)> {
    let list = object.data.pointer("/status/blocks").and_then(Value::as_array);
    let pairs = list.into_iter().flatten().filter_map(|item| {
        let cidr = item.get("cidr")?.as_str()?.parse().ok()?;
        Some((cidr, item.get("node")?.as_str()?.to_owned()))
    });
    pairs.collect()
}

/// The first repetition is immediate, later ones spread out.
async fn pause(attempt: u64) {
    if attempt > 0 {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..=10 * attempt))).await;
    }
}
