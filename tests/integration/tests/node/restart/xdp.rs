//! Tests pods of a network with `spec.xdp`, from attach to detach, across restarts of the agent.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Result, ensure};
use kni_integration::{
    Manifest, require,
    stage::address,
    traffic::{Servers, Stream},
};

use crate::watched::{Watched, warm};

const PORT: u16 = 8080;

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_over_restarts_and_nothing_is_left() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    // One prewarmed pair, one created on demand.
    for sandboxes in [0, 1] {
        let mut options = warm(sandboxes);
        options.manifests =
            vec![Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]).spec("xdp: true")];
        let mut stage = Watched::with("xdp-life", options).await?;
        let before = stage.picture().await?;
        let client = stage.kubelet.run_pod("team", "client", &[]).await?;
        let server = stage.kubelet.run_pod("team", "server", &[]).await?;
        let links = async |stage: &Watched| -> Result<Vec<u32>> {
            let interfaces = stage.interfaces().await?;
            ensure!(interfaces.iter().all(|interface| interface.healthy), "{interfaces:#?}");
            let programs = interfaces.iter().flat_map(|interface| &interface.programs);
            Ok(programs
                .filter(|program| program.name == "xdp_pod")
                .map(|program| program.link_id)
                .collect())
        };
        let first = links(&stage).await?;
        assert_eq!(first.len(), 2);
        let servers = Servers::start(&server.inside, "server", PORT)?;
        let mut streams = Vec::new();
        for v4 in [true, false] {
            let to = SocketAddr::new(address(&server, v4), PORT);
            streams.push(Stream::udp(&client.inside, to)?);
            streams.push(Stream::tcp(&client.inside, to)?);
        }
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(200));
            stage.agent.kill9()?;
            thread::sleep(Duration::from_millis(300));
            stage.restart().await?;
            assert_eq!(links(&stage).await?, first, "links are taken over in place");
        }
        for stream in streams {
            stream.stop().assert_whole("server");
        }
        drop(servers);
        for pod in [client, server] {
            stage.kubelet.kill_pod(pod).await?;
        }
        stage.assert_as(&before).await?;
    }
    Ok(())
}
