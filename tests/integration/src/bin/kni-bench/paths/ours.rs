//! Builds KNI's paths: pods of one network, attached by the real agent, with and without policies and a service.

use std::{
    path::Path as FilePath,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, AgentOptions, Kubelet, Node, Pod, agent::SOCKET};
use kni_proto::runtime::{
    ListInterfacesRequest, ListServicesRequest, ServicePort, WatchFlowsRequest, runtime_client::RuntimeClient,
};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use super::{
    OURS,
    manifests::{self, BACKEND, Served},
};
use crate::path::{Path, SERVICE_PORT, Services};

/// The keys of the paths through one service of 10 endpoints, and through 1 000 of them in turn.
pub(super) const ONE_SERVICE: &str = "kni_one_service";
/// See [`ONE_SERVICE`].
pub(super) const MANY_SERVICES: &str = "kni_1000_services";

/// A node with KNI: the configuration of its agent, and its measured paths.
pub(crate) struct Setup {
    node: &'static str,
    args: &'static [&'static str],
    /// Whether a client follows the flow events.
    followed: bool,
    /// The services in front of the server that policies select.
    served: Served,
    paths: &'static [Route],
}

/// A path between two pods of the node.
#[derive(Clone, Copy)]
struct Route {
    key: &'static str,
    title: &'static str,
    v4: bool,
    /// Between the pods selected by policies.
    policy: bool,
    /// Through the service.
    service: bool,
}

/// Timeout for an agent to apply its manifests.
const SERVICES_TIMEOUT: Duration = Duration::from_secs(30);

const fn route(key: &'static str, title: &'static str, v4: bool, policy: bool, service: bool) -> Route {
    Route {
        key,
        title,
        v4,
        policy,
        service,
    }
}

impl Setup {
    /// The paths on which two agents are compared.
    pub(crate) const COMPARED: Self = Self {
        node: "kni",
        args: &[],
        followed: false,
        served: Served::ONE,
        paths: &[
            route(OURS, "KNI", true, false, false),
            route("kni_v6", "KNI, IPv6", false, false, false),
            route("kni_policy", "KNI, policies", true, true, false),
            route("kni_policy_v6", "KNI, policies, IPv6", false, true, false),
        ],
    };

    /// For packets that are run through the program only: a million first packets exceed the flow limit of one pod.
    pub(crate) const TIMED: Self = Self {
        node: "kni-timed",
        args: &["--max-flows-per-endpoint", "0"],
        followed: false,
        served: Served::ONE,
        paths: &[],
    };

    /// The default; flow events off and on; services with more endpoints, one and many.
    pub(crate) const ALL: &'static [Self] = &[
        Self {
            node: "kni",
            args: &[],
            followed: false,
            served: Served::ONE,
            paths: &[
                route(OURS, "KNI", true, false, false),
                route("kni_v6", "KNI, IPv6", false, false, false),
                route("kni_policy", "KNI, policies", true, true, false),
                route("kni_service", "KNI, policies, ClusterIP", true, true, true),
                route("kni_service_v6", "KNI, policies, ClusterIP, IPv6", false, true, true),
            ],
        },
        Self {
            node: "kni-silent",
            args: &["--flow-events-per-second", "0"],
            followed: false,
            served: Served::ONE,
            paths: &[route(
                "kni_events_off",
                "KNI, policies, ClusterIP, no flow events",
                true,
                true,
                true,
            )],
        },
        Self {
            node: "kni-followed",
            args: &["--flow-events-per-second", "100000"],
            followed: true,
            served: Served::ONE,
            paths: &[route(
                "kni_events_followed",
                "KNI, policies, ClusterIP, each flow followed",
                true,
                true,
                true,
            )],
        },
        Self {
            node: "kni-one-service",
            args: &[],
            followed: false,
            served: Served::of_ten(1),
            paths: &[route(
                ONE_SERVICE,
                "KNI, policies, one service of 10 endpoints",
                true,
                true,
                true,
            )],
        },
        Self {
            node: "kni-1000-services",
            args: &[],
            followed: false,
            served: Served::of_ten(1000),
            paths: &[route(
                MANY_SERVICES,
                "KNI, policies, 1 000 services of 10 endpoints in turn",
                true,
                true,
                true,
            )],
        },
    ];
}

/// The flow events that a follower received.
#[derive(Default)]
struct Followed {
    events: AtomicU64,
    lost: AtomicU64,
}

/// A node with an agent and its pods.
pub(crate) struct Ours {
    // Dropped in this order: the agent must not outlive its node.
    runtime: Runtime,
    kubelet: Kubelet,
    setup: &'static Setup,
    /// Client and server without policies, then client and server with policies.
    pods: [Pod; 4],
    followed: Arc<Followed>,
    _agent: Agent,
    node: Node,
}

impl Ours {
    /// Starts the agent in a node of its own. `embedded` makes it use the programs in its binary in any case.
    pub(crate) fn start(agent: &FilePath, embedded: bool, setup: &'static Setup) -> Result<Self> {
        let node = Node::new(setup.node)?;
        let options = AgentOptions {
            manifests: manifests::all(setup.served),
            args: setup.args.iter().map(|&arg| arg.to_owned()).collect(),
            binary: Some(agent.to_owned()),
            embedded_programs: embedded,
            ..AgentOptions::default()
        };
        let started = Instant::now();
        let agent = Agent::start(&node, options)?;
        let runtime = Runtime::new()?;
        let kubelet = runtime.block_on(Kubelet::connect(&node, SOCKET))?;
        runtime.block_on(wait_for_services(&kubelet, setup.served, started))?;
        let pods = runtime.block_on(async {
            let fixed = BACKEND.join(",");
            let pods = [
                kubelet.run_pod("bench", "client", &[]).await?,
                kubelet.run_pod("bench", "server", &[]).await?,
                kubelet.run_pod("guarded", "client", &[]).await?,
                kubelet.run_pod("guarded", "server", &[("kni.dev/ips", &fixed)]).await?,
            ];
            anyhow::Ok(pods)
        })?;
        let followed = Arc::new(Followed::default());
        if setup.followed {
            let client = kubelet.runtime();
            runtime.spawn(follow(client, Arc::clone(&followed)));
        }
        Ok(Self {
            runtime,
            kubelet,
            setup,
            pods,
            followed,
            _agent: agent,
            node,
        })
    }

    /// All methods of the agent.
    pub(crate) fn client(&self) -> RuntimeClient<Channel> {
        self.kubelet.runtime()
    }

    /// Waits for an answer of the agent.
    pub(crate) fn wait<R>(&self, answer: impl Future<Output = R>) -> R {
        self.runtime.block_on(answer)
    }

    /// Runs `f` in the namespaces of the node.
    pub(crate) fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> Result<R> {
        self.node.enter(f)
    }

    pub(crate) fn paths(&self) -> Result<Vec<Path>> {
        self.setup.paths.iter().map(|route| self.path(*route)).collect()
    }

    fn path(&self, route: Route) -> Result<Path> {
        let [client, server, guarded_client, guarded_server] = &self.pods;
        let (client, server) = if route.policy {
            (guarded_client, guarded_server)
        } else {
            (client, server)
        };
        let front = self.setup.served;
        let services = route.service.then(|| Services {
            addresses: front.addresses(route.v4),
            endpoints: SERVICE_PORT..SERVICE_PORT + front.endpoints,
        });
        Ok(Path {
            key: route.key,
            title: route.title,
            client: client.inside.clone(),
            server: server.inside.clone(),
            address: server
                .ip(route.v4)
                .with_context(|| format!("{}: no address", route.title))?,
            services,
            keep: Vec::new(),
        })
    }

    /// Checks that the counted packets have passed the programs, that none was dropped, and that the follower received
    /// flow events.
    pub(crate) fn check(&self) -> Result<()> {
        let mut client = self.kubelet.runtime();
        let request = client.list_interfaces(ListInterfacesRequest::default());
        let answer = self.runtime.block_on(request)?;
        for interface in answer.into_inner().interfaces {
            let pod = &interface.pod_name;
            let sent = interface.from_pod.unwrap_or_default().packets;
            let dropped = interface.dropped.unwrap_or_default().packets;
            let measured = self
                .setup
                .paths
                .iter()
                .any(|route| route.policy == (interface.pod_namespace == "guarded"));
            ensure!(
                !measured || sent > 1000,
                "pod {pod}: only {sent} packets went through from_pod"
            );
            ensure!(dropped < 100, "pod {pod}: {dropped} packets were dropped");
            ensure!(interface.healthy, "pod {pod}: {}", interface.problems.join(", "));
        }
        if self.setup.followed {
            let seen = self.followed.events.load(Ordering::Relaxed);
            let lost = self.followed.lost.load(Ordering::Relaxed);
            println!("\nflow events: {seen} seen by the follower, {lost} lost on their way to it");
            ensure!(seen > 1000, "the follower saw only {seen} flow events");
        }
        Ok(())
    }
}

/// Waits until the agent has applied all services, and prints the duration if there are many.
async fn wait_for_services(kubelet: &Kubelet, served: Served, started: Instant) -> Result<()> {
    let wanted = served.frontends();
    loop {
        let listed = kubelet
            .runtime()
            .list_services(ListServicesRequest {})
            .await?
            .into_inner();
        let complete = |port: &&ServicePort| port.backends.len() == usize::from(served.endpoints);
        let count = listed.services.iter().filter(complete).count();
        if count == wanted {
            break;
        }
        let took = started.elapsed();
        ensure!(
            took < SERVICES_TIMEOUT,
            "{count} of {wanted} service ports are served after {took:?}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    if served.services > 1 {
        let (services, endpoints, took) = (served.services, served.endpoints, started.elapsed());
        println!("{services} services of {endpoints} endpoints were served {took:.1?} after the agent's start");
    }
    Ok(())
}

async fn follow(mut client: RuntimeClient<Channel>, followed: Arc<Followed>) -> Result<()> {
    let mut stream = client.watch_flows(WatchFlowsRequest::default()).await?.into_inner();
    while let Some(flow) = stream.message().await? {
        followed.events.fetch_add(1, Ordering::Relaxed);
        followed.lost.fetch_add(flow.lost, Ordering::Relaxed);
    }
    Ok(())
}
