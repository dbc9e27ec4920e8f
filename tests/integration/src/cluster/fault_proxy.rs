//! Runs a proxy between one agent and the API server, which makes requests fail as a test demands.
//!
//! The agent speaks plain HTTP with it, inside its node; the proxy has the agent's certificate. Everything that the API
//! server executes is thereby real, and only what the agent learns of it is wrong.

mod faults;
mod forward;

use std::sync::Arc;

use anyhow::{Context as _, Result};
pub use faults::{Fault, Faults, Rule};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{
    net::TcpListener,
    task::{JoinHandle, JoinSet},
};

use self::forward::Upstream;
use crate::namespaces::Namespaces;

/// The proxy of one agent. Dropping it ends all connections.
pub struct FaultProxy {
    /// What it does to requests.
    pub faults: Arc<Faults>,
    server: JoinHandle<()>,
}

impl FaultProxy {
    /// Starts a proxy inside `node` that connects from `fabric` as the user of `kubeconfig`. Returns the proxy and the
    /// kubeconfig of its clients.
    pub async fn start(node: &Namespaces, fabric: &Namespaces, kubeconfig: &str) -> Result<(Self, String)> {
        let listener = node.enter(|| std::net::TcpListener::bind("127.0.0.1:0"))??;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = TcpListener::from_std(listener)?;
        let upstream = Arc::new(Upstream::new(fabric, kubeconfig).await?);
        let faults = Arc::new(Faults::default());
        let server = tokio::spawn(accept(listener, upstream, Arc::clone(&faults)));
        let client = redirected(kubeconfig, &format!("http://{address}"))?;
        Ok((Self { faults, server }, client))
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The kubeconfig with another address of the API server.
fn redirected(kubeconfig: &str, server: &str) -> Result<String> {
    let mut config: Value = serde_json::from_str(kubeconfig).context("kubeconfig")?;
    let clusters = config["clusters"].as_array_mut().context("no clusters")?;
    for cluster in clusters {
        cluster["cluster"]["server"] = server.into();
    }
    Ok(config.to_string())
}

async fn accept(listener: TcpListener, upstream: Arc<Upstream>, faults: Arc<Faults>) {
    // The connections end with this task.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (upstream, faults) = (Arc::clone(&upstream), Arc::clone(&faults));
        let service = service_fn(move |request| {
            let (upstream, faults) = (Arc::clone(&upstream), Arc::clone(&faults));
            async move { forward::answer(request, &upstream, &faults).await }
        });
        connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        while connections.try_join_next().is_some() {}
    }
}
