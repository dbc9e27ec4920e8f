//! Derives the status of a `PodInterface`: its conditions, addresses, routes and programs.

use kni_api::{
    Condition, PodInterfaceStatus,
    pod_interface::{AttachedProgram, InterfaceAddress, InterfaceRoute},
};
use kni_model::{egress::RefusedAddress, view::InterfaceView};
use kni_pods::LostRight;

/// The condition of [`egress_condition`].
pub(super) const EGRESS_READY: &str = "EgressReady";

/// Why the policies of an interface are not enforced: the reason of the condition, and its message.
pub(super) type NotEnforced<'a> = (&'static str, &'a str);

/// The condition of an interface that nothing leaves the node from, because it may not use an address that it would
/// have to leave with. Other interfaces do not have it.
pub(super) fn egress_condition(refused: &[RefusedAddress]) -> Option<Condition> {
    let first = refused.first()?;
    let all: Vec<String> = refused.iter().map(ToString::to_string).collect();
    let message = format!("nothing leaves the node: {}", all.join("; "));
    Some(Condition::now(
        EGRESS_READY,
        false,
        first.refusal.reason(),
        &message,
        None,
    ))
}

fn conditions(view: &InterfaceView, not_enforced: Option<NotEnforced<'_>>) -> Vec<Condition> {
    let healthy = view.problems.is_empty();
    let (reason, message) = if healthy {
        ("Attached", "the interface is there and its programs run".to_owned())
    } else {
        ("Unhealthy", view.problems.join("; "))
    };
    let policy = match (view.attachment.kind.has_row(), not_enforced) {
        (true, None) => ("Enforced", "the policies that select the pod are enforced"),
        (true, Some(problem)) => problem,
        (false, _) => ("NoPrograms", "no policy holds at an interface of this kind"),
    };
    vec![
        Condition::now("Ready", healthy, reason, &message, None),
        Condition::now("PolicyEnforced", policy.0 == "Enforced", policy.0, policy.1, None),
    ]
}

/// Whether the pod would get the interface again.
pub(super) fn authorized(lost: Option<&LostRight>) -> Condition {
    match lost {
        None => Condition::now("Authorized", true, "Admitted", "the network admits the pod", None),
        Some(LostRight { refusal, .. }) => {
            Condition::now("Authorized", false, refusal.rule.reason(), &refusal.to_string(), None)
        }
    }
}

pub(super) fn status_of(view: &InterfaceView, not_enforced: Option<NotEnforced<'_>>) -> PodInterfaceStatus {
    let InterfaceView {
        sandbox,
        attachment,
        programs,
        ..
    } = view;
    PodInterfaceStatus {
        conditions: conditions(view, not_enforced),
        interface_index: attachment.ifindex,
        host_interface_name: attachment.host_ifname.to_string(),
        host_interface_index: attachment.host_ifindex,
        netns_inode: i64::try_from(sandbox.netns_identity.inode).unwrap_or(i64::MAX),
        mac: attachment.mac.to_string(),
        mtu: attachment.mtu,
        addresses: attachment
            .addresses()
            .map(|ip| InterfaceAddress {
                ip: ip.to_string(),
                family: if ip.is_ipv4() { "IPv4" } else { "IPv6" }.to_owned(),
            })
            .collect(),
        routes: attachment
            .pod_routes()
            .into_iter()
            .map(|(destination, gateway)| InterfaceRoute {
                destination: destination.to_string(),
                gateway: gateway.map(|gateway| gateway.to_string()),
            })
            .collect(),
        programs: programs
            .iter()
            .map(|program| AttachedProgram {
                hook: program.hook.clone(),
                name: program.name.clone(),
                program_id: program.id,
                link_id: program.link_id,
            })
            .collect(),
        endpoint_id: attachment.endpoint.0,
        network_id: attachment.network_id.get(),
    }
}
