//! Tests resets from outside that guess nothing but addresses and ports: the connections behind the
//! address of the node continue.

use anyhow::Result;
use fastrand::Rng;
use kni_integration::{
    frames::{Ip, Payload, TcpFlags},
    require,
};

use super::{
    PORT,
    scene::{Scene, node, paced},
};
use crate::egress::world::server;

#[tokio::test(flavor = "multi_thread")]
async fn blind_resets_end_no_connection() -> Result<()> {
    require!(steady, root, netns, bpf, ip, nft);
    let scene = Scene::start("resets", &[]).await?;
    let bystanders = scene.bystanders()?;
    let (outside, from, to) = (scene.outside()?, server(true).ip(), node()?);
    let mut rng = Rng::with_seed(1);
    paced("blind resets", 65_536 - 1024, 100_000, |number| {
        let segment = Payload::Tcp {
            source_port: PORT,
            destination_port: u16::try_from(1024 + number).unwrap_or(u16::MAX),
            flags: TcpFlags::RST,
            sequence: rng.u32(..),
            data: Vec::new(),
        };
        outside.send(&Ip::new(from, to).packet(&segment))
    })?;
    Scene::talks_out(&scene.left, &scene.right)?;
    bystanders.assert_whole()?;
    scene.bystanders_are_not_named().await
}
