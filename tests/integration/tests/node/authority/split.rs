//! A request that arrives in two pieces, cut at every byte.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use kni_integration::{
    Manifest, Stage,
    agent::KUBELET_SOCKET,
    h2raw::{Call, Connection},
    require,
};

use super::{ATTACH, attach, authorities, sandbox, served};

/// Long enough for the agent to read the first piece alone, mostly.
const PAUSE: Duration = Duration::from_micros(300);

/// Pauses after the byte at which it is to cut, or after every byte.
struct Cut {
    stream: UnixStream,
    at: Option<usize>,
    written: usize,
}

impl Cut {
    fn open(stage: &Stage, at: Option<usize>) -> Result<Self> {
        let stream = stage.node.enter(|| UnixStream::connect(KUBELET_SOCKET))??;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let written = 0;
        Ok(Self { stream, at, written })
    }
}

impl Read for Cut {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl Write for Cut {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let until = match self.at {
            None => 1,
            Some(at) if at > self.written => (at - self.written).min(buffer.len()),
            Some(_) => buffer.len(),
        };
        let length = self.stream.write(&buffer[..until.min(buffer.len())])?;
        self.written += length;
        if self.at.is_none_or(|at| at == self.written) {
            thread::sleep(PAUSE);
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_cut_at_any_byte_is_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("cut", Manifest::overlapping()).await?;
    let sandbox = sandbox(&stage, "cut").await?;
    let message = attach(&sandbox);
    for authority in authorities(KUBELET_SOCKET) {
        let call = Call::new(ATTACH, &authority, &message);
        let mut at = 1;
        let mut length = usize::MAX;
        while at < length {
            let mut connection = Connection::start(Cut::open(&stage, Some(at))?)?;
            let reply = connection
                .call(&call)
                .with_context(|| format!("{authority} cut at {at}"))?;
            served(&reply).with_context(|| format!("{authority} cut at {at}"))?;
            // The first round tells how much there is to cut, with what follows the request.
            length = length.min(connection.stream().written);
            at += 1;
        }
        assert!(at > 500, "only {at} bytes were cut");
        let mut connection = Connection::start(Cut::open(&stage, None)?)?;
        served(
            &connection
                .call(&call)
                .with_context(|| format!("{authority} byte by byte"))?,
        )?;
    }
    Ok(())
}
