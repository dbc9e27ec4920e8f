//! Lists the cases of level core: what the kubelet and container runtimes depend on.

mod attach;
mod authorities;
mod crowd;
mod hang_up;
mod namespaces;
mod queries;
mod teardown;
mod traffic;

use super::{Case, Check, Level};

const fn core(name: &'static str, about: &'static str, check: Check) -> Case {
    super::case(Level::Core, name, about, check)
}

/// The cases.
pub(super) const CASES: &[Case] = &[
    core(
        "authorities",
        "serves clients that send localhost, /tmp/kni.sock or %2Ftmp%2Fkni.sock as :authority",
        |session| Box::pin(authorities::check(session)),
    ),
    core(
        "node-networks",
        "QueryNodeNetworks lists a network, and the first one is ready",
        |session| Box::pin(queries::node_networks(session)),
    ),
    core(
        "create-unique",
        "CreateNetwork returns another mounted network namespace for each call, also for the same pod",
        |session| Box::pin(namespaces::create_unique(session)),
    ),
    core("create-empty", "CreateNetwork works without any field", |session| {
        Box::pin(namespaces::create_empty(session))
    }),
    core(
        "attach-interface",
        "after AttachInterface eth0 and lo are up, and eth0 has the answered bare addresses",
        |session| Box::pin(attach::interface(session)),
    ),
    core(
        "attach-repeated",
        "a repeated AttachInterface has the same answer and makes no second interface",
        |session| Box::pin(attach::repeated(session)),
    ),
    core(
        "attach-missing-namespace",
        "AttachInterface fails without the namespace and leaves nothing; teardown succeeds",
        |session| Box::pin(attach::missing_namespace(session)),
    ),
    core(
        "netns-from-extradata",
        "AttachInterface reads the namespace from extradata[\"netns\"] alone",
        |session| Box::pin(attach::from_extradata(session)),
    ),
    core(
        "netns-from-isolation",
        "AttachInterface reads the namespace from isolation.path alone",
        |session| Box::pin(attach::from_isolation(session)),
    ),
    core(
        "query-attached",
        "QueryPodNetwork answers by id what AttachInterface answered",
        |session| Box::pin(queries::attached(session)),
    ),
    core(
        "query-unknown",
        "QueryPodNetwork of an unknown id is OK and empty",
        |session| Box::pin(queries::unknown(session)),
    ),
    core(
        "detach",
        "DetachInterface removes eth0, may be repeated, and empties the query",
        |session| Box::pin(teardown::detach(session)),
    ),
    core(
        "detach-unknown",
        "DetachInterface of an unknown id succeeds",
        |session| Box::pin(teardown::detach_unknown(session)),
    ),
    core(
        "delete",
        "DeleteNetwork removes the path of the namespace and may be repeated",
        |session| Box::pin(teardown::delete(session)),
    ),
    core("delete-unknown", "DeleteNetwork of an unknown id succeeds", |session| {
        Box::pin(teardown::delete_unknown(session))
    }),
    core(
        "delete-attached",
        "DeleteNetwork without DetachInterface also detaches",
        |session| Box::pin(teardown::delete_attached(session)),
    ),
    core(
        "delete-by-path",
        "DeleteNetwork by the path alone removes a namespace that was never attached",
        |session| Box::pin(teardown::delete_by_path(session)),
    ),
    core(
        "older-sandbox",
        "teardown of an earlier sandbox of a pod does not affect its newer sandbox",
        |session| Box::pin(teardown::older_sandbox(session)),
    ),
    core(
        "pod-to-pod",
        "two pods exchange TCP data both ways by their answered addresses, without translation",
        |session| Box::pin(traffic::pod_to_pod(session)),
    ),
    core(
        "concurrent-attach",
        "30 pods that are attached at once have different addresses, and all work",
        |session| Box::pin(crowd::concurrent(session)),
    ),
    core(
        "addresses-in-use",
        "no address is given to a pod while another one has it",
        |session| Box::pin(crowd::addresses_in_use(session)),
    ),
    core(
        "deadlines",
        "queries are answered within 2 s while pods are attached and removed",
        |session| Box::pin(crowd::deadlines(session)),
    ),
    core(
        "hang-up",
        "a client that closes its connection during AttachInterface leaves nothing after teardown",
        |session| Box::pin(hang_up::check(session)),
    ),
];
