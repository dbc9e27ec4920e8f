//! Tests with real container runtimes: containerd, a kubelet, the agent deployed as a pod, and clusters of several
//! nodes.

mod containerd;
mod deploy;
mod kubelet;
mod nodes;
