//! 2: Tests UDP, which has no end of connection: flows move when their backend no longer serves, unless there is no
//! other.

use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Pod, require, traffic::new_token};

use super::{
    objects::{State, served, service},
    scene::{FAMILIES, Scene, assert_refused, front, patience},
};

const DNS: u8 = 53;

/// A client's socket that is never closed.
struct Asking(UdpSocket);

impl Asking {
    fn open(from: &Pod, to: SocketAddr) -> Result<Self> {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = from.enter(|| {
            let socket = UdpSocket::bind(any)?;
            socket.connect(to).map(|()| socket)
        })??;
        socket.set_read_timeout(Some(patience()))?;
        Ok(Self(socket))
    }

    /// Checks that ten requests are all answered by `who`.
    fn assert_answered(&self, who: &str) -> Result<()> {
        for number in 0..10 {
            let (token, mut buffer) = (new_token(), [0; 512]);
            self.0.send(token.as_bytes())?;
            let length = self.0.recv(&mut buffer);
            let length = length.with_context(|| format!("question {number}, which {who} should answer"))?;
            let answer = String::from_utf8_lossy(&buffer[..length]);
            ensure!(
                answer.starts_with(&format!("{who} ")) && answer.contains(&token),
                "question {number}: not {who} answers but {answer:?}"
            );
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn udp_moves_when_its_endpoint_serves_no_more() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("moved").await?;
    let (old, new) = (scene.backend("old").await?, scene.backend("new").await?);
    let client = scene.stage.pod("client").await?;
    for gone in [None, Some(State::Gone)] {
        scene
            .apply(&served(service("dns", DNS), &[(&old.pod, State::Ready)]))
            .await?;
        let asking = FAMILIES.map(|v4| Asking::open(&client, front(v4, DNS)));
        let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
        asking.iter().try_for_each(|one| one.assert_answered("old"))?;
        // A terminating endpoint gets no new flows and retains the existing ones.
        let draining = [(&old.pod, State::Draining), (&new.pod, State::Ready)];
        scene.apply(&served(service("dns", DNS), &draining)).await?;
        asking.iter().try_for_each(|one| one.assert_answered("old"))?;
        for v4 in FAMILIES {
            Asking::open(&client, front(v4, DNS))?.assert_answered("new")?;
        }
        // The old pod still answers, but no flow may reach it.
        let mut pods = vec![(&new.pod, State::Ready)];
        pods.extend(gone.map(|state| (&old.pod, state)));
        scene.apply(&served(service("dns", DNS), &pods)).await?;
        asking.iter().try_for_each(|one| one.assert_answered("new"))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_endpoint_udp_flows_are_left_alone() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("unmoved").await?;
    let (old, new) = (scene.backend("old").await?, scene.backend("new").await?);
    let client = scene.stage.pod("client").await?;
    let dns = |pods: &[(&Pod, State)]| served(service("dns", DNS), pods);
    scene.apply(&dns(&[(&old.pod, State::Ready)])).await?;
    let asking = FAMILIES.map(|v4| Asking::open(&client, front(v4, DNS)));
    let asking = asking.into_iter().collect::<Result<Vec<_>>>()?;
    asking.iter().try_for_each(|one| one.assert_answered("old"))?;
    for none in [vec![], vec![(&old.pod, State::Gone)]] {
        scene.apply(&dns(&none)).await?;
        asking.iter().try_for_each(|one| one.assert_answered("old"))?;
        for v4 in FAMILIES {
            assert_refused(&client.inside, front(v4, DNS))?;
        }
    }
    // The first new endpoint gets all flows.
    scene.apply(&dns(&[(&new.pod, State::Ready)])).await?;
    asking.iter().try_for_each(|one| one.assert_answered("new"))
}
