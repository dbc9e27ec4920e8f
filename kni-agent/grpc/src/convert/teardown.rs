//! Parses requests to detach and delete. Nothing is refused here: a client repeats a failed teardown until it succeeds,
//! so an error about the form of a request would keep a pod from ever being deleted. Fields that cannot name anything
//! are ignored.

use kni_model::{PodRef, SandboxId};
use kni_pods::DeleteRequest;
use kni_proto::kni::DeleteNetworkRequest;

use super::{bounds, identity};

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
        extradata: _,
    } = request;
    let pod = PodRef {
        name,
        namespace,
        uid: String::new(),
    };
    let pod = if identity::check(&pod).is_ok() {
        pod
    } else {
        PodRef::default()
    };
    let netns = bounds::path("netns_path", &netns_path).ok();
    let sandbox = sandbox_id(&id);
    let names_something = sandbox.is_some() || netns.is_some() || pod != PodRef::default();
    names_something.then_some(DeleteRequest { sandbox, pod, netns })
}
