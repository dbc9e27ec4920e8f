//! Prepares the parts of the node again when a client calls `SetupNodeNetwork`.

use kni_grpc::{Outcome, PreparedPart, Setup};
use kni_model::{error_chain, view::UplinkView};

use super::Node;

impl Setup for Node {
    /// Each step examines the kernel and writes only what is missing, so that running pods notice nothing.
    fn prepare(&self) -> Vec<PreparedPart> {
        let part = |name, outcome| PreparedPart { name, outcome };
        vec![
            part("bpffs", self.prepare_pins()),
            part("tables", self.prepare_tables()),
            part("uplink", self.prepare_uplink()),
            part("networks", self.check_networks()),
            part("pool", self.prepare_pool()),
        ]
    }
}

impl Node {
    /// The BPF file system with the pins of maps and programs.
    fn prepare_pins(&self) -> Outcome {
        match self.dataplane.restore_pins() {
            Ok(0) => Outcome::Ok,
            Ok(_count) => Outcome::Prepared,
            Err(error) => Outcome::Failed(error_chain(&error)),
        }
    }

    /// The maps of policies and Services.
    fn prepare_tables(&self) -> Outcome {
        match self.sync.sync() {
            Ok(report) if report.policy_rows == 0 && report.service_rows == 0 => Outcome::Ok,
            Ok(_report) => Outcome::Prepared,
            Err(error) => Outcome::Failed(error_chain(&error)),
        }
    }

    /// The interface through which pods leave the node, with its programs and addresses.
    fn prepare_uplink(&self) -> Outcome {
        let before = self.uplink.view();
        self.uplink.check_programs();
        if let Err(error) = self.uplink.sync() {
            return Outcome::Failed(error_chain(&error));
        }
        if let Some(problem) = self.uplink.problem() {
            return Outcome::Failed(problem);
        }
        if same_interface(&before, &self.uplink.view()) {
            Outcome::Ok
        } else {
            Outcome::Prepared
        }
    }

    /// The networks, which come from Kubernetes or the manifests; no call of a client can make them.
    fn check_networks(&self) -> Outcome {
        let obstacles = self.inspector.obstacles();
        if obstacles.is_empty() {
            Outcome::Ok
        } else {
            Outcome::Failed(obstacles.join("; "))
        }
    }

    /// The namespaces that are made before a pod needs them.
    fn prepare_pool(&self) -> Outcome {
        if self.attacher.refill_pool() {
            Outcome::Ok
        } else {
            Outcome::Prepared
        }
    }
}

/// Compares what the preparation can change; the number of host ports changes with the pods.
fn same_interface(before: &UplinkView, after: &UplinkView) -> bool {
    (before.ifindex, &before.sources, &before.programs) == (after.ifindex, &after.sources, &after.programs)
}
