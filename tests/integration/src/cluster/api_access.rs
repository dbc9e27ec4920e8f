//! Connects tests to the API server, whose address is reachable on the fabric only.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::{
    Client, Config,
    client::{Body, ConfigExt as _},
    config::{KubeConfigOptions, Kubeconfig},
};
use tonic::transport::Uri;
use tower::{BoxError, ServiceBuilder};

use crate::namespaces::Namespaces;

/// Timeout of a connection attempt.
const PATIENCE: Duration = Duration::from_secs(2);

/// A client that connects from inside `ns`, as the user of `kubeconfig`.
pub async fn connect(ns: &Namespaces, kubeconfig: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).context("kubeconfig")?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .context("kubeconfig")?;
    let inside = ns.clone();
    let connector = tower::service_fn(move |uri: Uri| {
        let inside = inside.clone();
        async move { dial(inside, &uri).await }
    });
    let connector = config.rustls_https_connector_with_connector(connector)?;
    let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(connector);
    // A certificate or a token identifies the user.
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}

pub(super) async fn dial(inside: Namespaces, uri: &Uri) -> io::Result<TokioIo<tokio::net::TcpStream>> {
    let host = uri.host().ok_or_else(|| io::Error::other("no host"))?;
    let address = host.parse().map_err(io::Error::other)?;
    let address = SocketAddr::new(address, uri.port_u16().unwrap_or(443));
    let connect = move || {
        inside
            .enter(|| TcpStream::connect_timeout(&address, PATIENCE))
            .map_err(io::Error::other)?
    };
    let stream = tokio::task::spawn_blocking(connect).await??;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(tokio::net::TcpStream::from_std(stream)?))
}
