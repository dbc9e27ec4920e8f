//! Tests masquerading in random sequences with a simple model: the owner of each port of the node, and the receiver of
//! each answer.

mod packet;
mod step;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use kni_integration::{default_seed, frames::TcpFlags, on_one_cpu, require};

use self::{
    step::Step,
    wire::{Outcome, Way, Wire},
};
use super::world::{World, masquerading};

/// Few ports, so that they run out and are reused continuously.
const RANGE: std::ops::RangeInclusive<u16> = 61_000..=61_015;
/// Source ports of the pods, the same for all.
const OWN: std::ops::Range<u16> = 4000..4008;
/// Ports of the server.
const THERE: [u16; 2] = [9000, 9001];
const STEPS: u64 = 2000;
/// A UDP flow expires 10 s after an answer, a flow without an answer after 30 s.
const STALE: Duration = Duration::from_secs(5);
/// The port of a connection that both sides have closed is free from the next tick on.
const TICK: Duration = Duration::from_millis(12);

/// A transport, or echo requests, whose identifier is translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Transport {
    Tcp,
    Udp,
    Sctp,
    Echo,
}

/// A flow with the addresses and ports of its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pod: usize,
    way: Way,
    own: u16,
}

/// A flow that has a port of the node.
#[derive(Debug)]
struct Live {
    port: u16,
    answered: bool,
    used: Instant,
    /// The latest packet, as received by the server.
    latest: Vec<u8>,
}

/// The model, and the system that it is compared with.
struct Run {
    rng: Rng,
    wire: Wire,
    live: BTreeMap<Key, Live>,
    /// Ports of connections that their pods have replaced, or that the server has reset.
    ghosts: BTreeSet<(Way, u16)>,
    closed_at: Instant,
    refused: u64,
    done: BTreeMap<Step, u64>,
}

impl Run {
    fn on_way(&self, way: Way) -> impl Iterator<Item = (&Key, &Live)> {
        self.live.iter().filter(move |(key, _)| key.way == way)
    }

    /// Sends a packet of a pod, in an existing or in a new flow. A SYN before the answer belongs to the same flow;
    /// after the answer it starts another one.
    fn send(&mut self, key: Key, flags: TcpFlags) -> Result<()> {
        let ghosts = self.ghosts.iter().filter(|(way, _)| *way == key.way).count();
        let taken = self.on_way(key.way).count();
        let anew = flags == TcpFlags::SYN && key.way.transport == Transport::Tcp;
        let known = self.live.get(&key).filter(|live| !(anew && live.answered));
        let known = known.map(|live| live.port);
        let (may, must) = match known {
            Some(_) => (true, true),
            None => (taken < RANGE.count(), taken + ghosts < RANGE.count()),
        };
        if known.is_none() {
            thread::sleep((self.closed_at + TICK).saturating_duration_since(Instant::now()));
        }
        let told = || format!("{key:?} ({flags:?}, port {known:?}), {taken} ports taken, {ghosts} left behind");
        let seen = match self.wire.send(key, flags, must)? {
            Outcome::Seen(seen) => seen,
            Outcome::Silent => {
                ensure!(!must, "{} does not arrive", told());
                self.refused += 1;
                return Ok(());
            }
        };
        ensure!(may && RANGE.contains(&seen.port), "{} got port {}", told(), seen.port);
        if let Some(port) = known {
            ensure!(seen.port == port, "{} moved to {}", told(), seen.port);
        } else if let Some((other, _)) = self.on_way(key.way).find(|(_, live)| live.port == seen.port) {
            anyhow::bail!("{} and {other:?} both have port {}", told(), seen.port);
        }
        let now = Live {
            port: seen.port,
            answered: known.is_some() && self.live[&key].answered,
            used: Instant::now(),
            latest: seen.packet,
        };
        if let Some(before) = self.live.insert(key, now)
            && before.port != seen.port
        {
            // Its row still exists: the server may still send to it.
            self.ghosts.insert((key.way, before.port));
        }
        self.ghosts.remove(&(key.way, seen.port));
        Ok(())
    }

    /// Sends a packet of the server, which must reach the flow's pod as an answer from the requested address.
    fn answer(&mut self, key: Key, flags: TcpFlags) -> Result<()> {
        let live = self.live.get_mut(&key).context("a flow that there is")?;
        self.wire
            .answer(key, live.port, flags)
            .with_context(|| format!("the answer to {key:?} at port {}", live.port))?;
        live.answered = true;
        live.used = Instant::now();
        Ok(())
    }

    /// Closes a connection, from either side first; half closed, it still carries data.
    fn close(&mut self, key: Key) -> Result<()> {
        if self.rng.bool() {
            self.send(key, TcpFlags::FIN_ACK)?;
            self.answer(key, TcpFlags::ACK)?;
            self.answer(key, TcpFlags::FIN_ACK)?;
            self.send(key, TcpFlags::ACK)?;
        } else {
            self.answer(key, TcpFlags::FIN_ACK)?;
            self.send(key, TcpFlags::ACK)?;
            self.send(key, TcpFlags::FIN_ACK)?;
            self.answer(key, TcpFlags::ACK)?;
        }
        self.remove(key);
        Ok(())
    }

    fn reset(&mut self, key: Key) -> Result<()> {
        if self.rng.bool() {
            self.send(key, TcpFlags::RST)?;
        } else {
            self.answer(key, TcpFlags::RST)?;
            // It may be forged: the pod's next packet would continue with the port.
            self.ghosts.insert((key.way, self.live[&key].port));
        }
        self.remove(key);
        Ok(())
    }

    fn remove(&mut self, key: Key) {
        self.live.remove(&key);
        self.closed_at = Instant::now();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_sequences_keep_ports_apart_and_answers_find_home() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let seed = env::var("KNI_SEED").map_or_else(|_| Ok(default_seed(6)), |seed| seed.parse())?;
    let steps = env::var("KNI_STEPS").map_or(Ok(STEPS), |steps| steps.parse())?;
    println!("{steps} steps, KNI_SEED={seed}");
    let range = format!("{}-{}", RANGE.start(), RANGE.end());
    let world = World::start("sequences", masquerading(), &["--masquerade-ports", &range]).await?;
    let watch = world.watch()?;
    let same = "10.10.0.11,fd10::11";
    let pods = [
        world.stage.pod("sequences-1").await?,
        world.stage.pod("sequences-2").await?,
        world.stage.pod_in("blue", "sequences-blue", same).await?,
        world.stage.pod_in("red", "sequences-red", same).await?,
    ];
    let mut run = Run {
        rng: Rng::with_seed(seed),
        wire: Wire::open(&world, &pods).await?,
        live: BTreeMap::new(),
        ghosts: BTreeSet::new(),
        closed_at: Instant::now(),
        refused: 0,
        done: BTreeMap::new(),
    };
    let begun = Instant::now();
    on_one_cpu(|| {
        for number in 0..steps {
            let step = run.step().with_context(|| format!("step {number}, KNI_SEED={seed}"))?;
            *run.done.entry(step).or_default() += 1;
        }
        run.wire.finish()
    })?;
    println!("{:?}, {} refused, in {:.1?}", run.done, run.refused, begun.elapsed());
    let drops = world.drops("from_pod", "masquerade_ports").await?;
    ensure!(drops == run.refused, "{} refused, {drops} counted", run.refused);
    if steps >= STEPS {
        ensure!(run.refused > 0, "the ports never ran out");
        ensure!(
            Step::ALL.iter().all(|step| run.done.contains_key(step)),
            "{:?}",
            run.done
        );
    }
    watch.assert_clean();
    Ok(())
}
