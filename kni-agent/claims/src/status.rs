//! Enters blocks into `PodNetwork.status.blocks`, where agents of the previous release look for free ones.
//!
//! The list has each range once, which the API server checks. Adding an item is therefore atomic without the resource
//! version of the object, and nodes do not contend for it.

use std::time::Duration;

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

/// The result of [`StatusBlocks::enter`].
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

    /// Enters a range, unless a range of another node overlaps it.
    pub(crate) async fn enter(&self, network: &NetworkRef, range: &IpNet) -> Result<Entered, ClaimError> {
        let name = network.name.as_str();
        for attempt in 0..TRIES {
            let patch = json!([
                {"op": "test", "path": "/metadata/uid", "value": network.uid},
                {"op": "add", "path": "/status/blocks/-", "value": {"cidr": range.to_string(), "node": self.node}},
            ]);
            let object = match self.patch(name, patch).await? {
                Some(object) => object,
                // The range is there, or there is no list yet.
                None => self.read(name).await?,
            };
            if object.uid().as_deref() != Some(&network.uid) {
                return Err(ClaimError::NetworkGone {
                    network: name.to_owned(),
                });
            }
            let entries = entries(&object);
            if let Some((_, node)) = entries
                .iter()
                .find(|(cidr, node)| node != self.node && overlap(cidr, range))
            {
                let by = format!("node {node} (status of PodNetwork {name})");
                self.remove(&network.name, range).await?;
                return Ok(Entered::Taken(by));
            }
            if entries.iter().any(|(cidr, _)| cidr == range) {
                return Ok(Entered::Ours);
            }
            if object.data.pointer("/status/blocks").is_none() {
                self.begin(object, range).await?;
            }
            pause(attempt).await;
        }
        Err(ClaimError::Contended {
            network: name.to_owned(),
        })
    }

    /// Removes the node's entry of a range. Entries of others stay, and a network that is gone has none.
    pub(crate) async fn remove(&self, network: &NetworkName, range: &IpNet) -> Result<(), ClaimError> {
        let entry = json!({"cidr": range.to_string(), "node": self.node});
        for attempt in 0..TRIES {
            let object = match self.read(network.as_str()).await {
                Ok(object) => object,
                Err(ClaimError::NetworkGone { .. }) => return Ok(()),
                Err(error) => return Err(error),
            };
            let list = object.data.pointer("/status/blocks").and_then(Value::as_array);
            let Some(index) = list.and_then(|list| list.iter().position(|item| *item == entry)) else {
                return Ok(());
            };
            // With the resource version, a request that arrives late does not remove a later entry.
            let item = format!("/status/blocks/{index}");
            let patch = json!([
                {"op": "test", "path": "/metadata/resourceVersion", "value": object.resource_version()},
                {"op": "test", "path": item, "value": entry},
                {"op": "remove", "path": item},
            ]);
            self.patch(network.as_str(), patch).await?;
            pause(attempt).await;
        }
        Err(ClaimError::Contended {
            network: network.to_string(),
        })
    }

    /// The changed object; `None` if the patch does not apply to the object as it is.
    async fn patch(&self, name: &str, patch: Value) -> Result<Option<DynamicObject>, ClaimError> {
        let patch = serde_json::from_value(patch).map_err(|error| ClaimError::Unknown {
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

    /// Writes a list with the range, into an object without a list and only if the object has not changed.
    async fn begin(&self, mut object: DynamicObject, range: &IpNet) -> Result<(), ClaimError> {
        let name = object.name_any();
        let list = json!([{"cidr": range.to_string(), "node": self.node}]);
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
