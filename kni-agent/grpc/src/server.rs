//! Serves all services on all sockets, with limits that keep one client from exhausting the agent.

use std::{io, path::PathBuf, time::Duration};

use kni_proto::{
    kni::kni_server::KniServer,
    networking::{
        pod_network_lifecycle_server::PodNetworkLifecycleServer,
        pod_network_management_server::PodNetworkManagementServer,
    },
    runtime::runtime_server::RuntimeServer,
};
use tokio::sync::watch;
use tonic::{service::Routes, transport::Server};

use super::{
    accept,
    backend::Backend,
    health::Health,
    kni_service::KniService,
    pod_network_service::PodNetworkService,
    runtime_service::RuntimeService,
    services::Services,
    socket::{BindError, BoundSocket},
};

/// Largest request, in bytes. A pod's labels and annotations stay far below.
const MAX_REQUEST: usize = 4 * 1024 * 1024;
/// Connections at once. Each costs one file descriptor.
const MAX_CONNECTIONS: usize = 256;
/// Concurrent calls on one connection. The kubelet sends the calls of all pods on one.
const MAX_CALLS: u16 = 1024;
/// Idle time before a keepalive ping, and the time limit for its answer.
const KEEPALIVE: (Duration, Duration) = (Duration::from_mins(1), Duration::from_secs(20));
/// How long running calls may continue after the request to stop.
const GRACE: Duration = Duration::from_secs(10);

/// Why serving ended early.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A listener could not be registered with the runtime.
    #[error("gRPC listener: {0}")]
    Listener(#[from] io::Error),
    /// The descriptors of the services do not decode.
    #[error("gRPC reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The transport failed.
    #[error("gRPC transport: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// The sockets of the services. A runtime that is given the second kind reaches only the services that it needs.
#[derive(Debug, Default)]
pub struct Sockets {
    /// `kni.KNI` and `kni.runtime.v1`.
    pub kni: Vec<BoundSocket>,
    /// containerd's `PodNetworkLifecycle` and `PodNetworkManagement`.
    pub pod_network: Vec<BoundSocket>,
    /// Why there are no other ones.
    pub refused: Vec<BindError>,
}

/// Serves on all sockets until `shutdown` resolves. Then new connections are refused, the socket files are removed,
/// streams end, and running calls have ten seconds. Returns `Ok` after a requested stop.
pub async fn serve<B: Backend>(
    sockets: Sockets,
    services: Services<B>,
    health: Health,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeError> {
    serve_limited(sockets, services, health, shutdown, MAX_CONNECTIONS).await
}

/// [`serve`] with a given limit of connections for each kind of socket.
pub(super) async fn serve_limited<B: Backend>(
    sockets: Sockets,
    services: Services<B>,
    health: Health,
    shutdown: impl Future<Output = ()> + Send,
    max_connections: usize,
) -> Result<(), ServeError> {
    let (stop, stopping) = watch::channel(false);
    let all = sockets.kni.iter().chain(&sockets.pod_network);
    let paths: Vec<PathBuf> = all.map(|socket| socket.path().to_owned()).collect();
    let pod_network = pod_network_routes(services.clone(), &health)?;
    let runtime = RuntimeService::new(services.clone(), &paths, &sockets.refused, stopping.clone());
    let routes = routes(services, runtime, &health)?;
    let told = async {
        shutdown.await;
        health.stop().await;
        stop.send_replace(true);
    };
    let incoming = accept::incoming(sockets.kni, max_connections)?;
    let main = Box::pin(server().add_routes(routes).serve_with_incoming_shutdown(incoming, told));
    let incoming = accept::incoming(sockets.pod_network, max_connections)?;
    let also_told = stopped(stopping.clone());
    let other = server().add_routes(pod_network);
    let other = Box::pin(other.serve_with_incoming_shutdown(incoming, also_told));
    tokio::select! {
        served = async { tokio::try_join!(main, other) } => {
            served?;
            Ok(())
        }
        () = overdue(stopping) => {
            tracing::warn!("calls are still running {} s after the order to stop", GRACE.as_secs());
            Ok(())
        }
    }
}

fn server() -> Server {
    Server::builder()
        .concurrency_limit_per_connection(MAX_CALLS.into())
        .max_concurrent_streams(u32::from(MAX_CALLS))
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
}

fn routes<B: Backend>(
    services: Services<B>,
    runtime: RuntimeService<B>,
    health: &Health,
) -> Result<Routes, tonic_reflection::server::Error> {
    let kni = KniServer::new(KniService::new(services)).max_decoding_message_size(MAX_REQUEST);
    let runtime = RuntimeServer::new(runtime).max_decoding_message_size(MAX_REQUEST);
    // Older tools ask for reflection by its v1alpha name.
    Ok(Routes::new(kni)
        .add_service(runtime)
        .add_service(health.service())
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?))
}

fn pod_network_routes<B: Backend>(
    services: Services<B>,
    health: &Health,
) -> Result<Routes, tonic_reflection::server::Error> {
    let service = PodNetworkService::new(services);
    let lifecycle = PodNetworkLifecycleServer::new(service.clone()).max_decoding_message_size(MAX_REQUEST);
    let management = PodNetworkManagementServer::new(service).max_decoding_message_size(MAX_REQUEST);
    Ok(Routes::new(lifecycle)
        .add_service(management)
        .add_service(health.service())
        .add_service(reflection().build_v1()?))
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(kni_proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// Resolves when the stop is requested.
async fn stopped(mut stopping: watch::Receiver<bool>) {
    if stopping.wait_for(|stopping| *stopping).await.is_err() {
        // Serving ended without a request to stop.
        std::future::pending::<()>().await;
    }
}

/// Resolves when the grace period after the request to stop is over.
async fn overdue(stopping: watch::Receiver<bool>) {
    stopped(stopping).await;
    tokio::time::sleep(GRACE).await;
}
