//! Calls KNI as the KNI kubelet does: the same calls in the same order with the same fields set.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read as _,
    net::IpAddr,
    ops::Deref,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use hyper_util::rt::TokioIo;
use kni_proto::{
    kni::{
        AttachInterfaceRequest, CreateNetworkRequest, DeleteNetworkRequest, DetachInterfaceRequest, DnsConfig,
        IpConfig, PortMapping, Protocol, QueryPodNetworkRequest, QueryPodNetworkResponse, kni_client::KniClient,
    },
    runtime::{Interface, ListInterfacesRequest, runtime_client::RuntimeClient},
};
use tonic::{
    Status,
    transport::{Channel, Endpoint, Uri},
};

use crate::namespaces::Namespaces;

/// The annotation with the path of the namespace, which the kubelet passes to the container runtime.
pub const NETNS_ANNOTATION: &str = "kni.dev/netns";

const DEADLINE: Duration = Duration::from_mins(1);

/// A kubelet's connection to an agent.
#[derive(Debug, Clone)]
pub struct Kubelet {
    ns: Namespaces,
    channel: Channel,
}

impl Kubelet {
    /// Connects to `socket` as seen inside `ns`. Reconnects automatically after a restart of the agent.
    pub async fn connect(ns: &Namespaces, socket: &str) -> Result<Self> {
        let channel = endpoint().connect_with_connector(connector(ns, socket)).await;
        Ok(Self {
            ns: ns.clone(),
            channel: channel.with_context(|| format!("{socket} in {}", ns.name()))?,
        })
    }

    /// All methods of `kni.KNI`.
    pub fn kni(&self) -> KniClient<Channel> {
        KniClient::new(self.channel.clone()).max_decoding_message_size(16 << 20)
    }

    /// All methods of `kni.runtime.v1.Runtime`.
    pub fn runtime(&self) -> RuntimeClient<Channel> {
        RuntimeClient::new(self.channel.clone())
    }

    /// The interfaces that the agent lists for a pod, by its namespace and name.
    pub async fn interfaces_of(&self, namespace: &str, pod: &str) -> Result<Vec<Interface>> {
        let request = ListInterfacesRequest {
            pod_namespace: namespace.to_owned(),
            pod_name: pod.to_owned(),
            ..ListInterfacesRequest::default()
        };
        Ok(self.runtime().list_interfaces(request).await?.into_inner().interfaces)
    }

    /// The connection, for other services of the same socket.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Creates, attaches and queries a pod with the given annotations, as the kubelet does before it starts containers.
    /// Like the kubelet, it does not clean up after a failed step.
    pub async fn run_pod(&self, namespace: &str, name: &str, annotations: &[(&str, &str)]) -> Result<Pod, Status> {
        self.run_pod_with(namespace, name, annotations, |_as_it_is| {}).await
    }

    /// [`Self::run_pod`] with an unusual request.
    pub async fn run_pod_with(
        &self,
        namespace: &str,
        name: &str,
        annotations: &[(&str, &str)],
        edit: impl FnOnce(&mut AttachInterfaceRequest),
    ) -> Result<Pod, Status> {
        let netns = self.create_network(namespace, name).await?;
        let mut sandbox = Sandbox::new(namespace, name, &netns);
        sandbox.annotate(annotations);
        self.run_sandbox(sandbox, netns, edit).await
    }

    /// The steps after `CreateNetwork`, which returned `netns`: attaches and queries.
    pub async fn run_sandbox(
        &self,
        sandbox: Sandbox,
        netns: String,
        edit: impl FnOnce(&mut AttachInterfaceRequest),
    ) -> Result<Pod, Status> {
        let mut request = sandbox.attach_request();
        edit(&mut request);
        self.kni().attach_interface(request).await?;
        let interfaces = self.query(&sandbox.id).await?.ipconfigs;
        let inside = self
            .ns
            .net_at(&sandbox.name, Path::new(&netns))
            .map_err(|e| Status::not_found(format!("{e:#}")))?;
        Ok(Pod {
            sandbox,
            netns: netns.into(),
            interfaces,
            inside,
        })
    }

    /// `CreateNetwork` with only the names of the pod; returns the path of the new namespace.
    pub async fn create_network(&self, namespace: &str, name: &str) -> Result<String, Status> {
        let request = CreateNetworkRequest {
            name: name.into(),
            namespace: namespace.into(),
            ..Default::default()
        };
        Ok(self.kni().create_network(request).await?.into_inner().netns_path)
    }

    /// `AttachInterface` of a sandbox; the answer is discarded, as the kubelet does.
    pub async fn attach(&self, sandbox: &Sandbox) -> Result<(), Status> {
        self.kni().attach_interface(sandbox.attach_request()).await.map(drop)
    }

    /// `QueryPodNetwork` by sandbox id alone.
    pub async fn query(&self, id: &str) -> Result<QueryPodNetworkResponse, Status> {
        let request = QueryPodNetworkRequest {
            id: id.into(),
            ..Default::default()
        };
        Ok(self.kni().query_pod_network(request).await?.into_inner())
    }

    /// `DetachInterface` by sandbox id alone.
    pub async fn detach(&self, id: &str) -> Result<(), Status> {
        let request = DetachInterfaceRequest {
            id: id.into(),
            ..Default::default()
        };
        self.kni().detach_interface(request).await.map(drop)
    }

    /// `DeleteNetwork` by sandbox id alone.
    pub async fn delete_network(&self, id: &str) -> Result<(), Status> {
        let request = DeleteNetworkRequest {
            id: id.into(),
            ..Default::default()
        };
        self.kni().delete_network(request).await.map(drop)
    }

    /// Removes a pod. Its namespace lives until both calls have returned, because the sandbox process holds it.
    pub async fn kill_pod(&self, pod: Pod) -> Result<(), Status> {
        self.detach(&pod.id).await?;
        self.delete_network(&pod.id).await
    }
}

/// The kubelet's data about a sandbox when it requests an interface.
#[derive(Debug, Clone)]
pub struct Sandbox {
    /// 64 hexadecimal digits, as generated by container runtimes.
    pub id: String,
    /// The pod's name.
    pub name: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's UID.
    pub uid: String,
    /// The sandbox's annotations.
    pub annotations: BTreeMap<String, String>,
    /// The verbose status of the runtime; the path of the namespace is in `netns`.
    pub extradata: BTreeMap<String, String>,
}

impl Sandbox {
    /// A sandbox with a random id and UID in the namespace at `netns`.
    pub fn new(namespace: &str, name: &str, netns: &str) -> Self {
        let uid = random_hex(16);
        let uid = [&uid[..8], &uid[8..12], &uid[12..16], &uid[16..20], &uid[20..]].join("-");
        Self {
            id: random_hex(32),
            name: name.into(),
            namespace: namespace.into(),
            uid,
            annotations: BTreeMap::from([(NETNS_ANNOTATION.into(), netns.into())]),
            extradata: BTreeMap::from([("netns".into(), netns.into())]),
        }
    }

    /// Adds annotations.
    pub fn annotate(&mut self, annotations: &[(&str, &str)]) {
        self.annotations
            .extend(annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
    }

    /// The request as the kubelet fills it in: the UID is in a label only, `isolation` is unset, container ports have
    /// host port 0.
    pub fn attach_request(&self) -> AttachInterfaceRequest {
        let label = |key: &str, value: &str| (format!("io.kubernetes.pod.{key}"), value.to_owned());
        AttachInterfaceRequest {
            name: self.name.clone(),
            id: self.id.clone(),
            namespace: self.namespace.clone(),
            isolation: None,
            dns_config: Some(DnsConfig {
                servers: vec!["10.96.0.10".into()],
                searches: vec![
                    format!("{}.svc.cluster.local", self.namespace),
                    "svc.cluster.local".into(),
                ],
                options: vec!["ndots:5".into()],
            }),
            port_mappings: vec![PortMapping {
                protocol: Protocol::Tcp.into(),
                container_port: 8080,
                host_port: 0,
                host_ip: String::new(),
            }],
            labels: [
                label("name", &self.name),
                label("namespace", &self.namespace),
                label("uid", &self.uid),
            ]
            .into(),
            annotations: self.annotations.clone(),
            extradata: self.extradata.clone(),
        }
    }
}

/// A running pod; dereferences to its [`Sandbox`]. Keeps the namespace of the pod alive.
#[derive(Debug, Clone)]
pub struct Pod {
    sandbox: Sandbox,
    /// The path that `CreateNetwork` returned.
    pub netns: PathBuf,
    /// The configurations that `QueryPodNetwork` returned, by interface name.
    pub interfaces: BTreeMap<String, IpConfig>,
    /// The pod's network namespace, with the node's mounts.
    pub inside: Namespaces,
}

impl Pod {
    /// The addresses of `eth0`, in the agent's order. The kubelet accepts them only if each is a bare address.
    pub fn ips(&self) -> Vec<IpAddr> {
        self.ips_of("eth0")
    }

    /// The addresses of an interface; empty if the kubelet would see none.
    pub fn ips_of(&self, interface: &str) -> Vec<IpAddr> {
        let config = self.interfaces.get(interface);
        let parsed: Result<_, _> = config.iter().flat_map(|c| &c.ip).map(|ip| ip.parse()).collect();
        parsed.unwrap_or_default()
    }

    /// The first address of `eth0` in a family.
    pub fn ip(&self, v4: bool) -> Option<IpAddr> {
        self.ips().into_iter().find(|ip| ip.is_ipv4() == v4)
    }

    /// Runs `f` in the pod's network namespace.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> Result<R> {
        self.inside.enter(f)
    }
}

impl Deref for Pod {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.sandbox
    }
}

/// `bytes` random bytes as lower-case hexadecimal digits.
pub fn random_hex(bytes: usize) -> String {
    use std::fmt::Write as _;
    let mut random = vec![0; bytes];
    File::open("/dev/urandom")
        .and_then(|mut f| f.read_exact(&mut random))
        .expect("/dev/urandom can be read");
    random.iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("writing to a string cannot fail");
        hex
    })
}

fn endpoint() -> Endpoint {
    // The name is the `:authority`; the connector determines the destination.
    // The kubelet sets no deadline; a test must not hang.
    Endpoint::from_static("http://localhost").timeout(DEADLINE)
}

fn connector(
    ns: &Namespaces,
    socket: &str,
) -> impl tower::Service<
    Uri,
    Response = TokioIo<tokio::net::UnixStream>,
    Error = std::io::Error,
    Future = impl Future<Output = std::io::Result<TokioIo<tokio::net::UnixStream>>> + Send,
> + Send
+ 'static {
    let (ns, socket) = (ns.clone(), socket.to_owned());
    tower::service_fn(move |_: Uri| {
        let (ns, socket) = (ns.clone(), socket.clone());
        async move {
            let connect = move || {
                ns.enter(|| UnixStream::connect(&socket))
                    .map_err(std::io::Error::other)?
            };
            let stream = tokio::task::spawn_blocking(connect).await??;
            stream.set_nonblocking(true)?;
            Ok(TokioIo::new(tokio::net::UnixStream::from_std(stream)?))
        }
    })
}
