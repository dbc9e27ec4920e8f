//! A backend that records its calls and behaves as the test requires.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use kni_common::{Direction, Verdict};
use kni_model::{
    AttachRequest, Attachment, EndpointId, NetnsIdentity, Network, NetworkId, NetworkSpec, Phase, PodRef, Sandbox,
    SandboxId,
    flow_view::FlowView,
    view::{DropEventView, NetworkView},
};
use kni_pods::{AttachError, DeleteRequest, ErrorKind, Garbage, GarbageRequest, Subject};
use tokio::sync::{Semaphore, broadcast};

use crate::{Backend, Outcome, PreparedPart, Setup};

/// How [`Fake::attach`] behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mood {
    Obliging,
    /// Waits for a permit of [`Fake::gate`].
    Gated,
    Panicking,
    /// Attaches additional interfaces only.
    WithoutPrimary,
    Exhausted,
}

#[derive(Debug, Clone)]
pub(super) struct Fake {
    calls: Arc<Mutex<Vec<String>>>,
    pub(super) sandboxes: Arc<Mutex<BTreeMap<SandboxId, Arc<Sandbox>>>>,
    pub(super) networks: Arc<Mutex<Vec<NetworkView>>>,
    pub(super) mood: Arc<Mutex<Mood>>,
    pub(super) gate: Arc<Semaphore>,
    /// Calls that passed the gate, by method.
    passed: Arc<Mutex<Vec<&'static str>>>,
    pub(super) events: broadcast::Sender<DropEventView>,
    pub(super) flows: broadcast::Sender<Arc<FlowView>>,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            calls: Arc::default(),
            sandboxes: Arc::default(),
            networks: Arc::new(Mutex::new(vec![
                network("pods", true, true),
                network("blue", false, false),
            ])),
            mood: Arc::new(Mutex::new(Mood::Obliging)),
            gate: Arc::new(Semaphore::new(0)),
            passed: Arc::default(),
            events: broadcast::channel(4).0,
            flows: broadcast::channel(4).0,
        }
    }
}

impl Fake {
    pub(super) fn note(&self, call: impl Into<String>) {
        self.calls.lock().unwrap().push(call.into());
    }

    /// The calls since the last query.
    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    /// The calls that have passed the gate, in order.
    pub(super) fn passed(&self) -> Vec<&'static str> {
        self.passed.lock().unwrap().clone()
    }

    /// Works within the caller's future, so that only the gRPC layer keeps it alive.
    async fn pass_gate(&self, method: &'static str) {
        let gated = *self.mood.lock().unwrap() == Mood::Gated;
        if gated {
            self.gate.acquire().await.unwrap().forget();
        }
        self.passed.lock().unwrap().push(method);
    }

    pub(super) fn knows(&self, sandbox: &str) -> bool {
        self.sandboxes.lock().unwrap().contains_key(&sandbox.parse().unwrap())
    }
}

impl Backend for Fake {
    async fn create_namespace(&self, pod: PodRef, path_prefix: &str) -> Result<PathBuf, AttachError> {
        self.note(format!("create {pod} {} {path_prefix}", pod.uid));
        self.pass_gate("create").await;
        Ok(PathBuf::from("/run/netns/fresh"))
    }

    async fn delete(&self, request: DeleteRequest) -> Result<(), AttachError> {
        let DeleteRequest { sandbox, pod, netns } = request;
        self.note(format!("delete {sandbox:?} {pod} {netns:?}"));
        self.pass_gate("delete").await;
        if let Some(sandbox) = sandbox {
            self.sandboxes.lock().unwrap().remove(&sandbox);
        }
        Ok(())
    }

    async fn undo(&self, sandbox: SandboxId, invocation: String) -> Result<(), AttachError> {
        self.note(format!("undo {sandbox} {invocation}"));
        Ok(())
    }

    async fn collect_garbage(&self, request: GarbageRequest) -> Result<Garbage, AttachError> {
        self.note(format!(
            "collect {} {:?} {}",
            request.network, request.kept, request.began_ns
        ));
        Ok(Garbage {
            detached: Vec::new(),
            errors: vec!["one stays".to_owned()],
        })
    }

    async fn claim(&self, sandbox: SandboxId, netns: PathBuf) -> Result<(), AttachError> {
        self.note(format!("claim {sandbox} {}", netns.display()));
        Ok(())
    }

    async fn attach(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        self.note(format!("attach {} {}", request.sandbox, request.pod));
        let mood = *self.mood.lock().unwrap();
        self.pass_gate("attach").await;
        match mood {
            Mood::Obliging | Mood::WithoutPrimary | Mood::Gated => {}
            Mood::Panicking => panic!("the backend fails in this test"),
            Mood::Exhausted => {
                return Err(Subject::from(&request).error(ErrorKind::EndpointsExhausted { capacity: 7 }));
            }
        }
        let mut sandbox = sandbox(&request);
        if mood == Mood::WithoutPrimary {
            sandbox.attachments.remove(0);
        }
        let sandbox = Arc::new(sandbox);
        self.sandboxes
            .lock()
            .unwrap()
            .insert(request.sandbox, Arc::clone(&sandbox));
        Ok(sandbox)
    }

    async fn detach(&self, sandbox: SandboxId) -> Result<(), AttachError> {
        self.note(format!("detach {sandbox}"));
        self.pass_gate("detach").await;
        self.sandboxes.lock().unwrap().remove(&sandbox);
        Ok(())
    }

    fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        self.sandboxes.lock().unwrap().get(sandbox).cloned()
    }
}

impl Setup for Fake {
    fn prepare(&self) -> Vec<PreparedPart> {
        self.note("prepare");
        let part = |name, outcome| PreparedPart { name, outcome };
        vec![
            part("bpffs", Outcome::Ok),
            part("pool", Outcome::Prepared),
            part("uplink", Outcome::Failed("no default route\nat all".to_owned())),
        ]
    }
}

fn network(name: &str, default: bool, ready: bool) -> NetworkView {
    let spec = NetworkSpec {
        name: name.parse().unwrap(),
        default,
        enabled: ready,
        subnets: vec!["10.1.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
        exclude_subnets: Vec::new(),
        mtu: 1500,
        egress: kni_model::network::EgressMode::implied(default),
        egress_addresses: Vec::new(),
        service_subnets: Vec::new(),
        xdp: false,
        provider: kni_model::Provider::Ebpf,
        blocks: None,
        access: kni_model::Access::default(),
        number: None,
        fabric: kni_model::Fabric::None,
    };
    let reason = if ready { String::new() } else { "disabled".to_owned() };
    NetworkView {
        network: Network {
            id: NetworkId::try_from(if default { 1 } else { 2 }).unwrap(),
            spec,
        },
        ready,
        reason,
        attachments: 3,
        total_addresses: u128::MAX,
        ipv4: kni_model::view::AddressUse::default(),
        ipv6: kni_model::view::AddressUse::default(),
        used_addresses: 6,
        exhausted: String::new(),
        origin: "networks.yaml:1".to_owned(),
        features: kni_model::Provider::Ebpf.features(),
        number: None,
        number_problem: None,
        number_retained: false,
    }
}

/// A sandbox with a dual-stack primary interface and an IPv6 interface in another network.
fn sandbox(request: &AttachRequest) -> Sandbox {
    let primary = Attachment {
        endpoint: EndpointId(1),
        network: "pods".parse().unwrap(),
        definition: None,
        network_id: NetworkId::try_from(1).unwrap(),
        ifname: "eth0".parse().unwrap(),
        ifindex: 2,
        host_ifname: "kni1".parse().unwrap(),
        host_ifindex: 1_000_001,
        mac: "02:00:00:00:00:01".parse().unwrap(),
        host_mac: "02:00:00:00:00:ff".parse().unwrap(),
        ipv4: Some("10.1.0.2".parse().unwrap()),
        ipv6: Some("fd00::2".parse().unwrap()),
        mtu: 1500,
        default_route: true,
        host_access: true,
        routes: vec!["10.1.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
        xdp: false,
        kind: kni_model::InterfaceKind::Veth,
        bandwidth: kni_model::Bandwidth::default(),
    };
    let second = Attachment {
        network: "blue".parse().unwrap(),
        ifname: "net1".parse().unwrap(),
        ipv4: None,
        default_route: false,
        ..primary.clone()
    };
    Sandbox {
        id: request.sandbox.clone(),
        pod: request.pod.clone(),
        phase: Phase::Ready,
        netns: request.netns.clone(),
        netns_identity: NetnsIdentity {
            dev: 4,
            inode: 4_026_532_000,
        },
        labels: request.labels.clone(),
        port_mappings: request.port_mappings.clone(),
        container_ports: request.container_ports.clone(),
        attachments: vec![primary, second],
        cni: request.cni.clone(),
        parent: request.parent.clone(),
    }
}

/// A drop event that its time distinguishes from others.
pub(super) fn event(time_ns: u64) -> DropEventView {
    DropEventView {
        time_ns,
        network: Some("blue".parse().unwrap()),
        pod: PodRef {
            namespace: "shop".to_owned(),
            name: "web-0".to_owned(),
            uid: String::new(),
        },
        ifname: "eth0".to_owned(),
        direction: Direction::FromPod,
        reason: Verdict::SourceAddress,
        source: Some("10.9.9.9".parse().unwrap()),
        destination: Some("10.1.0.3".parse().unwrap()),
        protocol: 17,
        source_port: 4000,
        destination_port: 53,
        length: 98,
        ethertype: 0x0800,
    }
}
