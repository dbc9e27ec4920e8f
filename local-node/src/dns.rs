//! Runs the DNS of a cluster: `CoreDNS` as a Deployment behind the Service `kube-dns`.

use std::time::Duration;

use anyhow::Result;

use crate::{image, local::LocalNode};

const PATIENCE: Duration = Duration::from_mins(2);
/// Service account, RBAC rules, configuration, Service and Deployment.
const MANIFEST: &str = include_str!("../manifests/coredns.yaml");

impl LocalNode {
    /// Imports the image of `CoreDNS`, creates its objects and waits until it is available. The node must be ready for
    /// pods of the default network.
    pub fn start_dns(&mut self) -> Result<()> {
        self.import_dns()?;
        self.apply_text(&manifest(1))?;
        let available = "jsonpath={.status.availableReplicas}";
        let arguments = ["-n", "kube-system", "get", "deployment", "coredns", "-o", available];
        self.wait("CoreDNS is available", PATIENCE, |node| {
            Ok(node.kubectl(&arguments)? == "1")
        })
    }

    /// Imports the image of `CoreDNS`.
    pub(crate) fn import_dns(&self) -> Result<()> {
        self.import(image::DNS, &self.programs().path("coredns"))
    }
}

/// The objects of `CoreDNS` with a number of pods, if possible on different nodes.
pub(crate) fn manifest(replicas: usize) -> String {
    MANIFEST.replace("replicas: 1\n", &format!("replicas: {replicas}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn the_manifest_has_the_names_that_the_node_knows() {
        assert!(MANIFEST.contains(&format!("image: {}\n", image::DNS)));
        assert!(MANIFEST.contains(&format!("clusterIP: {}\n", config::DNS)));
    }

    #[test]
    fn the_number_of_pods_is_set_once() {
        assert_eq!(manifest(1), MANIFEST);
        assert_eq!(manifest(2).matches("replicas: 2\n").count(), 1);
    }
}
