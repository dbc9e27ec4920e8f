//! Measures how much slower this machine is than the reference: the tests multiply their patience by it.

use std::{
    fmt,
    hint::black_box,
    net::UdpSocket,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// How many processes are started.
const STARTS: u32 = 100;
/// How many datagrams go to another thread and back.
const ROUNDS: u32 = 1000;
/// How many steps the loop has.
const STEPS: u64 = 1_000_000;
/// How long these take on the reference machine, idle: starts, rounds, loop.
const REFERENCE: [Duration; 3] = [
    Duration::from_millis(60),
    Duration::from_millis(10),
    Duration::from_millis(5),
];
/// No answer within this time means that the measurement has failed.
const LOST: Duration = Duration::from_secs(10);

/// The speed of this machine at this moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Calibration {
    parts: [Duration; 3],
}

impl Calibration {
    /// Measures for about 200 ms on an idle machine.
    pub(super) fn measure() -> Result<Self> {
        let parts = [timed(starts)?, timed(rounds)?, timed(steps)?];
        Ok(Self { parts })
    }

    /// How many times slower this machine is than the reference: the geometric mean, from 1 to 8.
    pub(super) fn slowness(self) -> f64 {
        let ratios = self.parts.iter().zip(REFERENCE);
        let product: f64 = ratios.map(|(part, of)| part.as_secs_f64() / of.as_secs_f64()).product();
        (product.cbrt().clamp(1.0, 8.0) * 100.0).round() / 100.0
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [starts, rounds, steps] = self.parts.map(|part| part.as_secs_f64() * 1000.0);
        write!(
            f,
            "slowness of this machine {:.2} ({STARTS} process starts {starts:.0} ms, {ROUNDS} round trips {rounds:.0} ms, \
             a loop {steps:.0} ms)",
            self.slowness()
        )
    }
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

fn starts() -> Result<()> {
    for _ in 0..STARTS {
        let status = Command::new("/bin/true").stdin(Stdio::null()).status();
        ensure!(status.context("cannot run /bin/true")?.success(), "/bin/true failed");
    }
    Ok(())
}

fn rounds() -> Result<()> {
    let [one, other] = [socket()?, socket()?];
    one.connect(other.local_addr()?)?;
    other.connect(one.local_addr()?)?;
    thread::scope(|scope| {
        let answers = scope.spawn(|| (0..ROUNDS).try_for_each(|_| relay(&other)));
        for _ in 0..ROUNDS {
            one.send(&[1])?;
            one.recv(&mut [0])?;
        }
        answers.join().ok().context("the other thread panicked")?
    })
}

fn relay(socket: &UdpSocket) -> Result<()> {
    socket.recv(&mut [0])?;
    socket.send(&[1])?;
    Ok(())
}

fn socket() -> Result<UdpSocket> {
    let socket = UdpSocket::bind("127.0.0.1:0").context("cannot open a socket")?;
    socket.set_read_timeout(Some(LOST))?;
    Ok(socket)
}

#[expect(clippy::unnecessary_wraps, reason = "as the other measurements")]
fn steps() -> Result<()> {
    let mut value = 1_u64;
    for step in 0..STEPS {
        value = black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(step));
    }
    black_box(value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowness_is_the_mean_of_the_ratios() {
        let times = |factors: [u32; 3]| {
            let mut parts = REFERENCE;
            for (part, factor) in parts.iter_mut().zip(factors) {
                *part *= factor;
            }
            Calibration { parts }.slowness()
        };
        let is = |one: f64, other: f64| (one - other).abs() < 1e-9;
        assert!(is(times([1, 1, 1]), 1.0));
        assert!(is(times([2, 2, 2]), 2.0));
        assert!(is(times([1, 1, 8]), 2.0));
        assert!(is(times([1, 2, 1]), 1.26));
        assert!(is(times([0, 1, 1]), 1.0), "never faster than the reference");
        assert!(is(times([100, 100, 100]), 8.0));
    }

    #[test]
    fn this_machine_can_be_measured() {
        let measured = Calibration::measure().unwrap();
        assert!((1.0..=8.0).contains(&measured.slowness()));
    }
}
