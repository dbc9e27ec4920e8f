//! A real containerd, driven as the kubelet drives it, that reaches the agent through our CNI plugin.

mod burst;
mod networks;
mod reboot;
mod restart;
mod scene;
mod status;
