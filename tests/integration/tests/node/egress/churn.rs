//! Tests that none of very many short connections fails.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result};
use kni_integration::{Pod, require};

use super::world::{World, masquerading, patience, server};

const CONNECTIONS: usize = 50_000;
const PODS: usize = 4;

/// Sends one byte on each connection, and closes after the client, until `stop`.
fn serve(listener: &TcpListener, stop: &AtomicBool) {
    for stream in listener.incoming() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut stream) = stream else { continue };
        let mut byte = [0];
        if stream.read_exact(&mut byte).is_ok() {
            // A failed client has disconnected. The server waits until the client closes: the end that closes first
            // holds the tuple for a minute, and a server that did so would refuse the node's ports to other pods in the
            // meantime.
            let answered = stream.write_all(&byte).and_then(|()| stream.read(&mut byte));
            drop(answered);
        }
    }
}

/// Opens connections one after the other; the first failure ends it.
fn connect(pod: &Pod, to: SocketAddr, count: usize) -> Result<usize> {
    pod.enter(|| {
        for done in 0..count {
            let once = || {
                let mut stream = TcpStream::connect_timeout(&to, patience())?;
                stream.set_read_timeout(Some(patience()))?;
                stream.write_all(b"x")?;
                let mut byte = [0];
                stream.read_exact(&mut byte)
            };
            once().with_context(|| format!("connection {done} of {} to {to}", pod.name))?;
        }
        Ok(count)
    })?
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_thousand_short_connections() -> Result<()> {
    require!(root, netns, bpf, ip);
    let world = World::start("churn", masquerading(), &["--flow-events-per-second", "0"]).await?;
    let watch = world.watch()?;
    let mut pods = Vec::new();
    for number in 0..PODS {
        pods.push(world.stage.pod(&format!("churn-{number}")).await?);
    }
    for v4 in [true, false] {
        let to = SocketAddr::new(server(v4).ip(), 9000);
        let listener = world.outside.server.enter(|| TcpListener::bind(to))??;
        let stop = AtomicBool::new(false);
        let begun = Instant::now();
        let done: Result<Vec<usize>> = thread::scope(|scope| {
            let servers: Vec<_> = (0..2).map(|_| scope.spawn(|| serve(&listener, &stop))).collect();
            let clients: Vec<_> = pods
                .iter()
                .map(|pod| scope.spawn(move || connect(pod, to, CONNECTIONS / 2 / PODS)))
                .collect();
            let done = clients
                .into_iter()
                .map(|client| client.join().expect("a client does not panic"))
                .collect();
            stop.store(true, Ordering::Relaxed);
            for _ in &servers {
                // Wakes a server up; the result does not matter.
                drop(world.outside.server.enter(|| TcpStream::connect(to)));
            }
            done
        });
        let done: usize = done?.into_iter().sum();
        let seconds = begun.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = done as f64 / seconds;
        println!("{done} connections to {to} in {seconds:.1} s: {rate:.0} per second");
        assert_eq!(done, CONNECTIONS / 2);
    }
    for pod in &pods {
        assert_eq!(world.stage.drops(pod, "from_pod", "masquerade_ports").await?, 0);
    }
    watch.assert_clean();
    Ok(())
}
