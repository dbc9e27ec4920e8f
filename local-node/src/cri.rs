//! Calls containerd through the container runtime interface, as the kubelet does.

use std::{collections::BTreeMap, net::IpAddr, os::unix::net::UnixStream, time::Duration};

use anyhow::{Context as _, Result, ensure};
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::{image, namespaces::Namespaces};

/// The messages and clients of the interface.
#[expect(
    missing_docs,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated"
)]
pub mod v1 {
    tonic::include_proto!("runtime.v1");
}

use v1::{image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient};

/// Longer than any call should take, even one of 150 concurrent calls.
const DEADLINE: Duration = Duration::from_mins(2);

/// A connection to a container runtime.
#[derive(Debug, Clone)]
pub struct Cri {
    channel: Channel,
    group: String,
}

/// A sandbox to be run.
#[derive(Debug, Clone, Default)]
pub struct Sandbox {
    /// The pod's name.
    pub name: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's UID; the name if it is empty.
    pub uid: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// Protocol, port of the container, port of the node.
    pub ports: Vec<(v1::Protocol, u16, u16)>,
    /// Whether it shares the node's network.
    pub host_network: bool,
}

impl Cri {
    /// Connects to `socket` as seen inside `ns`, and waits until the runtime answers. Reconnects after a restart of the
    /// runtime. Control groups of sandboxes are children of `group`.
    pub async fn connect(ns: &Namespaces, socket: &str, group: &str) -> Result<Self> {
        let deadline = tokio::time::Instant::now() + Duration::from_mins(1);
        // The name is only the `:authority`; the connector determines the destination.
        let endpoint = Endpoint::from_static("http://localhost").timeout(DEADLINE);
        let (ns, socket) = (ns.clone(), socket.to_owned());
        let connector = tower::service_fn(move |_: Uri| {
            let (ns, socket) = (ns.clone(), socket.clone());
            async move {
                let connect = move || {
                    ns.enter(|| UnixStream::connect(&socket))
                        .map_err(std::io::Error::other)?
                };
                let stream = tokio::task::spawn_blocking(connect).await??;
                stream.set_nonblocking(true)?;
                Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::from_std(stream)?))
            }
        });
        let cri = Self {
            channel: endpoint.connect_with_connector_lazy(connector),
            group: group.into(),
        };
        loop {
            let error = match cri.runtime().status(v1::StatusRequest::default()).await {
                Ok(_status) => return Ok(cri),
                Err(error) => error,
            };
            ensure!(
                tokio::time::Instant::now() < deadline,
                "the container runtime does not answer: {error}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// All methods about sandboxes and containers.
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    /// All methods about images.
    pub fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel.clone())
    }

    /// The condition `NetworkReady`.
    pub async fn network_ready(&self) -> Result<v1::RuntimeCondition> {
        let status = self.runtime().status(v1::StatusRequest::default()).await?.into_inner();
        let conditions = status.status.context("no status")?.conditions;
        let found = conditions
            .into_iter()
            .find(|condition| condition.r#type == "NetworkReady");
        found.context("no condition NetworkReady")
    }

    /// Runs a sandbox; returns its id.
    pub async fn run_sandbox(&self, sandbox: &Sandbox) -> Result<String, tonic::Status> {
        let request = v1::RunPodSandboxRequest {
            config: Some(self.config(sandbox)),
            runtime_handler: String::new(),
        };
        Ok(self
            .runtime()
            .run_pod_sandbox(request)
            .await?
            .into_inner()
            .pod_sandbox_id)
    }

    /// Creates and starts a container of [`image::PROBE`] in a sandbox; returns its id.
    pub async fn run_container(&self, id: &str, sandbox: &Sandbox, name: &str, args: &[&str]) -> Result<String> {
        let config = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata {
                name: name.into(),
                attempt: 0,
            }),
            image: Some(v1::ImageSpec {
                image: image::PROBE.into(),
            }),
            args: args.iter().map(|word| (*word).to_owned()).collect(),
            log_path: format!("{name}.log"),
            linux: Some(v1::LinuxContainerConfig {}),
            ..Default::default()
        };
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: id.into(),
            config: Some(config),
            sandbox_config: Some(self.config(sandbox)),
        };
        let created = self.runtime().create_container(request).await;
        let container_id = created
            .with_context(|| format!("create container {name} of {}", sandbox.name))?
            .into_inner()
            .container_id;
        let request = v1::StartContainerRequest {
            container_id: container_id.clone(),
        };
        let started = self.runtime().start_container(request).await;
        started.with_context(|| format!("start container {name} of {}", sandbox.name))?;
        Ok(container_id)
    }

    /// Runs a program in a container to its end; returns its exit code and both of its outputs.
    pub async fn exec(&self, container: &str, command: &[&str]) -> Result<(i32, String)> {
        let request = v1::ExecSyncRequest {
            container_id: container.into(),
            cmd: command.iter().map(|word| (*word).to_owned()).collect(),
            timeout: 30,
        };
        let done = self.runtime().exec_sync(request).await;
        let done = done
            .with_context(|| format!("exec {}", command.join(" ")))?
            .into_inner();
        let text = [done.stdout, done.stderr].concat();
        Ok((done.exit_code, String::from_utf8_lossy(&text).into_owned()))
    }

    /// The status of a sandbox, with the runtime's verbose information.
    pub async fn sandbox(&self, id: &str) -> Result<v1::PodSandboxStatusResponse> {
        let request = v1::PodSandboxStatusRequest {
            pod_sandbox_id: id.into(),
            verbose: true,
        };
        let status = self.runtime().pod_sandbox_status(request).await;
        Ok(status.with_context(|| format!("status of sandbox {id}"))?.into_inner())
    }

    /// The addresses of a sandbox, as the kubelet reads them.
    pub async fn addresses(&self, id: &str) -> Result<Vec<IpAddr>> {
        let status = self.sandbox(id).await?.status.context("no status")?;
        let network = status.network.context("no network status")?;
        let more = network.additional_ips.into_iter().map(|more| more.ip);
        std::iter::once(network.ip)
            .chain(more)
            .map(|ip| ip.parse().with_context(|| format!("address {ip:?} of {id}")))
            .collect()
    }

    /// Stops a sandbox, with its containers and its network.
    pub async fn stop_sandbox(&self, id: &str) -> Result<(), tonic::Status> {
        let request = v1::StopPodSandboxRequest {
            pod_sandbox_id: id.into(),
        };
        self.runtime().stop_pod_sandbox(request).await.map(drop)
    }

    /// Stops and removes a sandbox.
    pub async fn remove_sandbox(&self, id: &str) -> Result<(), tonic::Status> {
        self.stop_sandbox(id).await?;
        let request = v1::RemovePodSandboxRequest {
            pod_sandbox_id: id.into(),
        };
        self.runtime().remove_pod_sandbox(request).await.map(drop)
    }

    fn config(&self, sandbox: &Sandbox) -> v1::PodSandboxConfig {
        let uid = if sandbox.uid.is_empty() {
            &sandbox.name
        } else {
            &sandbox.uid
        };
        let label = |key: &str, value: &str| (format!("io.kubernetes.pod.{key}"), value.to_owned());
        let mut labels: std::collections::HashMap<_, _> = sandbox.labels.clone().into_iter().collect();
        labels.extend([
            label("name", &sandbox.name),
            label("namespace", &sandbox.namespace),
            label("uid", uid),
        ]);
        let network = if sandbox.host_network {
            v1::NamespaceMode::Node
        } else {
            v1::NamespaceMode::Pod
        };
        v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: sandbox.name.clone(),
                uid: uid.clone(),
                namespace: sandbox.namespace.clone(),
                attempt: 0,
            }),
            hostname: sandbox.name.clone(),
            log_directory: format!("/var/log/pods/{}_{}_{uid}", sandbox.namespace, sandbox.name),
            dns_config: None,
            port_mappings: sandbox.ports.iter().map(|port| mapping(*port)).collect(),
            labels,
            annotations: sandbox.annotations.clone().into_iter().collect(),
            linux: Some(v1::LinuxPodSandboxConfig {
                cgroup_parent: format!("/{}/pods/{uid}", self.group),
                security_context: Some(v1::LinuxSandboxSecurityContext {
                    namespace_options: Some(v1::NamespaceOption {
                        network: network.into(),
                        pid: v1::NamespaceMode::Container.into(),
                        ipc: v1::NamespaceMode::Pod.into(),
                    }),
                }),
            }),
        }
    }
}

fn mapping((protocol, container, host): (v1::Protocol, u16, u16)) -> v1::PortMapping {
    v1::PortMapping {
        protocol: protocol.into(),
        container_port: container.into(),
        host_port: host.into(),
        host_ip: String::new(),
    }
}
