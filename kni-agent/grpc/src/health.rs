//! The standard gRPC health service of the agent's sockets.
//!
//! Service `""` and `kni.KNI` follow the agent's readiness. `kni.runtime.v1.Runtime` serves as long as the process
//! does, so a liveness check asks for that one.

use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

/// Services that are served only while pods can be attached.
const BY_READINESS: [&str; 2] = ["", "kni.KNI"];
/// Service that is served as long as the process lives.
const ALWAYS: &str = "kni.runtime.v1.Runtime";

/// Says to health clients whether the agent serves. Clones say it to the same clients.
#[derive(Debug, Clone)]
pub struct Health {
    reporter: HealthReporter,
}

impl Health {
    /// Not ready yet.
    pub async fn new() -> Self {
        let health = Self {
            reporter: HealthReporter::new(),
        };
        health.set_ready(false).await;
        health.reporter.set_service_status(ALWAYS, ServingStatus::Serving).await;
        health
    }

    /// Tells whether pods can be attached.
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

    /// Says "not serving" for good and ends the streams of clients that watch, which would hold up a graceful stop.
    pub(super) async fn stop(mut self) {
        self.set_ready(false).await;
        self.reporter
            .set_service_status(ALWAYS, ServingStatus::NotServing)
            .await;
        for service in BY_READINESS.into_iter().chain([ALWAYS]) {
            self.reporter.clear_service_status(service).await;
        }
    }

    /// The service that answers from this handle.
    pub(super) fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }
}
