//! Tests large transfers, large datagrams, and many concurrent and successive connections.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Node, Stage,
    echo::{tcp_echo, udp_echo},
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    require,
    stage::{address, forwarding},
    traffic::Servers,
    wait::patience,
};

use super::{FAMILIES, PORT};

#[tokio::test(flavor = "multi_thread")]
async fn large_payloads_pass_whole() -> Result<()> {
    require!(root, netns, bpf, ip);
    let node = Node::new("large")?;
    forwarding(&node)?;
    let stage = Stage::on(node, Manifest::overlapping()).await?;
    let pods = [stage.pod("large-1").await?, stage.pod("large-2").await?];
    let blue = [
        stage.pod_in("blue", "blue-1", "10.10.0.11,fd10::11").await?,
        stage.pod_in("blue", "blue-2", "10.10.0.12,fd10::12").await?,
    ];
    for v4 in FAMILIES {
        let node = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
        let fabric = if v4 { FABRIC_V4 } else { FABRIC_V6 }.parse()?;
        for (client, server, to) in [
            (&pods[0].inside, &pods[1].inside, address(&pods[1], v4)),
            (&blue[0].inside, &blue[1].inside, address(&blue[1], v4)),
            (&*stage.node, &pods[0].inside, address(&pods[0], v4)),
            (&pods[0].inside, &*stage.node, node),
            (&pods[1].inside, stage.node.fabric(), fabric),
            (stage.node.fabric(), &pods[1].inside, address(&pods[1], v4)),
        ] {
            let to = SocketAddr::new(to, PORT);
            tcp_echo(client, to, server, PORT, 1 << 20)?;
            // One fragment, several, and the maximum.
            for length in [1400, 1473, 8000, 60_000] {
                udp_echo(client, to, server, PORT, length)?;
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_connections_pass_at_once_and_in_turn() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("many", Manifest::overlapping()).await?;
    let pods = [stage.pod("many-1").await?, stage.pod("many-2").await?];
    let _server = Servers::start(&pods[1].inside, "many-2", PORT)?;
    for v4 in FAMILIES {
        let to = SocketAddr::new(address(&pods[1], v4), PORT);
        for from in [&pods[0].inside, &*stage.node] {
            at_once(from, to, 200)?;
            in_turn(from, to, 500)?;
        }
    }
    Ok(())
}

/// Opens all connections before the first is used.
fn at_once(from: &Namespaces, to: SocketAddr, count: usize) -> Result<()> {
    let connections: Vec<_> = from.enter(|| {
        (0..count)
            .map(|_| TcpStream::connect_timeout(&to, patience()))
            .collect::<Result<_, _>>()
    })??;
    for (number, connection) in connections.iter().enumerate() {
        ask(connection, number)?;
    }
    Ok(())
}

fn in_turn(from: &Namespaces, to: SocketAddr, count: usize) -> Result<()> {
    from.enter(|| {
        (0..count).try_for_each(|number| {
            let connection =
                TcpStream::connect_timeout(&to, patience()).with_context(|| format!("connection {number}"))?;
            ask(&connection, number)
        })
    })?
}

fn ask(mut connection: &TcpStream, number: usize) -> Result<()> {
    connection.set_read_timeout(Some(patience()))?;
    connection.write_all(format!("{number}\n").as_bytes())?;
    let mut line = String::new();
    BufReader::new(connection).read_line(&mut line)?;
    ensure!(
        line.starts_with("many-2 ") && line.ends_with(&format!(" {number}\n")),
        "connection {number} was answered {line:?}"
    );
    Ok(())
}
