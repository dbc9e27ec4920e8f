//! Implements the standard gRPC health service on the agent's sockets.
//!
//! Services `""` and `kni.KNI` follow the agent's readiness. `kni.runtime.v1.Runtime` is served as long as the process
//! runs, so a liveness check queries that one.

use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

/// Services that are served only while pods can be attached.
const BY_READINESS: [&str; 2] = ["", "kni.KNI"];
/// Service that is served as long as the process runs.
const ALWAYS: &str = "kni.runtime.v1.Runtime";

/// Reports to health clients whether the agent serves. Clones report to the same clients.
#[derive(Debug, Clone)]
pub struct Health {
    reporter: HealthReporter,
}

impl Health {
    /// Starts as not ready.
    pub async fn new() -> Self {
        let health = Self {
            reporter: HealthReporter::new(),
        };
        health.set_ready(false).await;
        health.reporter.set_service_status(ALWAYS, ServingStatus::Serving).await;
        health
    }

    /// Reports whether pods can be attached.
    pub async fn set_ready(&self, ready: bool) {
        let status = if ready {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        for service in BY_READINESS {
            self.reporter.set_service_status(service, status).await;
        }
    }

    /// Reports "not serving" permanently and ends the streams of watching clients, which would delay a graceful stop.
    pub(super) async fn stop(mut self) {
        self.set_ready(false).await;
        self.reporter
            .set_service_status(ALWAYS, ServingStatus::NotServing)
            .await;
        for service in BY_READINESS.into_iter().chain([ALWAYS]) {
            self.reporter.clear_service_status(service).await;
        }
    }

    /// The health service that reports this state.
    pub(super) fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }
}
