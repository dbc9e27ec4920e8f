//! Tests a real containerd, called as by the kubelet, which reaches the agent through KNI's CNI plugin.

mod burst;
mod networks;
mod reboot;
mod restart;
mod scene;
mod status;
