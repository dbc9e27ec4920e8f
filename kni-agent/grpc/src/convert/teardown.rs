//! Parses requests to detach and delete. Nothing is refused here: a client repeats a failed teardown until it succeeds,
//! so an error about the form of a request would keep a pod from ever being deleted. Fields that cannot name anything
//! are ignored.

use kni_model::{PodRef, SandboxId};
use kni_pods::DeleteRequest;
use kni_proto::kni::DeleteNetworkRequest;

use super::{Identity, bounds};

/// The sandbox that an id names; `None` for an empty or illegal id, under which nothing can ever have been attached.
pub(crate) fn sandbox_id(id: &str) -> Option<SandboxId> {
    id.parse().ok()
}

/// The namespace or sandbox to delete; `None` if the request names nothing that can exist.
pub(crate) fn delete_request(request: DeleteNetworkRequest) -> Option<DeleteRequest> {
    let DeleteNetworkRequest {
        id,
        name,
        namespace,
        netns_path,
        extradata,
    } = request;
    let named = Identity {
        name: &name,
        namespace: &namespace,
        ..Identity::default()
    };
    let with_uid = Identity {
        extradata: Some(&extradata),
        ..named
    };
    let mut pods = [with_uid, named].into_iter().map(|identity| (identity.pod(), identity));
    let valid = pods.find(|(pod, identity)| identity.check(pod).is_ok());
    let pod = valid.map(|(pod, _)| pod).unwrap_or_default();
    let netns = bounds::path("netns_path", &netns_path).ok();
    let sandbox = sandbox_id(&id);
    let names_something = sandbox.is_some() || netns.is_some() || pod != PodRef::default();
    names_something.then_some(DeleteRequest { sandbox, pod, netns })
}
