//! Enforces policy at the host ends of veth pairs that CNI plugins made: attaches programs, writes rows, removes both.

use std::sync::Arc;

use kni_dataplane::{Dataplane, DataplaneError, EndpointConfig};
use kni_model::Attachment;

use crate::{
    error::{AttachError, Subject},
    kernel::Kernel,
};

/// Starts to enforce policy on the packets of the interface. Called after the plugins: addresses and host end are known
/// only then.
pub(super) async fn attach(kernel: &Kernel, attachment: &Attachment, subject: &Subject) -> Result<(), AttachError> {
    let (dataplane, attachment) = (Arc::clone(&kernel.dataplane), attachment.clone());
    tokio::task::spawn_blocking(move || begin(&dataplane, &attachment))
        .await
        .map_err(|ended| subject.ended(&ended))?
        .map_err(subject.failed("attaching the programs"))
}

/// Programs first: without a row they drop (I1). Waits for RCU grace periods.
fn begin(dataplane: &Dataplane, attachment: &Attachment) -> Result<(), DataplaneError> {
    dataplane.attach(attachment.host_ifname.as_str(), attachment.endpoint)?;
    dataplane.publish(&EndpointConfig::from(attachment))
}

/// Takes over an interface of an earlier agent, whether that agent had attached the programs or not.
pub(super) fn adopt(kernel: &Kernel, attachment: &Attachment) -> Result<(), DataplaneError> {
    let dataplane = &kernel.dataplane;
    dataplane.republish(&EndpointConfig::from(attachment))?;
    dataplane.adopt(attachment.host_ifname.as_str(), attachment.endpoint)
}
