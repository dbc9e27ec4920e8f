//! Clients that try to reach a server which they may not reach.

use std::{
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use kni_integration::{Namespaces, eventually_sync, patience};

/// How long an attempt to connect lasts: there are many of them, and one that would succeed is repeated until it does.
const ATTEMPT: Duration = Duration::from_millis(3);

/// A client that sends datagrams and connects until stopped.
pub(super) struct Intruder {
    pub(super) word: &'static str,
    stop: Arc<AtomicBool>,
    tries: Arc<Mutex<Tries>>,
    thread: JoinHandle<Result<()>>,
}

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Tries {
    pub(super) made: u64,
    pub(super) connected: u64,
}

impl Intruder {
    pub(super) fn start(from: &Namespaces, word: &'static str, to: Vec<SocketAddr>) -> Result<Self> {
        let (stop, tries) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Tries>>::default());
        let (told, counted, inside) = (Arc::clone(&stop), Arc::clone(&tries), from.clone());
        let thread = thread::Builder::new().spawn(move || {
            inside.enter(|| {
                let sockets = [UdpSocket::bind("0.0.0.0:0")?, UdpSocket::bind("[::]:0")?];
                // Longer each time: a busy machine may need it for one that succeeds.
                let mut attempt = ATTEMPT;
                while !told.load(Ordering::Relaxed) {
                    for to in &to {
                        sockets[usize::from(to.is_ipv6())].send_to(word.as_bytes(), to)?;
                        let connected = TcpStream::connect_timeout(to, attempt);
                        let mut tries = counted.lock().expect("no holder panics");
                        tries.connected += u64::from(connected.is_ok());
                        tries.made += 1;
                        if tries.made % 500 == 0 {
                            attempt = (attempt * 2).min(Duration::from_millis(100));
                        }
                    }
                }
                Ok(())
            })?
        })?;
        Ok(Self {
            word,
            stop,
            tries,
            thread,
        })
    }

    /// Waits until the tries are enough.
    pub(super) fn wait(&self, what: &str, enough: fn(&Tries) -> bool) -> Result<()> {
        eventually_sync(patience(), || {
            let tries = *self.tries.lock().expect("no holder panics");
            ensure!(enough(&tries) || self.thread.is_finished(), "{tries:?}");
            Ok(())
        })
        .with_context(|| format!("{}: until {what}", self.word))
    }

    /// Ends it. Its tries are complete then.
    pub(super) fn stop(self) -> Result<Tries> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_payload| anyhow!("it panicked"))??;
        let tries = *self.tries.lock().expect("no holder panics");
        Ok(tries)
    }
}
