//! Tests a pod that asks another one as a resolver is asked: one datagram and one answer per socket.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{long, patience, require, stage::address, traffic::new_token};

use super::{PORT, scene::Scene};

/// More than the share of a pod at the usual sizes, which is 16 384 flows.
const LOOKUPS: u32 = 20_000;
/// Without an answer for this time, the counter of refused packets shows whether one will come.
const UNCONFIRMED: Duration = Duration::from_millis(200);
/// Lookups without an answer, after which the rest would have none.
const ENOUGH: u32 = 20;

/// A question without an answer so far.
struct Lookup {
    socket: UdpSocket,
    question: String,
}

impl Lookup {
    /// Asks from a port that no earlier lookup used: the kernel would choose some of them twice.
    fn ask(number: u32, to: SocketAddr) -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, u16::try_from(20_000 + number)?))?;
        socket.connect(to)?;
        let question = new_token();
        socket.send(question.as_bytes())?;
        Ok(Self { socket, question })
    }

    fn is_answered(&self, within: Duration) -> Result<bool> {
        self.socket.set_read_timeout(Some(within))?;
        let mut answer = [0; 512];
        Ok(self
            .socket
            .recv(&mut answer)
            .is_ok_and(|length| String::from_utf8_lossy(&answer[..length]).contains(&self.question)))
    }
}

/// Asks from the number on, until all lookups are made or one has no answer.
fn look_up_from(mut number: u32, to: SocketAddr) -> Result<(u32, Option<Lookup>)> {
    while number < LOOKUPS {
        number += 1;
        let lookup = Lookup::ask(number, to)?;
        if !lookup.is_answered(UNCONFIRMED)? {
            return Ok((number, Some(lookup)));
        }
    }
    Ok((number, None))
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_from_fresh_sockets_leave_the_pod_its_connections() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let scene = Scene::start("lookups", &[]).await?;
    let bystanders = scene.bystanders()?;
    let to = SocketAddr::new(address(&scene.victim, true), PORT);
    let begin = Instant::now();
    let (mut asked, mut unanswered) = (0, 0);
    while asked < LOOKUPS && unanswered < ENOUGH {
        let (number, doubtful) = scene.attacker.enter(|| look_up_from(asked, to))??;
        asked = number;
        let Some(lookup) = doubtful else { continue };
        if scene.refused(&scene.attacker, "from_pod").await? > u64::from(unanswered) {
            unanswered += 1;
        } else {
            ensure!(
                lookup.is_answered(patience())?,
                "lookup {asked}: no answer, and not refused"
            );
        }
    }
    println!(
        "{asked} lookups, {unanswered} without an answer, in {:?}",
        begin.elapsed()
    );
    Scene::talks_out(&scene.attacker, &scene.victim)?;
    Scene::talks_out(&scene.victim, &scene.attacker)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await?;
    let refused = scene.refused(&scene.attacker, "from_pod").await?;
    ensure!(
        unanswered == 0 || refused >= u64::from(unanswered),
        "{unanswered} lookups had no answer, and {refused} packets were refused"
    );
    if long() {
        // Lookups are removed soon: a resolver can be asked at this rate all the time.
        std::thread::sleep(Duration::from_secs(35));
        let answered = scene
            .attacker
            .enter(|| Lookup::ask(LOOKUPS + 1, to)?.is_answered(patience()))??;
        ensure!(answered, "no lookup is possible half a minute later");
    }
    Ok(())
}
