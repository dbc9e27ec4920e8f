//! Connects to the API server with a kubeconfig file or the service account of the agent's pod.

use std::path::Path;

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};
use tower::util::MapRequestLayer;

use super::{
    pace::Paced,
    requests::{Bounded, Interruptions, RequestCounts, RequestLimits},
    streamed,
};

/// Why no client could be created. The API server itself is not contacted: it may be unavailable.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig file cannot be used.
    #[error("kubeconfig {path}: {source}")]
    Kubeconfig {
        /// The file.
        path: String,
        /// The cause.
        source: Box<kube::config::KubeconfigError>,
    },
    /// There is neither a kubeconfig nor a service account.
    #[error("cannot reach the API server with --kubeconfig, KUBECONFIG or the service account of the pod: {0}")]
    Infer(#[source] Box<kube::config::InferConfigError>),
    /// Certificates or keys cannot be used.
    #[error("making the client: {0}")]
    Client(#[source] Box<kube::Error>),
}

/// Whose requests a client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// One of many agents. All its loops share one pace.
    Agent,
    /// kni-controller, of which one replica acts: each object has its own pauses.
    Controller,
    /// A program that ends with the first error.
    Job,
}

/// A client, with the counters of its requests.
#[derive(Clone)]
pub struct Connection {
    /// The client. Every request ends within the limits.
    pub client: Client,
    /// Counts its requests.
    pub requests: RequestCounts,
    /// Notifies of its interrupted watches.
    pub interruptions: Interruptions,
}

/// Creates the client of `sender`. Sends nothing.
pub async fn connect(
    kubeconfig: Option<&Path>,
    limits: RequestLimits,
    sender: Sender,
) -> Result<Connection, ClientError> {
    let mut config = match kubeconfig {
        Some(path) => from_file(path).await?,
        None => Config::infer()
            .await
            .map_err(|error| ClientError::Infer(Box::new(error)))?,
    };
    // It would send each request of an overloaded API server up to 15 times more; our loops know when to try again.
    config.default_retry = matches!(sender, Sender::Job);
    let (requests, interruptions) = (RequestCounts::default(), Interruptions::default());
    let bounded = Bounded {
        limits,
        counts: requests.clone(),
        interruptions: interruptions.clone(),
    };
    let builder = ClientBuilder::try_from(config).map_err(|error| ClientError::Client(Box::new(error)))?;
    let newest = MapRequestLayer::new(streamed::newest);
    let client = match sender {
        Sender::Agent => {
            let paced = Paced::new(limits, &interruptions);
            // The limits include the time for which a request is held back.
            builder
                .with_layer(&paced)
                .with_layer(&bounded)
                .with_layer(&newest)
                .build()
        }
        Sender::Controller | Sender::Job => builder.with_layer(&bounded).with_layer(&newest).build(),
    };
    Ok(Connection {
        client,
        requests,
        interruptions,
    })
}

async fn from_file(path: &Path) -> Result<Config, ClientError> {
    let refused = |source| ClientError::Kubeconfig {
        path: path.display().to_string(),
        source: Box::new(source),
    };
    let file = Kubeconfig::read_from(path).map_err(refused)?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(refused)
}
