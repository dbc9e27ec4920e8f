//! Tests UDP sockets of the node that are connected to a host port while its pod is replaced.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Namespaces, eventually, require,
    traffic::{Servers, new_token},
};
use kni_proto::kni::Protocol;

use super::{
    FAMILIES, PORT,
    node_ports::{HOST_PORT, places, run, start},
    world::patience,
};

/// A socket of the node that is connected to the address.
fn connected(node: &Namespaces, to: SocketAddr) -> Result<UdpSocket> {
    let socket = node.enter(|| -> std::io::Result<UdpSocket> {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => [0, 0, 0, 0].into(),
            SocketAddr::V6(_) => [0_u16; 8].into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(to)?;
        Ok(socket)
    })??;
    socket.set_read_timeout(Some(patience()))?;
    Ok(socket)
}

/// Who answers on the socket.
fn ask(socket: &UdpSocket) -> std::io::Result<String> {
    let token = new_token();
    socket.send(token.as_bytes())?;
    let mut buffer = [0; 2048];
    loop {
        let length = socket.recv(&mut buffer)?;
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        // Answers of earlier questions may be on their way.
        if text.contains(&token) {
            return Ok(text.split(' ').next().unwrap_or_default().to_owned());
        }
    }
}

fn everywhere() -> Result<Vec<IpAddr>> {
    let places = FAMILIES.iter().map(|v4| places(*v4)).collect::<Result<Vec<_>>>()?;
    Ok(places.concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_does_not_stay_connected_to_a_pod_that_is_gone() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = start("sockets").await?;
    let node: &Namespaces = &world.stage.node;
    let first = run(&world.stage, "first", &[Protocol::Udp], "").await?;
    let _first = Servers::start(&first.inside, "first", PORT)?;
    let other = world.stage.kubelet.run_pod("team", "other", &[]).await?;
    let _other = Servers::start(&other.inside, "other", PORT)?;
    let at = |to: &IpAddr| SocketAddr::new(*to, HOST_PORT);
    let places = everywhere()?;
    let sockets = places.iter().map(|to| connected(node, at(to)));
    let sockets = sockets.collect::<Result<Vec<_>>>()?;
    for (to, socket) in places.iter().zip(&sockets) {
        ensure!(ask(socket)? == "first", "{to}");
    }
    // Sockets that have nothing to do with the port: of another pod, without a peer.
    let direct = FAMILIES.map(|v4| -> Result<UdpSocket> {
        let address = other.ip(v4).context("an address")?;
        connected(node, SocketAddr::new(address, PORT))
    });
    let direct = direct.into_iter().collect::<Result<Vec<UdpSocket>>>()?;
    let idle = node.enter(|| UdpSocket::bind("0.0.0.0:0"))??;

    world.stage.kubelet.kill_pod(first).await?;
    let second = run(&world.stage, "second", &[Protocol::Udp], "").await?;
    let _second = Servers::start(&second.inside, "second", PORT)?;
    for (to, socket) in places.iter().zip(&sockets) {
        // It waits inside the kernel until the socket ends.
        let error = match socket.take_error()? {
            Some(error) => error,
            None => socket.recv(&mut [0; 64]).err().context("a datagram")?,
        };
        ensure!(error.kind() == ErrorKind::ConnectionAborted, "{to}: {error}");
        socket.connect(at(to))?;
    }
    eventually(patience(), async || {
        for (to, socket) in places.iter().zip(&sockets) {
            let answered = ask(socket).with_context(|| to.to_string());
            if answered.is_err() {
                socket.connect(at(to))?;
            }
            ensure!(answered? == "second", "{to}: the pod of before");
        }
        Ok(())
    })
    .await?;
    for socket in &direct {
        ensure!(ask(socket)? == "other", "a socket of another pod");
    }
    ensure!(idle.take_error()?.is_none(), "a socket without a peer");
    Ok(())
}

/// An agent that starts again compares the sockets with the pods that it finds, and ends none of a pod that runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_ends_no_socket_of_a_pod_that_runs() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut world = start("kept-sockets").await?;
    let node: Namespaces = (*world.stage.node).clone();
    let pod = run(&world.stage, "served", &[Protocol::Udp], "").await?;
    let _served = Servers::start(&pod.inside, "served", PORT)?;
    let places = everywhere()?;
    let sockets = places
        .iter()
        .map(|to| connected(&node, SocketAddr::new(*to, HOST_PORT)));
    let sockets = sockets.collect::<Result<Vec<_>>>()?;
    for _ in 0..2 {
        for (to, socket) in places.iter().zip(&sockets) {
            ensure!(ask(socket)? == "served", "{to}");
        }
        world.stage.agent.kill9()?;
        world.stage.agent.restart()?;
        // The agent compares the sockets again when the ports change.
        let other = run_beside(&world.stage).await?;
        world.stage.kubelet.kill_pod(other).await?;
    }
    for (to, socket) in places.iter().zip(&sockets) {
        ensure!(ask(socket)? == "served", "{to}, in the end");
    }
    Ok(())
}

/// A pod with another UDP port of the node.
async fn run_beside(stage: &kni_integration::Stage) -> Result<kni_integration::Pod> {
    let edit = |request: &mut kni_proto::kni::AttachInterfaceRequest| {
        request.port_mappings = vec![kni_proto::kni::PortMapping {
            protocol: Protocol::Udp.into(),
            container_port: PORT.into(),
            host_port: (HOST_PORT + 1).into(),
            host_ip: String::new(),
        }];
    };
    Ok(stage.kubelet.run_pod_with("team", "beside", &[], edit).await?)
}
