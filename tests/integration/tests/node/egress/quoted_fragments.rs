//! Tests ICMP errors that quote a fragment of a masqueraded packet: its owner is unknown, so no pod gets them.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    eventually,
    frames::{Extension, Ip, Link, PacketSocket, Payload},
    node::{NODE_V4, NODE_V6},
    require,
};

use super::{
    FAMILIES,
    world::{World, masquerading, patience, server},
};

const WORD: &[u8] = b"quote-me";
const PORT: u16 = 9000;

fn has_word(frame: &[u8]) -> bool {
    frame.windows(WORD.len()).any(|bytes| bytes == WORD)
}

/// Whether it is an ICMP packet that quotes the word; the pod's own request is not.
fn quotes_word(frame: &[u8]) -> bool {
    let protocol = if frame[12..14] == [8, 0] { frame[23] } else { frame[20] };
    matches!(protocol, 1 | 58) && has_word(frame)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_about_a_fragment_is_dropped_and_one_about_the_whole_arrives() -> Result<()> {
    require!(root, netns, bpf, ip, nft);
    let world = World::start("quoted", masquerading(), &[]).await?;
    let watch = world.watch()?;
    let pod = world.stage.pod("quoted").await?;
    // The stack of the server must not send errors.
    world.outside.server.nft(&format!(
        "add table inet mute\nadd chain inet mute in {{ type filter hook input priority -300; }}\n\
         add rule inet mute in udp dport {PORT} drop\n"
    ))?;
    let inside = PacketSocket::open(&pod.inside, "eth0")?;
    let outside = PacketSocket::open(&world.outside.server, "server0")?;
    for v4 in FAMILIES {
        let socket = pod.enter(|| std::net::UdpSocket::bind(if v4 { "0.0.0.0:0" } else { "[::]:0" }))??;
        socket.send_to(WORD, (server(v4).ip(), PORT))?;
        let seen = outside
            .receive(patience(), has_word)?
            .context("the server saw nothing")?;
        let head = if v4 { 34 } else { 54 };
        let own = u16::from_be_bytes(seen[head..head + 2].try_into()?);
        let node: IpAddr = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
        let back = Link::new(seen[..6].try_into()?, seen[6..12].try_into()?);
        let sent = Payload::udp(own, PORT, WORD);
        let whole = Ip::new(node, server(v4).ip());
        let mut fragment = whole.clone();
        if v4 {
            fragment.v4_fragment = 0x2000;
        } else {
            let (offset, more, id) = (0, true, 7);
            fragment = fragment.extension(Extension::Fragment { offset, more, id });
        }
        let error = |quoted: Vec<u8>| {
            let (kind, code) = if v4 { (3, 3) } else { (1, 4) };
            let body = [&[0; 4][..], &quoted].concat();
            back.frame(&Ip::new(server(v4).ip(), node).packet(&Payload::Icmp { kind, code, body }))
        };
        let dropped = world.drops("from_uplink", "icmp_fragment").await?;
        outside.send(&error(fragment.packet(&sent)))?;
        // In IPv6, the fragment header of the quoted packet hides its owner: the error stays in the node's stack.
        if v4 {
            eventually(patience(), async || {
                let now = world.drops("from_uplink", "icmp_fragment").await?;
                ensure!(now > dropped, "it is not counted: {}", world.stage.knictl(&["drops"])?);
                Ok(())
            })
            .await?;
        }
        let leaked = inside.receive(Duration::from_millis(100), quotes_word)?;
        ensure!(leaked.is_none(), "IPv4 {v4}: the pod got {leaked:02x?}");
        outside.send(&error(whole.packet(&sent)))?;
        inside
            .receive(patience(), quotes_word)?
            .with_context(|| format!("IPv4 {v4}: the error about the whole packet does not arrive"))?;
    }
    watch.assert_clean();
    Ok(())
}
