//! Measures small datagrams in one direction at the maximum rate.

use std::{
    io::ErrorKind,
    net::UdpSocket,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};

use crate::{cpu::pin, path::Path, workload::Placement};

/// Bytes of a datagram: with its headers, the minimum Ethernet frame.
const SIZE: usize = 18;
const TICK: Duration = Duration::from_millis(50);

/// Received datagrams per second.
pub(super) fn run(path: &Path, placement: Placement, time: Duration) -> Result<f64> {
    let server = path.server.enter(|| UdpSocket::bind((path.address, 0)))??;
    server.set_read_timeout(Some(TICK))?;
    let to = server.local_addr()?;
    let stop = AtomicBool::new(false);
    let received = thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&server, placement.server, &stop));
        let sent = path.client.enter(|| -> Result<()> {
            pin(placement.client)?;
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(to)?;
            let end = Instant::now() + time;
            while Instant::now() < end {
                for _ in 0..64 {
                    socket.send(&[0; SIZE])?;
                }
            }
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        let received = receiving.join().map_err(|_panic| anyhow!("the receiver panicked"))?;
        sent.and_then(|sent| sent).and(received)
    })?;
    ensure!(received > 0.0, "nothing arrives over {}", path.title);
    Ok(received)
}

/// The rate between the first and the last datagram.
fn receive(socket: &UdpSocket, cpu: usize, stop: &AtomicBool) -> Result<f64> {
    pin(cpu)?;
    let mut buffer = [0; SIZE];
    let (mut first, mut last, mut count) = (None, Instant::now(), 0_u32);
    loop {
        match socket.recv(&mut buffer) {
            Ok(_) => {
                last = Instant::now();
                first.get_or_insert(last);
                count += 1;
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    let took = first.map_or(Duration::ZERO, |first| last - first);
    Ok(if took.is_zero() {
        0.0
    } else {
        f64::from(count) / took.as_secs_f64()
    })
}
