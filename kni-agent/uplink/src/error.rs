//! What can go wrong with the way out of the node.

use kni_dataplane::DataplaneError;
use kni_netlink as netlink;
use kni_store::StoreError;

/// Why the way out could not be put into force. It is tried again in the background.
#[derive(Debug, thiserror::Error)]
pub enum UplinkError {
    /// The node's network.
    #[error("{}", chain(.0))]
    Netlink(#[from] netlink::Error),
    /// Rows or programs.
    #[error("{}", chain(.0))]
    Dataplane(#[from] DataplaneError),
    /// The record of what was put at the uplink.
    #[error("{}", chain(.0))]
    Store(#[from] StoreError),
}

/// An error with everything it was caused by, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
