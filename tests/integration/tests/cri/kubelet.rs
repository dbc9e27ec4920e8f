//! Tests a real kubelet in a cluster of one node, whose containerd reaches the agent through KNI's CNI plugin.

mod churn;
mod exhaustion;
mod joined;
mod kni;
mod pods;
mod ready;
mod restarts;
mod scene;
mod static_pods;
