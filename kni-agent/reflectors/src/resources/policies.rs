//! Lists the kinds of policies, and reads a policy that cannot be decoded as one that admits nothing.

use std::sync::Arc;

use k8s_openapi::api::networking::v1::NetworkPolicy;
use kni_api::EgressPolicySummary;
use kni_cluster::PolicyRow;
use kni_crd::{
    EgressAddressClaim, EgressAddressPool, EgressPolicy, FromObject, InvalidObject, closed_policy, v1beta1, v1beta2,
};
use kni_model::policy::{Policy, PolicyKind};
use kube::{Api, Resource, runtime::watcher};

use super::{NPWG, Watches, reflect_recent};
use crate::{
    decoded::Undecoded,
    reflector::{Kind, version_of},
    served::Optional,
};

pub(super) fn reflect_policies(watches: &mut Watches<'_>) {
    let egress = Kind::<EgressPolicy, _>::new(
        "egresspolicies",
        |tables| &mut tables.egress_policies,
        |object| {
            Some(PolicyRow {
                summary: EgressPolicySummary::new(&object.spec),
                ..policy_row(&object)
            })
        },
    );
    watches.reflect(
        "watch-egresspolicies",
        egress.with_substitute(|object| closed(PolicyKind::EgressPolicy, object)),
    );
    let network = Kind::<NetworkPolicy, _>::new(
        "networkpolicies",
        |tables| &mut tables.network_policies,
        |object| Some(policy_row(&object)),
    );
    watches.reflect(
        "watch-networkpolicies",
        network.with_substitute(|object| closed(PolicyKind::NetworkPolicy, object)),
    );
    reflect_multi_policies(watches);
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
    let newer = Kind::new(
        "multi-networkpolicies",
        |tables| &mut tables.multi_policies,
        |object: v1beta2::MultiNetworkPolicy| Some(policy_row(&object)),
    );
    let older = Kind::new(
        "multi-networkpolicies",
        |tables| &mut tables.multi_policies,
        |object: v1beta1::MultiNetworkPolicy| Some(policy_row(&object)),
    );
    let newer = newer.with_substitute(|object| closed(PolicyKind::MultiNetworkPolicy, object));
    let older = older.with_substitute(|object| closed(PolicyKind::MultiNetworkPolicy, object));
    let versions = vec![
        watches.version("v1beta2", newer, Api::all(watches.client.clone())),
        watches.version("v1beta1", older, Api::all(watches.client.clone())),
    ];
    let optional = Optional::new(NPWG, "multi-networkpolicies", |tables| &mut tables.multi_policies);
    watches.reflect_optional("watch-multi-networkpolicies", optional, versions);
}

/// The policy that isolates the pods of one that cannot be decoded, until a version of it is understood.
fn closed(kind: PolicyKind, object: &Undecoded) -> Option<PolicyRow> {
    let policy = closed_policy(kind, &object.metadata, object.object.get("spec"))?;
    Some(PolicyRow {
        policy: Ok(Arc::new(policy)),
        version: version_of(&object.metadata),
        generation: object.metadata.generation.unwrap_or(0),
        summary: EgressPolicySummary::default(),
    })
}

fn policy_row<K: Resource>(object: &K) -> PolicyRow
where
    Policy: FromObject<K, Error = InvalidObject>,
{
    PolicyRow {
        policy: Policy::from_object(object).map(Arc::new),
        version: version_of(object.meta()),
        generation: object.meta().generation.unwrap_or(0),
        summary: EgressPolicySummary::default(),
    }
}
