//! The programs of the dataplane, loaded in a node of their own and run on single frames (`BPF_PROG_TEST_RUN`), beside
//! the model that predicts their verdicts.

mod changes;
mod chosen;
mod compare;
mod counters;
mod fast_path;
mod lockstep;
mod tables;

use std::{env, fs, sync::OnceLock, time::Duration};

use anyhow::{Context as _, Result};
use aya::TestRunOptions;
pub use counters::counted;
use ipnet::IpNet;
use kni_common::{Direction, IFINDEX_BASE, Verdict, event::Explanation};
use kni_dataplane::{
    Dataplane, DataplaneOptions, EndpointConfig, EventStream, FlowRecord, HookChoice, NetworkRoutes, NodeConfig, Probe,
    RouteEgress,
};
use kni_model::{EndpointId, Enforcement, PolicyStep};
pub use lockstep::Lockstep;

use crate::{model::Seen, node::Node};

/// Rows of the endpoint table, the unused row 0 included. More than there are endpoints: the table of drops has 16 rows
/// for each, and the tests see every reason at every endpoint.
pub const CAPACITY: u32 = 64;
/// Endpoints that have an interface: 1 to this.
pub const INTERFACES: u32 = 8;
/// An interface whose number exceeds the endpoint table.
pub const FOREIGN: u32 = CAPACITY + 4;
/// Where the pins are, inside the node.
pub const ROOT: &str = "/sys/fs/bpf/kni";

const TC_ACT_UNSPEC: u32 = u32::MAX;
const TC_ACT_SHOT: u32 = 2;
const TC_ACT_REDIRECT: u32 = 7;

/// What a program did to a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// Its return value.
    pub action: u32,
    /// The frame afterwards.
    pub frame: Vec<u8>,
}

/// The loaded programs, on a thread inside a node that has interfaces and no agent.
pub struct Programs {
    dataplane: Dataplane,
    /// The ring buffer's only reader.
    events: Option<EventStream>,
}

impl Programs {
    /// Loads the programs in a fresh node and hands them to `work`, which runs inside.
    pub fn inside<R: Send>(name: &str, max_flows: u32, work: impl FnOnce(Self) -> Result<R> + Send) -> Result<R> {
        object()?;
        let node = Node::new(name)?;
        let links: Vec<String> = (1..=INTERFACES)
            .chain([FOREIGN])
            .map(|id| {
                format!(
                    "link add kni{id} index {} type veth peer name peer{id}",
                    IFINDEX_BASE + id
                )
            })
            .collect();
        node.ip(&links.iter().map(String::as_str).collect::<Vec<_>>())?;
        node.enter(|| {
            // A thread of its own watches the ring buffer.
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            let _reactor = runtime.enter();
            work(Self::open(max_flows)?)
        })?
    }

    /// Opens the dataplane in the namespaces of the calling thread, inside a runtime, with the usual configuration.
    pub fn open(max_flows: u32) -> Result<Self> {
        let (dataplane, events) = Dataplane::open(&options(max_flows)?)?;
        dataplane.configure(&NodeConfig::default())?;
        Ok(Self {
            dataplane,
            events: Some(events),
        })
    }

    /// Events reported since the last call; waits for some.
    pub(super) fn events(&mut self, patience: Duration) -> Result<Vec<FlowRecord>> {
        let events = self.events.as_mut().context("somebody else reads the events")?;
        let waiting = async { tokio::time::timeout(patience, events.next()).await };
        match tokio::runtime::Handle::current().block_on(waiting) {
            Ok(records) => Ok(records?),
            Err(_elapsed) => Ok(Vec::new()),
        }
    }

    /// The user side of the dataplane.
    pub fn dataplane(&self) -> &Dataplane {
        &self.dataplane
    }

    /// Runs one direction's program on a frame as if the endpoint's host interface saw it, made by the node itself.
    pub fn run(&self, direction: Direction, endpoint: u32, frame: &[u8]) -> Result<Ran> {
        self.run_as(Seen::by(direction, endpoint), frame, 0)
    }

    /// Runs the program that sees the frame there. With `segment` the frame represents several of so many bytes.
    pub fn run_as(&self, seen: Seen, frame: &[u8], segment: u32) -> Result<Ran> {
        let context = context(&seen, segment);
        // An answer may be longer than what it answers.
        let mut out = vec![0; frame.len() + 128];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        options.ctx_in = Some(&context);
        let result = self.dataplane.test_run(seen.direction.as_str(), options)?;
        out.truncate(usize::try_from(result.data_size_out)?);
        Ok(Ran {
            action: result.return_value,
            frame: out,
        })
    }

    /// Runs a program on the same frame again and again, as it leaves it.
    pub fn repeat(&self, seen: Seen, frame: &[u8], times: u32) -> Result<()> {
        let context = context(&seen, 0);
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.ctx_in = Some(&context);
        options.repeat = times;
        self.dataplane.test_run(seen.direction.as_str(), options)?;
        Ok(())
    }

    /// The programs' dry run of a frame.
    pub fn explain(&self, seen: Seen, frame: &[u8]) -> Result<Explanation> {
        Ok(self.dataplane.explain(&Probe {
            endpoint: EndpointId(seen.endpoint),
            direction: seen.direction,
            frame: frame.to_vec(),
            ingress_ifindex: seen.ingress,
        })?)
    }
}

impl From<Dataplane> for Programs {
    fn from(dataplane: Dataplane) -> Self {
        Self {
            dataplane,
            events: None,
        }
    }
}

/// How the tests open the dataplane: the object named by `KNI_EBPF_OBJECT`, else the one that the agent embeds.
pub fn options(max_flows: u32) -> Result<DataplaneOptions> {
    Ok(DataplaneOptions {
        object: object()?.to_owned(),
        root: ROOT.into(),
        max_endpoints: CAPACITY,
        max_flows,
        max_policy_rows: 16_384,
        max_services: 1024,
        hook: HookChoice::Auto,
    })
}

/// Read once: a node's folders are not the machine's.
fn object() -> Result<&'static [u8]> {
    static OBJECT: OnceLock<Vec<u8>> = OnceLock::new();
    if let Some(known) = OBJECT.get() {
        return Ok(known);
    }
    let bytes = match env::var_os("KNI_EBPF_OBJECT") {
        Some(path) => fs::read(&path).with_context(|| format!("read {}", path.display()))?,
        None => kni_object::embedded()?,
    };
    Ok(OBJECT.get_or_init(|| bytes))
}

/// Routes of a network without services: its subnets, and everything else to the node's stack or dropped.
pub fn routes(subnets: &[IpNet], host_access: bool) -> NetworkRoutes {
    NetworkRoutes {
        subnets: subnets.to_vec(),
        service_subnets: Vec::new(),
        egress: if host_access {
            RouteEgress::Stack
        } else {
            RouteEgress::None
        },
    }
}

/// Makes an endpoint ready that no policy selects.
pub fn publish_unrestricted(dataplane: &Dataplane, endpoint: &EndpointConfig) -> Result<()> {
    let enforce = PolicyStep::Enforce(vec![(endpoint.endpoint, Enforcement::default())]);
    dataplane.apply_policy(&[enforce])?;
    Ok(dataplane.publish(endpoint)?)
}

/// Whether `BPF_PROG_TEST_RUN` takes the frame: it refuses what ends inside its Ethernet header or, since Linux 6.18,
/// inside its fixed IP header. A real interface passes such frames on.
pub fn runnable(frame: &[u8]) -> bool {
    let shortest = match frame.get(12..14) {
        Some([0x08, 0x00]) => 34,
        Some([0x86, 0xdd]) => 54,
        _ => 14,
    };
    frame.len() >= shortest
}

/// The return value that goes with a verdict.
pub fn action_of(verdict: Verdict) -> u32 {
    match verdict {
        Verdict::Redirected | Verdict::Answered => TC_ACT_REDIRECT,
        Verdict::PassedToStack | Verdict::Delivered => TC_ACT_UNSPEC,
        _ => TC_ACT_SHOT,
    }
}

/// A `struct __sk_buff` (linux/bpf.h) with the frame's interface, its origin and whether it represents several segments.
fn context(seen: &Seen, gso_size: u32) -> [u8; 192] {
    const INGRESS_IFINDEX: usize = 36;
    const IFINDEX: usize = 40;
    const WIRE_LEN: usize = 160;
    const GSO_SEGS: usize = 164;
    const GSO_SIZE: usize = 176;
    let mut context = [0; 192];
    let mut put = |at: usize, value: u32| context[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    put(INGRESS_IFINDEX, seen.ingress);
    put(IFINDEX, IFINDEX_BASE + seen.endpoint);
    if gso_size > 0 {
        put(GSO_SIZE, gso_size);
        put(GSO_SEGS, 2);
        put(WIRE_LEN, 0);
    }
    context
}

/// Bytes as hexadecimal digits, for messages.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}
