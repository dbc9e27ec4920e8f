//! Tests the gRPC layer over real sockets, with a fake backend.

mod fake;
mod inspect;
mod kni;
mod pod_network;
mod raw;
mod runtime;
mod serving;

use std::{future::Future, path::PathBuf, sync::Arc, time::Duration};

use tempfile::TempDir;
use tokio::{sync::oneshot, task::JoinHandle};
use tonic::transport::{Channel, Endpoint};

use self::fake::Fake;
use super::{Health, ServeError, Services, Sockets, UnknownKeys, bind, server::serve_limited};

/// A running server in a folder of its own.
struct Served {
    folder: TempDir,
    backend: Fake,
    unknown_keys: UnknownKeys,
    health: Health,
    stop: Option<oneshot::Sender<()>>,
    server: JoinHandle<Result<(), ServeError>>,
}

impl Served {
    async fn start() -> Self {
        Self::with_connections(256).await
    }

    /// Serves on the sockets "one" and "two"; a file is in the way of "taken".
    async fn with_connections(max: usize) -> Self {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let folder = tempfile::Builder::new().permissions(mode).tempdir().unwrap();
        std::fs::write(folder.path().join("taken"), "").unwrap();
        let paths = ["one", "two", "taken"].map(|name| folder.path().join(name));
        let mut refused = Vec::new();
        let sockets = Sockets {
            kni: bind(&paths, &mut refused).unwrap(),
            pod_network: bind(&[folder.path().join("pods")], &mut refused).unwrap(),
            refused,
        };
        let (backend, health) = (Fake::default(), Health::new().await);
        let unknown_keys = UnknownKeys::default();
        let (stop, stopped) = oneshot::channel();
        let services = Services {
            backend: backend.clone(),
            inspector: Arc::new(backend.clone()),
            setup: Arc::new(backend.clone()),
            in_cluster: false,
            unknown_keys: unknown_keys.clone(),
        };
        let reporting = health.clone();
        let server = tokio::spawn(async move {
            let told = async { stopped.await.unwrap() };
            serve_limited(sockets, services, reporting, told, max).await
        });
        Self {
            folder,
            backend,
            unknown_keys,
            health,
            stop: Some(stop),
            server,
        }
    }

    fn path(&self, socket: &str) -> PathBuf {
        self.folder.path().join(socket)
    }

    async fn connect(&self, socket: &str) -> Channel {
        let address = format!("unix://{}", self.path(socket).display());
        Endpoint::from_shared(address).unwrap().connect().await.unwrap()
    }

    fn request_stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    async fn stop(mut self) {
        self.request_stop();
        soon(&mut self.server).await.unwrap().unwrap();
    }
}

/// Fails the test if the future exceeds the common time limit.
async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(8), future)
        .await
        .expect("took too long")
}

/// Waits for a condition that another task fulfils.
async fn until(mut holds: impl FnMut() -> bool) {
    soon(async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}
