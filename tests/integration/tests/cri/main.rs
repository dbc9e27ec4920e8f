//! Tests with real container runtimes: containerd, a kubelet, and the agent deployed as a pod.

mod containerd;
mod deploy;
mod kubelet;
