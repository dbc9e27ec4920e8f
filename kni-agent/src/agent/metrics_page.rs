//! Serves the metrics page as soon as its address is available.

use std::{future::pending, net::SocketAddr, sync::Arc, time::Duration};

use kni_http as http;
use kni_http::{Probe, Probes};
use tokio::net::TcpListener;

use super::Node;

/// Pause between attempts: an earlier agent may still have the address (rolling update), or the loopback interface is
/// not up yet.
const RETRY: Duration = Duration::from_secs(1);

/// Ends when its task is aborted. An unavailable address delays no pod: it is retried until it is available.
pub(super) async fn serve(address: SocketAddr, node: Node) {
    let listener = kni_tasks::waiting(bind(address)).await;
    tracing::info!(%address, "serving metrics");
    let inspector = node.inspector.clone();
    let readiness: Probe = Arc::new(move || {
        let obstacles = inspector.obstacles();
        if obstacles.is_empty() {
            Ok(())
        } else {
            Err(obstacles.join("; "))
        }
    });
    let tasks = node.tasks.clone();
    let liveness: Probe = Arc::new(move || {
        let stale = tasks.stale();
        if stale.is_empty() {
            Ok(())
        } else {
            Err(format!("these tasks make no progress: {}", stale.join(", ")))
        }
    });
    let probes = Probes { readiness, liveness };
    kni_tasks::waiting(http::serve(listener, Arc::new(node), probes, pending())).await;
}

async fn bind(address: SocketAddr) -> TcpListener {
    let mut logged = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => {
                if !logged {
                    tracing::warn!(%address, %error, "cannot serve metrics yet, will try again");
                    logged = true;
                }
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}
