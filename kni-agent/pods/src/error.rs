//! Errors of the service: the pod and sandbox concerned, and the cause. The gRPC services map each cause to one code.

use std::{fmt, net::IpAddr, path::PathBuf, time::Duration};

use kni_enforcement::SyncError;
use kni_model::{AccessRefusal, AttachRequest, NetworkName, PodRef, Sandbox, SelectionError, error_chain};
use kni_uplink::UplinkError;

/// Why a call of [`Pods`](crate::Pods) failed.
#[derive(Debug, thiserror::Error)]
#[error("{subject}{kind}")]
pub struct AttachError {
    subject: Subject,
    kind: ErrorKind,
}

impl AttachError {
    /// The cause.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Names the node that has the address which is in no block of this one.
    pub(crate) fn with_holder(mut self, find: impl FnOnce(&NetworkName, IpAddr) -> Option<Holder>) -> Self {
        if let ErrorKind::AddressElsewhere {
            network,
            address,
            holder,
            ..
        } = &mut self.kind
        {
            *holder = find(network, *address);
        }
        self
    }

    /// Names the pod and sandbox in an error that names none.
    pub(crate) fn about(self, subject: &Subject) -> Self {
        if self.subject == Subject::node() {
            subject.error(self.kind)
        } else {
            self
        }
    }
}

/// The address block that another node has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Name of the `AddressBlock`.
    pub block: String,
    /// The node.
    pub node: String,
}

fn block_of(holder: Option<&Holder>) -> String {
    match holder {
        Some(Holder { block, node }) => format!("node {node} has it by AddressBlock {block}"),
        None => "another node has its block, or may claim it".to_owned(),
    }
}

/// The cause of an [`AttachError`].
#[derive(Debug, thiserror::Error)]
pub enum ErrorKind {
    /// The networks are not known yet.
    #[error("the agent has not read its networks yet: try again")]
    NotInSync,
    /// Something that the attach needs is not known or not there yet.
    #[error("{0}: try again")]
    NotReady(String),
    /// The pod asks for no network, and the node has no default network.
    #[error("no network is the default one (a PodNetwork with spec.default: true)")]
    NoDefaultNetwork,
    /// A network that the pod asks for does not exist.
    #[error("network {0} does not exist")]
    UnknownNetwork(NetworkName),
    /// The network takes no new attachments.
    #[error("network {0} takes no new pods: it is disabled (spec.enabled: false) or being deleted")]
    NetworkDisabled(NetworkName),
    /// A network does not let the pod in, or not with what it chooses.
    #[error("{0}")]
    NotAuthorized(Box<AccessRefusal>),
    /// An annotation of the pod is not valid.
    #[error("{0}")]
    InvalidSelection(Box<SelectionError>),
    /// A field of the request is not valid.
    #[error("{field}: {reason}")]
    InvalidField {
        /// The field.
        field: &'static str,
        /// The rule that it breaks.
        reason: String,
    },
    /// The namespace path does not exist.
    #[error("network namespace {} does not exist", .0.display())]
    NetnsNotFound(PathBuf),
    /// A network has no address left.
    #[error("{reason}")]
    AddressesExhausted {
        /// The network.
        network: NetworkName,
        /// The network, the exhausted address family and its figures.
        reason: String,
    },
    /// A requested address is not available.
    #[error("network {network}: {reason}")]
    AddressUnavailable {
        /// The network.
        network: NetworkName,
        /// Why.
        reason: String,
        /// Whether another attachment has it (otherwise the network can never assign it).
        in_use: bool,
    },
    /// A requested address is in no address block of this node.
    #[error(
        "network {network}: {field}: address {address} is in no address block of this node: {}; a fixed address works \
         only on the node that has its block (see kubectl get addressblocks)", block_of(holder.as_ref())
    )]
    AddressElsewhere {
        /// The network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
        /// Where the pod asks for it.
        field: &'static str,
        /// The block that it is in; `None` if the node knows none.
        holder: Option<Holder>,
    },
    /// All endpoint numbers of the node are in use.
    #[error("all {capacity} endpoints of the node are in use")]
    EndpointsExhausted {
        /// How many there are.
        capacity: u32,
    },
    /// The sandbox or the namespace is already attached in another way.
    #[error("{0}")]
    Conflict(String),
    /// A host port of the pod leads to another pod.
    #[error("host port {port} belongs to pod {} (sandbox {})", holder.pod, holder.sandbox)]
    HostPortTaken {
        /// The port, with protocol and address.
        port: String,
        /// The pod that has it.
        holder: Subject,
    },
    /// The work took longer than the agent's own limit. Everything was undone.
    #[error("{step} took longer than {} s; undone", limit.as_secs())]
    Timeout {
        /// The step that was running.
        step: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The agent is about to stop.
    #[error("the agent is stopping: try again")]
    Stopping,
    /// The kernel refused a step.
    #[error("{step}: {reason}")]
    Kernel {
        /// The step.
        step: &'static str,
        /// The driver's error with its causes.
        reason: String,
    },
    /// The network requires XDP on its pod interfaces (`spec.xdp`), which this interface does not support.
    #[error("network {network}: spec.xdp: {reason}")]
    Xdp {
        /// The network.
        network: NetworkName,
        /// The driver's error with its causes.
        reason: String,
    },
    /// The provider of a network cannot make the interface.
    #[error("network {network}: {reason}")]
    Provider {
        /// The network.
        network: NetworkName,
        /// The obstacle.
        reason: String,
        /// Whether the same call may work later.
        retryable: bool,
    },
    /// Policies, egress or host ports of the pod are not enforced, so its traffic may not begin.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The state cannot be written for now, so nothing that must be recorded first may begin.
    #[error("state cannot be written: {0}: try again")]
    Unwritable(String),
    /// The state failed.
    #[error("state: {0}")]
    Store(String),
}

/// Which of the services that guard a pod's traffic failed. All of them retry in the background.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The policies of the pod.
    #[error("its policies cannot be enforced: {0}")]
    Policies(SyncError),
    /// The egress of the pod.
    #[error("its egress cannot be configured: {0}")]
    Egress(UplinkError),
    /// The host ports of the pod.
    #[error("its host ports cannot be opened: {0}")]
    HostPorts(UplinkError),
}

/// The pod and sandbox that an error is about. Both are empty where it is about the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subject {
    /// The pod.
    pub pod: PodRef,
    /// The sandbox, as given; empty before there is one.
    pub sandbox: String,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pod, sandbox } = self;
        match (*self == Self::default(), sandbox.is_empty()) {
            (true, _) => Ok(()),
            (false, true) => write!(f, "pod {pod}: "),
            (false, false) => write!(f, "pod {pod}, sandbox {sandbox}: "),
        }
    }
}

impl From<&AttachRequest> for Subject {
    fn from(request: &AttachRequest) -> Self {
        Self {
            pod: request.pod.clone(),
            sandbox: request.sandbox.to_string(),
        }
    }
}

impl From<&Sandbox> for Subject {
    fn from(sandbox: &Sandbox) -> Self {
        Self {
            pod: sandbox.pod.clone(),
            sandbox: sandbox.id.to_string(),
        }
    }
}

impl Subject {
    /// The node itself.
    pub fn node() -> Self {
        Self::default()
    }

    /// A pod that has no sandbox yet.
    pub fn pod(pod: PodRef) -> Self {
        Self {
            pod,
            sandbox: String::new(),
        }
    }

    /// An error of this kind.
    pub fn error(&self, kind: impl Into<ErrorKind>) -> AttachError {
        AttachError {
            subject: self.clone(),
            kind: kind.into(),
        }
    }

    pub(crate) fn conflict(&self, reason: impl Into<String>) -> AttachError {
        self.error(ErrorKind::Conflict(reason.into()))
    }

    pub(crate) fn not_ready(&self, reason: impl Into<String>) -> AttachError {
        self.error(ErrorKind::NotReady(reason.into()))
    }

    pub(crate) fn invalid(&self, field: &'static str, reason: impl Into<String>) -> AttachError {
        let reason = reason.into();
        self.error(ErrorKind::InvalidField { field, reason })
    }

    pub(crate) fn timeout(&self, step: &'static str, limit: Duration) -> AttachError {
        self.error(ErrorKind::Timeout { step, limit })
    }

    /// An obstacle at the provider of a network.
    pub(crate) fn provider(&self, network: &NetworkName, reason: impl Into<String>, retryable: bool) -> AttachError {
        self.error(ErrorKind::Provider {
            network: network.clone(),
            reason: reason.into(),
            retryable,
        })
    }

    /// A step that a driver refused.
    pub(crate) fn kernel(&self, step: &'static str, error: &dyn std::error::Error) -> AttachError {
        let reason = error_chain(error);
        self.error(ErrorKind::Kernel { step, reason })
    }

    /// Likewise, for `map_err`.
    pub(crate) fn failed<E: std::error::Error>(&self, step: &'static str) -> impl FnOnce(E) -> AttachError {
        let subject = self.clone();
        move |error| subject.kernel(step, &error)
    }

    /// A task that ended without a result: a panic, or the end of the runtime.
    pub(crate) fn ended(&self, error: &dyn std::error::Error) -> AttachError {
        self.kernel("running the task", error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_pod_and_the_sandbox_they_have() {
        let pod = PodRef::named("shop", "web");
        let sandbox = "abc".to_owned();
        for (subject, text) in [
            (Subject::node(), "cannot"),
            (Subject::pod(pod.clone()), "pod shop/web: cannot"),
            (Subject { pod, sandbox }, "pod shop/web, sandbox abc: cannot"),
        ] {
            assert_eq!(subject.conflict("cannot").to_string(), text);
        }
    }

    #[test]
    fn an_address_of_another_node_is_an_error_that_names_it() {
        let error = || {
            Subject::pod(PodRef::named("shop", "web")).error(ErrorKind::AddressElsewhere {
                network: "red".parse().unwrap(),
                address: IpAddr::from([10, 0, 0, 9]),
                field: "kni.dev/ips",
                holder: None,
            })
        };
        let holder = Holder {
            block: "red.v4-10-0-0-0-26".to_owned(),
            node: "n2".to_owned(),
        };
        for (holder, named) in [
            (Some(holder), "node n2 has it by AddressBlock red.v4-10-0-0-0-26"),
            (None, "another node has its block, or may claim it"),
        ] {
            let expected = format!(
                "pod shop/web: network red: kni.dev/ips: address 10.0.0.9 is in no address block of this node: {named}; \
                 a fixed address works only on the node that has its block (see kubectl get addressblocks)"
            );
            assert_eq!(error().with_holder(|_, _| holder).to_string(), expected);
        }
    }
}
