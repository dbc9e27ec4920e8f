//! Runs the XDP programs on single frames, and compares `xdp_pod` with the model: redirected frames are counted as by
//! `from_pod`, and passed frames are unchanged.

use anyhow::{Context as _, Result, bail, ensure};
use aya::TestRunOptions;
use kni_common::{Direction, IFINDEX_BASE, Verdict};

use super::{CAPACITY, FOREIGN, Lockstep, Programs, Ran, hex};

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;

impl Programs {
    /// Runs `xdp_pod` on a frame as if the endpoint's host interface saw it.
    pub fn run_xdp(&self, endpoint: u32, frame: &[u8]) -> Result<Ran> {
        self.run_xdp_program("xdp_pod", IFINDEX_BASE + endpoint, frame)
    }

    /// Runs `xdp_uplink` on a frame as if an interface of the node, which is taken for the uplink, saw it. True if it
    /// lets the frame pass, unchanged.
    pub fn passes_xdp_uplink(&self, frame: &[u8]) -> Result<bool> {
        let ran = self.run_xdp_program("xdp_uplink", IFINDEX_BASE + FOREIGN, frame)?;
        ensure!(ran.frame == frame, "changed to {}", hex(&ran.frame));
        match ran.action {
            XDP_PASS => Ok(true),
            XDP_DROP => Ok(false),
            other => bail!("action {other}"),
        }
    }

    fn run_xdp_program(&self, program: &'static str, ifindex: u32, frame: &[u8]) -> Result<Ran> {
        // `struct xdp_md` (linux/bpf.h): data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let fields = [0, u32::try_from(frame.len())?, 0, ifindex, 0, 0];
        let context: Vec<u8> = fields.into_iter().flat_map(u32::to_ne_bytes).collect();
        let mut out = vec![0; frame.len() + 128];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        options.ctx_in = Some(&context);
        let result = self.dataplane().test_run(program, options)?;
        out.truncate(usize::try_from(result.data_size_out)?);
        Ok(Ran {
            action: result.return_value,
            frame: out,
        })
    }
}

impl Lockstep {
    /// Runs `xdp_pod`: returns the receiver of a redirected frame and the resulting frame, or `None` if it is passed to
    /// `from_pod`. The model counts redirected frames at both ends.
    pub fn run_xdp(&mut self, endpoint: u32, frame: &[u8]) -> Result<Option<(u32, Vec<u8>)>> {
        let ran = self.programs().run_xdp(endpoint, frame)?;
        let told = || format!("xdp_pod of endpoint {endpoint}: {}", hex(frame));
        match ran.action {
            XDP_PASS => {
                ensure!(ran.frame == frame, "{}: passed on as {}", told(), hex(&ran.frame));
                Ok(None)
            }
            XDP_REDIRECT => {
                let receiver = (1..CAPACITY)
                    .find(|id| {
                        let known = self.model.world.endpoint(*id);
                        known.is_some_and(|known| known.mac == ran.frame[..6])
                    })
                    .with_context(|| format!("{}: sent to nobody: {}", told(), hex(&ran.frame)))?;
                let bytes = u64::try_from(frame.len())?;
                for (id, direction) in [(endpoint, Direction::FromPod), (receiver, Direction::ToPod)] {
                    let count = self.model.counts.entry((id, direction, Verdict::Redirected));
                    let (packets, total) = count.or_default();
                    *packets += 1;
                    *total += bytes;
                }
                Ok(Some((receiver, ran.frame)))
            }
            other => bail!("{}: action {other}", told()),
        }
    }
}
