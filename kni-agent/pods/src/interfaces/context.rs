//! Carries the context of one attach: the request and its namespace, and the interface that is being made.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::{AttachRequest, Attachment, CniAttachment, NetworkSpec};
use kni_netlink::{Netlink, Netns};

use super::offers::Offers;
use crate::error::{AttachError, Subject};

/// A request and its namespace.
#[derive(Clone, Copy)]
pub(crate) struct Attempt<'a> {
    pub(crate) request: &'a AttachRequest,
    pub(crate) netns: &'a Netns,
    pub(crate) subject: &'a Subject,
}

/// The parts of a network that its interfaces need.
#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(super) subnets: Vec<IpNet>,
    pub(super) service_subnets: Vec<IpNet>,
    pub(super) gateways: Vec<IpAddr>,
}

impl From<&NetworkSpec> for Link {
    fn from(spec: &NetworkSpec) -> Self {
        Self {
            subnets: spec.subnets.clone(),
            service_subnets: spec.service_subnets.clone(),
            gateways: spec.provider.gateways().to_vec(),
        }
    }
}

/// An interface that is being made.
pub(crate) struct Build<'a> {
    pub(crate) subject: &'a Subject,
    pub(crate) netns: &'a Netns,
    pub(crate) offers: &'a Offers,
    /// Its position among the pod's interfaces.
    pub(crate) position: usize,
    pub(crate) link: Link,
    /// The CNI call, if it is one.
    pub(crate) cni: Option<&'a CniAttachment>,
}

impl Build<'_> {
    /// The metric of the interface's routes.
    pub(super) fn metric(&self) -> u32 {
        u32::try_from(self.position).unwrap_or(u32::MAX).saturating_mul(100)
    }

    /// rtnetlink inside the pod.
    pub(super) async fn enter(&self) -> Result<Netlink, AttachError> {
        enter(self.netns, self.subject).await
    }

    /// An obstacle at the provider.
    pub(super) fn refused(&self, attachment: &Attachment, reason: impl Into<String>, retryable: bool) -> AttachError {
        self.subject.provider(&attachment.network, reason, retryable)
    }
}

/// rtnetlink inside a namespace.
pub(super) async fn enter(netns: &Netns, subject: &Subject) -> Result<Netlink, AttachError> {
    let entered = Netlink::in_namespace(netns).await;
    entered.map_err(subject.failed("entering the network namespace"))
}
