//! Tests a pod that asks another one as a resolver is asked: one datagram and one answer per socket.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{long, require, stage::address, traffic::new_token};

use super::{PORT, scene::Scene};

/// More than the share of a pod at the usual sizes, which is 16 384 flows.
const LOOKUPS: u32 = 20_000;
const PATIENCE: Duration = Duration::from_millis(200);
/// Lookups without an answer, after which the rest would have none.
const ENOUGH: u32 = 20;

/// Asks from a port that no earlier lookup used: the kernel would choose some of them twice.
fn look_up(number: u32, to: SocketAddr) -> Result<bool> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, u16::try_from(20_000 + number)?))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let question = new_token();
    socket.send(question.as_bytes())?;
    let mut answer = [0; 512];
    Ok(socket
        .recv(&mut answer)
        .is_ok_and(|length| String::from_utf8_lossy(&answer[..length]).contains(&question)))
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_from_fresh_sockets_leave_the_pod_its_connections() -> Result<()> {
    require!(exclusive, root, netns, bpf, ip, nft);
    let scene = Scene::start("lookups", &[]).await?;
    let bystanders = scene.bystanders()?;
    let to = SocketAddr::new(address(&scene.victim, true), PORT);
    let begin = Instant::now();
    let (asked, unanswered) = scene.attacker.enter(|| -> Result<_> {
        let (mut asked, mut unanswered) = (0, 0);
        while asked < LOOKUPS && unanswered < ENOUGH {
            asked += 1;
            unanswered += u32::from(!look_up(asked, to)?);
        }
        Ok((asked, unanswered))
    })??;
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
        let answered = scene.attacker.enter(|| look_up(LOOKUPS + 1, to))??;
        ensure!(answered, "no lookup is possible half a minute later");
    }
    Ok(())
}
