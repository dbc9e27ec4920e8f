//! Removes entries of `PodNetwork.status.blocks`, which agents of earlier releases make.
//!
//! The list has each range once, which the API server checks. An agent that goes back by one release makes its entries
//! again.

use std::time::Duration;

use ipnet::IpNet;
use kni_api::PodNetwork;
use kni_model::NetworkName;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::ClaimError;

/// Maximum number of attempts to change the list.
const TRIES: u64 = 8;

/// The lists of all networks, as one node changes them.
pub(crate) struct Entries<'a> {
    pub(crate) client: &'a Client,
    pub(crate) node: &'a str,
}

impl Entries<'_> {
    /// Untyped: a field of a newer release must be kept.
    fn api(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<PodNetwork>(&()))
    }

    /// Removes the node's entries of ranges. Entries of others stay, and a network that is gone has none.
    pub(crate) async fn remove(&self, network: &NetworkName, ranges: &[IpNet]) -> Result<(), ClaimError> {
        let ours: Vec<Value> = ranges
            .iter()
            .map(|range| json!({"cidr": range.to_string(), "node": self.node}))
            .collect();
        for attempt in 0..TRIES {
            let read = self.api().get_opt(network.as_str()).await;
            let read = read.map_err(|error| ClaimError::of("reading a network", error))?;
            let Some(object) = read else { return Ok(()) };
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
}

/// The first repetition is immediate, later ones spread out.
async fn pause(attempt: u64) {
    if attempt > 0 {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..=10 * attempt))).await;
    }
}
