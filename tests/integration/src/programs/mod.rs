//! Loads the programs of the dataplane in a separate node and runs them on single frames (`BPF_PROG_TEST_RUN`), with
//! the model that predicts their verdicts.

mod changes;
mod chosen;
mod compare;
mod concurrent;
mod counters;
mod fast_path;
mod lockstep;
mod masqueraded;
mod tables;

use std::{
    env, fs,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context as _, Result};
use aya::TestRunOptions;
pub use concurrent::{Change, Mark, State};
pub use counters::counted;
use ipnet::IpNet;
use kni_common::{Direction, IFINDEX_BASE, Verdict, event::Explanation};
use kni_dataplane::{
    Dataplane, DataplaneOptions, EndpointConfig, EventStream, FlowRecord, HookChoice, NetworkRoutes, NodeConfig, Probe,
    RouteEgress, SupposedTunnel,
};
use kni_model::{EndpointId, Enforcement, PolicyStep};
pub use lockstep::Lockstep;
pub use masqueraded::{Masqueraded, Tuple};

use crate::{model::Seen, node::Node};

/// Rows of the endpoint table, including the unused row 0. More rows than endpoints: the drop table has 16 rows for
/// each, and the tests produce every reason at every endpoint.
pub const CAPACITY: u32 = 64;
/// Highest endpoint with an interface, starting at 1.
pub const INTERFACES: u32 = 8;
/// An interface whose number exceeds the endpoint table.
pub const FOREIGN: u32 = CAPACITY + 4;
/// The folder of the pins, inside the node.
pub const ROOT: &str = "/sys/fs/bpf/kni";

const TC_ACT_UNSPEC: u32 = u32::MAX;
const TC_ACT_SHOT: u32 = 2;
const TC_ACT_REDIRECT: u32 = 7;

/// Offsets in `struct __sk_buff` (linux/bpf.h).
const MARK: usize = 8;
const PRIORITY: usize = 32;

/// Fields of a packet that are not in its bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metadata {
    /// `skb->mark`.
    pub mark: u32,
    /// `skb->priority`.
    pub priority: u32,
}

/// The result of a program for a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// Its return value.
    pub action: u32,
    /// The resulting frame.
    pub frame: Vec<u8>,
}

/// Advances the age of every row of flows, fragments and affinities in the pinned maps in `folder` by `time`, as if no
/// packet had used it for so long.
pub fn age(folder: &Path, time: Duration) -> Result<()> {
    let mut tables = tables::Tables::open(folder)?;
    let ticks = u64::from(tables.config()?.hz) * time.as_secs();
    tables.age(ticks)
}

/// The loaded programs, on a thread inside a node with interfaces and without an agent.
pub struct Programs {
    dataplane: Arc<Dataplane>,
    /// The ring buffer's only reader.
    events: Option<EventStream>,
}

impl Programs {
    /// Loads the programs in a fresh node and passes them to `work`, which runs inside.
    pub fn inside<R: Send>(name: &str, max_flows: u32, work: impl FnOnce(Self) -> Result<R> + Send) -> Result<R> {
        object()?;
        let node = Node::new(name)?;
        // The ends of the pods are interfaces of the node, too: its stack would forward what they receive. And it would
        // report the groups of a router at each interface. Tests count each packet.
        for setting in [
            "ipv4/ip_forward",
            "ipv6/conf/all/forwarding",
            "ipv6/conf/default/forwarding",
        ] {
            node.enter(|| fs::write(Path::new("/proc/sys/net").join(setting), "0"))?
                .context(setting)?;
        }
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
            // A separate thread reads the ring buffer.
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
            dataplane: Arc::new(dataplane),
            events: Some(events),
        })
    }

    /// Events reported since the last call; waits for some.
    pub fn events(&mut self, patience: Duration) -> Result<Vec<FlowRecord>> {
        let events = self.events.as_mut().context("somebody else reads the events")?;
        let waiting = async { tokio::time::timeout(patience, events.next()).await };
        match tokio::runtime::Handle::current().block_on(waiting) {
            Ok(records) => Ok(records?),
            Err(_elapsed) => Ok(Vec::new()),
        }
    }

    /// The user side of the dataplane.
    pub fn dataplane(&self) -> &Arc<Dataplane> {
        &self.dataplane
    }

    /// Runs the program of a direction on a frame as if it arrived at the host interface of the endpoint, sent by the
    /// node itself.
    pub fn run(&self, direction: Direction, endpoint: u32, frame: &[u8]) -> Result<Ran> {
        self.run_as(Seen::by(direction, endpoint), frame, 0)
    }

    /// Runs the program at that position on the frame. With `segment` the frame represents several segments of that
    /// size.
    pub fn run_as(&self, seen: Seen, frame: &[u8], segment: u32) -> Result<Ran> {
        let context = context(&seen, segment);
        // A reply may be longer than the request.
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

    /// Runs the program at that position on the frame with these fields; returns its action and the fields afterwards.
    pub fn run_with(&self, seen: Seen, frame: &[u8], metadata: Metadata) -> Result<(u32, Metadata)> {
        let mut context = context(&seen, 0);
        let mut after = context;
        let mut out = vec![0; frame.len() + 128];
        for (at, word) in [(MARK, metadata.mark), (PRIORITY, metadata.priority)] {
            context[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        options.ctx_in = Some(&context);
        options.ctx_out = Some(&mut after);
        let action = self.dataplane.test_run(seen.direction.as_str(), options)?.return_value;
        let word = |at: usize| Ok::<_, anyhow::Error>(u32::from_ne_bytes(after[at..at + 4].try_into()?));
        Ok((
            action,
            Metadata {
                mark: word(MARK)?,
                priority: word(PRIORITY)?,
            },
        ))
    }

    /// Runs a program repeatedly on the frame that its last run returned.
    pub fn repeat(&self, seen: Seen, frame: &[u8], times: u32) -> Result<()> {
        let context = context(&seen, 0);
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.ctx_in = Some(&context);
        options.repeat = times;
        self.dataplane.test_run(seen.direction.as_str(), options)?;
        Ok(())
    }

    /// The result of a dry run of the programs for a frame.
    pub fn explain(&self, seen: Seen, frame: &[u8]) -> Result<Explanation> {
        Ok(self.dataplane.explain(&Probe {
            endpoint: EndpointId(seen.endpoint),
            direction: seen.direction,
            frame: frame.to_vec(),
            ingress_ifindex: seen.ingress,
            tunnel: None,
        })?)
    }

    /// The result of a dry run of `from_overlay` for a frame that came through the tunnel.
    pub fn explain_arrival(&self, tunnel: SupposedTunnel, frame: &[u8]) -> Result<Explanation> {
        Ok(self.dataplane.explain(&Probe {
            endpoint: EndpointId(0),
            direction: Direction::FromOverlay,
            frame: frame.to_vec(),
            ingress_ifindex: 0,
            tunnel: Some(tunnel),
        })?)
    }
}

impl From<Dataplane> for Programs {
    fn from(dataplane: Dataplane) -> Self {
        Self {
            dataplane: Arc::new(dataplane),
            events: None,
        }
    }
}

/// The options for the dataplane: the object in `KNI_EBPF_OBJECT`, or the one embedded in the agent.
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

/// The object that [`options`] name. Read once, because the folders of a node differ from those of the machine.
pub fn object() -> Result<&'static [u8]> {
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

/// Routes of a network without services: its subnets, and a default route to the node's stack or a drop.
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

/// Publishes an endpoint without policies.
pub fn publish_unrestricted(dataplane: &Dataplane, endpoint: &EndpointConfig) -> Result<()> {
    let enforce = PolicyStep::Enforce(vec![(endpoint.endpoint, Enforcement::default())]);
    dataplane.apply_policy(&[enforce])?;
    Ok(dataplane.publish(endpoint)?)
}

/// Whether `BPF_PROG_TEST_RUN` accepts the frame: it refuses frames that end inside the Ethernet header or, since Linux
/// 6.18, inside the fixed IP header. A real interface passes such frames on.
pub fn runnable(frame: &[u8]) -> bool {
    let shortest = match frame.get(12..14) {
        Some([0x08, 0x00]) => 34,
        Some([0x86, 0xdd]) => 54,
        _ => 14,
    };
    frame.len() >= shortest
}

/// The return value for a verdict.
pub fn action_of(verdict: Verdict) -> u32 {
    match verdict {
        Verdict::Redirected | Verdict::Answered => TC_ACT_REDIRECT,
        Verdict::PassedToStack | Verdict::Delivered => TC_ACT_UNSPEC,
        _ => TC_ACT_SHOT,
    }
}

/// A `struct __sk_buff` (linux/bpf.h) with the frame's interface, its origin and the size of its segments.
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
