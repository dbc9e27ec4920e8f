//! Defines the command line of kni-controller.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;
use tracing_subscriber::{EnvFilter, filter::ParseError};

use crate::controllers::REST;

/// Writes what concerns no single node: status and finalizers of networks, attachments and egress policies, taints and
/// extended resources of nodes, and the removal of what nodes that left the cluster have left behind. Of several
/// replicas one acts at a time.
#[derive(Debug, Clone, Parser)]
#[command(version)]
pub(crate) struct Args {
    /// Kubeconfig file. Default: the environment, else the service account of the pod.
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease.
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = "kni-system")]
    pub(crate) namespace: String,
    /// Name of this replica in the Lease, with a random suffix. Default: the hostname.
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    pub(crate) name: Option<String>,
    /// Address of `/healthz`, `/readyz` and `/metrics`. The default is reachable from the node only; of two replicas on
    /// one node, one has it.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9631")]
    pub(crate) health_address: SocketAddr,
    /// Seconds that the number of a network rests after the network is gone. For tests: nodes may use it meanwhile.
    #[arg(long, value_name = "SECONDS", hide = true, default_value_t = REST.as_secs())]
    pub(crate) number_rest: u64,
    /// Log filter, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info", value_parser = filter)]
    pub(crate) log: String,
}

fn filter(text: &str) -> Result<String, ParseError> {
    EnvFilter::try_new(text).map(|_valid| text.to_owned())
}
