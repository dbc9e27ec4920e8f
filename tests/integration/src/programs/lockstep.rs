//! Runs programs and model in lockstep; every difference is an error that quotes the frame.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use kni_common::{Direction, Verdict, service::BackendKey};
use kni_dataplane::FlowRecord;

use super::{
    CAPACITY, Programs, Ran, action_of, chosen,
    counters::counted,
    hex,
    tables::{Tables, service_key},
};
use crate::model::{Counts, Endpoint, Front, Model, Outcome, Seen, Version, World};

/// The programs and their model.
pub struct Lockstep {
    programs: Programs,
    pub(super) tables: Tables,
    /// The model; its world is changed through this type only.
    pub model: Model,
    pub(super) generations: HashMap<Version, u32>,
    pub(super) epochs: HashMap<(u32, u64), u32>,
    /// Number of backend lists that were written.
    pub(super) lists: u32,
    /// The backend list of each service port.
    pub(super) backends: HashMap<Front, Vec<BackendKey>>,
    /// Rows of backend lists that no service port has any more.
    pub(super) unused: Vec<BackendKey>,
}

impl Lockstep {
    /// Starts without endpoints.
    pub fn new(programs: Programs) -> Result<Self> {
        let tables = Tables::open(&programs.dataplane().pin_path())?;
        let model = Model {
            world: World::new(CAPACITY),
            ..Model::default()
        };
        let mut step = Self {
            programs,
            tables,
            model,
            generations: HashMap::new(),
            epochs: HashMap::new(),
            lists: 0,
            backends: HashMap::new(),
            unused: Vec::new(),
        };
        step.learn_configuration()?;
        Ok(step)
    }

    /// [`Programs::inside`] with the model.
    pub fn inside<R: Send>(name: &str, max_flows: u32, work: impl FnOnce(&mut Self) -> Result<R> + Send) -> Result<R> {
        Programs::inside(name, max_flows, |programs| work(&mut Self::new(programs)?))
    }

    /// The programs.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Writes a row of `SERVICES` of which each second word belongs to another service.
    pub fn tear_service(&mut self, front: Front, other: Front) -> Result<()> {
        self.tables.tear_service(&service_key(&front), &service_key(&other))
    }

    /// Lets every endpoint report events again, as the next window does.
    pub fn open_event_gates(&mut self) -> Result<()> {
        self.tables.open_event_gates()
    }

    /// Takes the counters of the kernel for the model's, after packets that the model does not know.
    pub fn clear_counters(&mut self) -> Result<()> {
        self.model.counts = counted(&self.programs)?;
        Ok(())
    }

    /// Rows of first fragments that came from outside.
    pub fn fragments_from_outside(&self) -> Result<usize> {
        self.tables.fragments_from_outside()
    }

    /// Events reported since the last call; waits for some.
    pub fn events(&mut self, patience: Duration) -> Result<Vec<FlowRecord>> {
        self.programs.events(patience)
    }

    /// [`Self::run_seen`] for a frame that the node did not receive from outside.
    pub fn run(&mut self, direction: Direction, endpoint: u32, frame: &[u8]) -> Result<Outcome> {
        self.run_seen(Seen::by(direction, endpoint), frame)
    }

    /// Runs a frame in both and compares the immediate results: return value, bytes (of frames that are not dropped),
    /// and that no frame reaches an endpoint of another network.
    pub fn run_seen(&mut self, seen: Seen, frame: &[u8]) -> Result<Outcome> {
        let ran = self.programs.run_as(seen, frame, 0)?;
        self.compare_run(seen, frame, &ran, true)
    }

    /// Compares a run with the model's result. `counted`: the counters of both agree, so that they show a dropped
    /// packet's backend.
    pub(super) fn compare_run(&mut self, seen: Seen, frame: &[u8], ran: &Ran, counted: bool) -> Result<Outcome> {
        let (id, direction) = (seen.endpoint, seen.direction);
        let sender = self.model.world.endpoint(id).cloned();
        let Self {
            programs,
            tables,
            model,
            ..
        } = self;
        let mut candidates = Vec::new();
        let expected = model.evaluate(seen, frame, &mut |choice| {
            candidates = choice.candidates.to_vec();
            if counted {
                chosen::backend(choice, ran, programs, tables)
            } else {
                chosen::any_backend(choice, ran, tables)
            }
        });
        model.complete(&mut |flow| tables.stream(&flow));
        let told = || format!("{} of endpoint {id}: {}", direction.as_str(), hex(frame));
        self.isolated(sender.as_ref(), direction, &expected, ran)
            .with_context(told)?;
        let action = if expected.refused {
            action_of(Verdict::Answered)
        } else {
            action_of(expected.verdict)
        };
        let dropped = action == action_of(Verdict::Truncated);
        if ran.action != action || !dropped && ran.frame != expected.frame {
            let tables = self.compare_tables().err();
            bail!(
                "{}\n model {} {:?} {}\nkernel action {} {}\nbackends: {candidates:?}\ntables: {tables:?}",
                told(),
                expected.verdict.as_str(),
                expected.destination,
                hex(&expected.frame),
                ran.action.cast_signed(),
                hex(&ran.frame)
            );
        }
        Ok(expected)
    }

    /// Checks an invariant for every verdict: a frame that was redirected to another endpoint's MAC address is in its
    /// network and for its address.
    fn isolated(&self, sender: Option<&Endpoint>, direction: Direction, expected: &Outcome, ran: &Ran) -> Result<()> {
        let redirected = ran.action == action_of(Verdict::Redirected);
        if !redirected || expected.verdict == Verdict::Answered {
            return Ok(());
        }
        let sender = sender.context("redirected for nobody")?;
        ensure!(direction == Direction::FromPod, "to_pod redirects");
        let receiver = (1..CAPACITY)
            .filter_map(|id| self.model.world.endpoint(id))
            .find(|endpoint| endpoint.mac == ran.frame[..6])
            .context("redirected to an unknown MAC address")?;
        ensure!(
            receiver.network == sender.network,
            "from network {} to {}",
            sender.network,
            receiver.network
        );
        let mine = match ran.frame[12..14] {
            [8, 0] => receiver.ipv4.is_some_and(|ip| ran.frame[30..34] == ip.octets()),
            _ => receiver.ipv6.is_some_and(|ip| ran.frame[38..54] == ip.octets()),
        };
        ensure!(mine, "the receiver does not have the destination address");
        Ok(())
    }

    /// [`Self::run_seen`], and the verdicts that the kernel counted for it. The preceding dry run of the programs must
    /// give the same verdict without counting it.
    pub fn run_counted(&mut self, seen: Seen, frame: &[u8]) -> Result<(Outcome, Counts)> {
        let before = counted(&self.programs)?;
        let told = self.reported(seen, frame)?;
        let outcome = self.run_seen(seen, frame);
        let mut delta = counted(&self.programs)?;
        delta.retain(|key, (packets, bytes)| {
            let (old_packets, old_bytes) = before.get(key).copied().unwrap_or_default();
            *packets -= old_packets;
            *bytes -= old_bytes;
            *packets > 0
        });
        let outcome = outcome.with_context(|| format!("the kernel counted {delta:?}"))?;
        ensure!(
            told == outcome.verdict,
            "explained as {}, but it was {}",
            told.as_str(),
            outcome.verdict.as_str()
        );
        Ok((outcome, delta))
    }

    /// The programs' dry run.
    fn reported(&self, seen: Seen, frame: &[u8]) -> Result<Verdict> {
        let told = self.programs.explain(seen, frame)?.event.verdict;
        Verdict::from_code(told).context("a verdict")
    }
}
