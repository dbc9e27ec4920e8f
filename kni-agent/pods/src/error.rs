//! What can go wrong with an attachment; the edge maps each case to one gRPC code.

use std::path::PathBuf;

use kni_model::{NetworkName, PodRef, SandboxId, SelectionError};

/// Why a call of the [`Attacher`](super::Attacher) failed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The networks are not known yet.
    #[error("the agent has not read its networks yet: try again")]
    NotInSync,
    /// Something that the attach needs is not known or not there yet.
    #[error("pod {pod}, sandbox {sandbox}: {reason}: try again")]
    NotReady {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// What is missing.
        reason: String,
    },
    /// No network is the default one, and the pod asks for none.
    #[error("pod {pod}: no network is the default one (a PodNetwork with spec.default: true)")]
    NoDefaultNetwork {
        /// The pod.
        pod: PodRef,
    },
    /// A network that the pod asks for does not exist.
    #[error("pod {pod}: network {network} does not exist")]
    UnknownNetwork {
        /// The pod.
        pod: PodRef,
        /// The network.
        network: NetworkName,
    },
    /// The network takes no new attachments.
    #[error("pod {pod}: network {network} is disabled (spec.enabled: false)")]
    NetworkDisabled {
        /// The pod.
        pod: PodRef,
        /// The network.
        network: NetworkName,
    },
    /// An annotation of the pod is not valid.
    #[error("pod {pod}: {source}")]
    InvalidSelection {
        /// The pod.
        pod: PodRef,
        /// What is wrong.
        source: Box<SelectionError>,
    },
    /// A field of the request is not valid.
    #[error("pod {pod}, sandbox {sandbox}: {field}: {reason}")]
    InvalidField {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// The field.
        field: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The namespace path does not exist.
    #[error("pod {pod}, sandbox {sandbox}: network namespace {} does not exist", path.display())]
    NetnsNotFound {
        /// The pod.
        pod: PodRef,
        /// The sandbox.
        sandbox: SandboxId,
        /// The path.
        path: PathBuf,
    },
    /// A network has no address left.
    #[error("pod {pod}, sandbox {sandbox}: network {network}: {reason}")]
    AddressesExhausted {
        /// The pod.
        pod: PodRef,
        /// The sandbox.
        sandbox: SandboxId,
        /// The network.
        network: NetworkName,
        /// Which family.
        reason: String,
    },
    /// An address that was asked for cannot be had.
    #[error("pod {pod}, sandbox {sandbox}: network {network}: {reason}")]
    AddressUnavailable {
        /// The pod.
        pod: PodRef,
        /// The sandbox.
        sandbox: SandboxId,
        /// The network.
        network: NetworkName,
        /// Why.
        reason: String,
        /// Whether another attachment has it (else the address can never be had).
        in_use: bool,
    },
    /// The node has no room for another endpoint.
    #[error("pod {pod}, sandbox {sandbox}: all {capacity} endpoints of the node are in use")]
    EndpointsExhausted {
        /// The pod.
        pod: PodRef,
        /// The sandbox.
        sandbox: SandboxId,
        /// How many there are.
        capacity: u32,
    },
    /// The sandbox, or the namespace, is attached in another way already.
    #[error("pod {pod}, sandbox {sandbox}: {reason}")]
    Conflict {
        /// The pod.
        pod: PodRef,
        /// The sandbox.
        sandbox: SandboxId,
        /// What stands in the way.
        reason: String,
    },
    /// A port of the node that the pod wants leads to another pod.
    #[error("pod {pod}, sandbox {sandbox}: host port {port} belongs to pod {holder} (sandbox {holder_sandbox})")]
    HostPortTaken {
        /// The pod.
        pod: PodRef,
        /// The sandbox.
        sandbox: SandboxId,
        /// The port, with protocol and address.
        port: String,
        /// Whose it is.
        holder: PodRef,
        /// The sandbox whose it is.
        holder_sandbox: SandboxId,
    },
    /// The work took longer than the agent allows itself. Everything was undone.
    #[error("pod {pod}, sandbox {sandbox}: {step} took longer than {seconds} s; undone")]
    Timeout {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// What was being done.
        step: &'static str,
        /// The bound.
        seconds: u64,
    },
    /// The agent is about to stop.
    #[error("the agent is stopping: try again")]
    Stopping,
    /// The kernel refused a step.
    #[error("pod {pod}, sandbox {sandbox}: {step}: {reason}")]
    Kernel {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// What was being done.
        step: &'static str,
        /// The driver's error with its chain.
        reason: String,
    },
    /// The network wants XDP on its pod interfaces (`spec.xdp`), and this one cannot have it.
    #[error("pod {pod}, sandbox {sandbox}: network {network}: spec.xdp: {reason}")]
    Xdp {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// The network.
        network: NetworkName,
        /// The driver's error with its chain.
        reason: String,
    },
    /// The provider of a network cannot do its part.
    #[error("pod {pod}, sandbox {sandbox}: network {network}: {reason}")]
    Provider {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// The network.
        network: NetworkName,
        /// What stands in the way, in the provider's words.
        reason: String,
        /// Whether the same call may work later.
        again: bool,
    },
    /// The pod's policies are not in force, so its traffic may not begin.
    #[error("pod {pod}, sandbox {sandbox}: its policies cannot be put into force: {reason}")]
    Policy {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// What went wrong.
        reason: String,
    },
    /// The pod's ports of the node, or its way out of it, are not in force.
    #[error("pod {pod}, sandbox {sandbox}: its ports of the node cannot be opened: {reason}")]
    HostPorts {
        /// The pod.
        pod: PodRef,
        /// The sandbox, as given.
        sandbox: String,
        /// What went wrong.
        reason: String,
    },
    /// The state could not be written.
    #[error("state: {0}")]
    Store(String),
}

/// An error with everything it was caused by, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// A failure that concerns no pod.
pub(super) fn kernel_of_node(step: &'static str, error: &dyn std::error::Error) -> AttachError {
    AttachError::Kernel {
        pod: PodRef::default(),
        sandbox: String::new(),
        step,
        reason: chain(error),
    }
}

/// A task that ended without an answer: a panic, or the runtime's end.
pub(super) fn ended(error: &tokio::task::JoinError) -> AttachError {
    kernel_of_node("running the task", error)
}

/// Makes step errors for one sandbox.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) pod: PodRef,
    pub(super) sandbox: String,
}

impl Subject {
    /// Names the step that failed.
    pub(super) fn failed<E: std::error::Error>(&self, step: &'static str) -> impl FnOnce(E) -> AttachError {
        let Self { pod, sandbox } = self.clone();
        move |error| AttachError::Kernel {
            pod,
            sandbox,
            step,
            reason: chain(&error),
        }
    }
}
