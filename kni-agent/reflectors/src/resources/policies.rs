//! Lists the kinds of policies, and reads a policy that is refused as one that admits nothing, until a valid version
//! of it is known.

use std::{fmt::Debug, sync::Arc};

use k8s_openapi::{api::networking::v1::NetworkPolicy, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kni_api::EgressPolicySummary;
use kni_cluster::{EgressPolicyRow, PolicyRow, PolicySource, Table, Tables};
use kni_crd::{
    EgressAddressClaim, EgressAddressPool, EgressPolicy, FromObject, InvalidObject, closed_policy, v1beta1, v1beta2,
};
use kni_model::policy::{Policy, PolicyKind};
use kube::{Api, Resource, runtime::watcher};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{NPWG, Watches, reflect_recent, whole};
use crate::{
    decoded::Undecoded,
    reflector::{Kind, version_of},
    served::Optional,
};

/// The objects of a kind of policies.
trait PolicyObject: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + 'static {
    const KIND: PolicyKind;

    /// The summary of an egress policy.
    fn summary(&self) -> EgressPolicySummary {
        EgressPolicySummary::default()
    }
}

impl PolicyObject for NetworkPolicy {
    const KIND: PolicyKind = PolicyKind::NetworkPolicy;
}

impl PolicyObject for v1beta1::MultiNetworkPolicy {
    const KIND: PolicyKind = PolicyKind::MultiNetworkPolicy;
}

impl PolicyObject for v1beta2::MultiNetworkPolicy {
    const KIND: PolicyKind = PolicyKind::MultiNetworkPolicy;
}

impl PolicyObject for EgressPolicy {
    const KIND: PolicyKind = PolicyKind::EgressPolicy;

    fn summary(&self) -> EgressPolicySummary {
        EgressPolicySummary::new(&self.spec)
    }
}

/// Follows the policies of every kind.
pub(super) fn reflect_policies(watches: &mut Watches<'_>) {
    watches.reflect("watch-egresspolicies", egress_policies());
    reflect_network_policies(watches);
    reflect_multi_policies(watches);
}

/// Follows the egress policies with their objects.
pub(super) fn reflect_egress_objects(watches: &mut Watches<'_>) {
    watches.reflect("watch-egresspolicies", egress_objects());
}

/// Follows the Kubernetes policies.
pub(super) fn reflect_network_policies(watches: &mut Watches<'_>) {
    watches.reflect("watch-networkpolicies", network_policies());
}

/// Follows the pools of egress addresses and their owners. Without the kinds no policy may use an address.
pub(super) fn reflect_egress(watches: &mut Watches<'_>) {
    let all = watcher::Config::default;
    reflect_recent::<EgressAddressPool>(
        watches,
        ("watch-egressaddresspools", "egressaddresspools"),
        |tables| &mut tables.egress_pools,
        all(),
    );
    reflect_recent::<EgressAddressClaim>(
        watches,
        ("watch-egressaddressclaims", "egressaddressclaims"),
        |tables| &mut tables.egress_claims,
        all(),
    );
}

/// The API server converts between the versions that it serves, so one is enough: the newer one if it is served.
pub(super) fn reflect_multi_policies(watches: &mut Watches<'_>) {
    let newer = multi_policies::<v1beta2::MultiNetworkPolicy>();
    let older = multi_policies::<v1beta1::MultiNetworkPolicy>();
    let versions = vec![
        watches.version("v1beta2", newer, Api::all(watches.client.clone())),
        watches.version("v1beta1", older, Api::all(watches.client.clone())),
    ];
    let optional = Optional::new(NPWG, "multi-networkpolicies", |tables| &mut tables.multi_policies);
    watches.reflect_optional("watch-multi-networkpolicies", optional, versions);
}

fn egress_objects() -> Kind<EgressPolicy, EgressPolicyRow> {
    let kind = Kind::new(
        "egresspolicies",
        |tables| &mut tables.egress_objects,
        |object: EgressPolicy| {
            let row = policy_row(&object)?;
            let object = whole(object);
            Some(EgressPolicyRow { object, row })
        },
    );
    kind.with_former(EgressPolicyRow::after)
}

fn egress_policies() -> Kind<EgressPolicy, PolicyRow> {
    policies("egresspolicies", |tables| &mut tables.egress_policies)
}

fn network_policies() -> Kind<NetworkPolicy, PolicyRow> {
    policies("networkpolicies", |tables| &mut tables.network_policies)
}

fn multi_policies<K: PolicyObject>() -> Kind<K, PolicyRow>
where
    Policy: FromObject<K, Error = InvalidObject>,
{
    policies("multi-networkpolicies", |tables| &mut tables.multi_policies)
}

fn policies<K: PolicyObject>(name: &'static str, table: fn(&mut Tables) -> &mut Table<PolicyRow>) -> Kind<K, PolicyRow>
where
    Policy: FromObject<K, Error = InvalidObject>,
{
    Kind::new(name, table, |object: K| policy_row(&object))
        .with_substitute(undecoded_row::<K>)
        .with_former(PolicyRow::after)
}

/// The policy of an object; of one that is not valid, one that isolates the pods that it selects.
fn policy_row<K: PolicyObject>(object: &K) -> Option<PolicyRow>
where
    Policy: FromObject<K, Error = InvalidObject>,
{
    let row = match Policy::from_object(object) {
        Ok(policy) => new_row(object.meta(), policy, PolicySource::Object),
        Err(error) => {
            let written = serde_json::to_value(object).unwrap_or_default();
            closed_row::<K>(object.meta(), written.get("spec"), error.to_string())?
        }
    };
    let summary = object.summary();
    Some(PolicyRow { summary, ..row })
}

/// The policy that isolates the pods of one that cannot be decoded.
fn undecoded_row<K: PolicyObject>(object: &Undecoded) -> Option<PolicyRow> {
    closed_row::<K>(&object.metadata, object.object.get("spec"), object.reason.clone())
}

fn closed_row<K: PolicyObject>(metadata: &ObjectMeta, spec: Option<&Value>, reason: String) -> Option<PolicyRow> {
    let policy = closed_policy(K::KIND, metadata, spec)?;
    Some(new_row(metadata, policy, PolicySource::Closed(reason)))
}

fn new_row(metadata: &ObjectMeta, policy: Policy, source: PolicySource) -> PolicyRow {
    PolicyRow {
        policy: Arc::new(policy),
        source,
        uid: metadata.uid.clone().unwrap_or_default(),
        version: version_of(metadata),
        generation: metadata.generation.unwrap_or(0),
        summary: EgressPolicySummary::default(),
    }
}

#[cfg(test)]
mod tests;
