//! The programs of the dataplane, loaded in a node of their own and run on single frames (`BPF_PROG_TEST_RUN`), beside
//! the model that says what they should do.

mod lockstep;
mod tables;

use std::{env, fs, sync::OnceLock};

use anyhow::{Context as _, Result};
use aya::TestRunOptions;
use kni_agent::dataplane::{self, Dataplane, DataplaneOptions, EventStream, HookChoice};
use kni_common::{Direction, IFINDEX_BASE, Verdict};
pub use lockstep::{Lockstep, counted};

use crate::node::Node;

/// Rows of the endpoint table, the unused row 0 included.
pub const CAPACITY: u32 = 16;
/// Endpoints that have an interface: 1 to this.
pub const INTERFACES: u32 = 8;
/// An interface whose number lies beyond the endpoint table.
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
    /// Keeps the ring buffer's reader.
    _events: EventStream,
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
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let _reactor = runtime.enter();
            work(Self::open(max_flows)?)
        })?
    }

    /// Opens the dataplane in the namespaces of the calling thread, inside a runtime.
    pub fn open(max_flows: u32) -> Result<Self> {
        let (dataplane, events) = Dataplane::open(&options(max_flows)?)?;
        Ok(Self {
            dataplane,
            _events: events,
        })
    }

    /// The user side of the dataplane.
    pub fn dataplane(&self) -> &Dataplane {
        &self.dataplane
    }

    /// Runs one direction's program on a frame as if the endpoint's host interface saw it.
    pub fn run(&self, direction: Direction, endpoint: u32, frame: &[u8]) -> Result<Ran> {
        self.run_as(direction, endpoint, frame, 0)
    }

    /// [`Self::run`] on a frame that stands for several of `segment` bytes.
    pub fn run_as(&self, direction: Direction, endpoint: u32, frame: &[u8], segment: u32) -> Result<Ran> {
        let context = context(IFINDEX_BASE + endpoint, segment);
        let mut out = vec![0; frame.len()];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        options.ctx_in = Some(&context);
        let result = self.dataplane.test_run(direction.as_str(), options)?;
        out.truncate(usize::try_from(result.data_size_out)?);
        Ok(Ran {
            action: result.return_value,
            frame: out,
        })
    }
}

/// How the tests open the dataplane: the object named by `KNI_EBPF_OBJECT`, else the one that the agent embeds.
pub fn options(max_flows: u32) -> Result<DataplaneOptions> {
    Ok(DataplaneOptions {
        object: object()?.to_owned(),
        root: ROOT.into(),
        max_endpoints: CAPACITY,
        max_flows,
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
        None => dataplane::embedded()?,
    };
    Ok(OBJECT.get_or_init(|| bytes))
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

/// A `struct __sk_buff` (linux/bpf.h) that says where the frame is and whether it stands for several.
fn context(ifindex: u32, gso_size: u32) -> [u8; 192] {
    const IFINDEX: usize = 40;
    const WIRE_LEN: usize = 160;
    const GSO_SEGS: usize = 164;
    const GSO_SIZE: usize = 176;
    let mut context = [0; 192];
    let mut put = |at: usize, value: u32| context[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    put(IFINDEX, ifindex);
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
