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
        self.import(image::DNS, &self.programs().path("coredns"))?;
        self.apply_text(MANIFEST)?;
        let available = "jsonpath={.status.availableReplicas}";
        let arguments = ["-n", "kube-system", "get", "deployment", "coredns", "-o", available];
        self.wait("CoreDNS is available", PATIENCE, |node| {
            Ok(node.kubectl(&arguments)? == "1")
        })
    }
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
}
