//! The way to the API server: from a file, or from the service account of the pod that the agent runs in.

use std::path::Path;

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

/// Why no client could be made. The API server itself is not asked: it may be away.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The file that was named cannot be used.
    #[error("kubeconfig {path}: {source}")]
    Kubeconfig {
        /// The file.
        path: String,
        /// Why.
        source: Box<kube::config::KubeconfigError>,
    },
    /// Neither KUBECONFIG nor a service account is there.
    #[error(
        "neither --kubeconfig, nor KUBECONFIG, nor the service account of a pod tells how to reach the API server: {0}"
    )]
    Infer(#[source] Box<kube::config::InferConfigError>),
    /// Certificates or keys cannot be used.
    #[error("making the client: {0}")]
    Client(#[source] Box<kube::Error>),
}

/// Makes a client. Sends nothing.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let config = match kubeconfig {
        Some(path) => from_file(path).await?,
        None => Config::infer()
            .await
            .map_err(|error| ClientError::Infer(Box::new(error)))?,
    };
    Client::try_from(config).map_err(|error| ClientError::Client(Box::new(error)))
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
