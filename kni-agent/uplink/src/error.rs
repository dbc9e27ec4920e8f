//! Defines the errors of the node's egress.

use kni_dataplane::DataplaneError;
use kni_netlink as netlink;
use kni_store::StoreError;

/// Why egress could not be applied. It is retried in the background.
#[derive(Debug, thiserror::Error)]
pub enum UplinkError {
    /// The network of the node.
    #[error("{}", chain(.0))]
    Netlink(#[from] netlink::Error),
    /// Rows or programs.
    #[error("{}", chain(.0))]
    Dataplane(#[from] DataplaneError),
    /// The record of the changes to the uplink.
    #[error("{}", chain(.0))]
    Store(#[from] StoreError),
}

/// An error and its causes in one line.
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
