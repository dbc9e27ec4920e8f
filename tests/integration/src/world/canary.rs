//! Detects that agents have applied all policies: pods whose policy allows a different port after each change.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::Path,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{Net, objects, run_labelled};
use crate::{
    bind::when_free, eventually_sync, namespaces::Namespaces, on_one_cpu, oracle::Labels, patience, stage::Stage,
};

/// The namespace of the pods.
pub(super) const NAMESPACE: &str = "canary";
/// A port that no policy allows.
const NEVER: u16 = 9999;

/// One that sends to one that receives at an address.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) sender: Namespaces,
    pub(super) receiver: Namespaces,
    pub(super) address: IpAddr,
}

/// The policy of a network, and a receiver on each node.
#[derive(Debug)]
pub(super) struct Canary {
    net: Net,
    ways: Vec<Way>,
    port: u16,
}

impl Canary {
    /// Receivers on a network, one for each agent.
    pub(super) const fn new(net: Net, ways: Vec<Way>) -> Self {
        Self {
            net,
            ways,
            port: 10_000,
        }
    }

    /// Two pods of one node.
    pub(super) async fn start(stage: &Stage) -> Result<Self> {
        let mut ends = Vec::new();
        for name in ["sender", "receiver"] {
            let (sandbox, netns) = run_labelled(&stage.kubelet, (NAMESPACE, name), &Labels::new(), &[]).await?;
            let configs = stage.kubelet.query(&sandbox.id).await?.ipconfigs;
            let first = configs.get("eth0").and_then(|config| config.ip.first());
            let address: IpAddr = first.context("a canary without an address")?.parse()?;
            ends.push((stage.node.net_at(name, Path::new(&netns))?, address));
        }
        let (receiver, address) = ends.pop().context("two pods")?;
        let (sender, _) = ends.pop().context("two pods")?;
        let way = Way {
            sender,
            receiver,
            address,
        };
        Ok(Self::new(Net::Default, vec![way]))
    }

    /// The policy that opens only a port that was not open before. An agent that has applied it has applied all earlier
    /// writes, if it reads them first.
    pub(super) fn next(&mut self) -> Value {
        self.port += 1;
        objects::canary(self.net, NAMESPACE, self.port)
    }

    /// Waits until every agent has applied the policy of the latest [`Self::next`]. This proves nothing before
    /// [`Self::wait_shut`].
    pub(super) fn wait(&self) -> Result<()> {
        self.ways.iter().try_for_each(|way| way.wait(self.port))
    }

    /// Waits until the first policy is enforced: until datagrams to a port that no policy allows are dropped.
    pub(super) fn wait_shut(&self) -> Result<()> {
        self.ways.iter().try_for_each(|way| way.wait_shut(self.port))
    }
}

impl Way {
    fn wait(&self, port: u16) -> Result<()> {
        let pair = self.sockets(port)?;
        eventually_sync(patience(), || {
            ensure!(arrives(&pair)?, "port {port} of the canary stays closed");
            Ok(())
        })
    }

    /// A datagram to the open port is the fence: what was sent before it, and has not arrived before it, was dropped.
    fn wait_shut(&self, open: u16) -> Result<()> {
        let (to_closed, closed) = self.sockets(NEVER)?;
        let (to_open, fence) = self.sockets(open)?;
        fence.set_nonblocking(false)?;
        fence.set_read_timeout(Some(patience()))?;
        eventually_sync(patience(), || {
            on_one_cpu(|| {
                to_closed.send(b"canary")?;
                to_open.send(b"canary")?;
                Ok(())
            })?;
            fence.recv(&mut [0; 16]).context("the open port of the canary")?;
            let entered = match closed.recv(&mut [0; 16]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => false,
                received => received.map(|_length| true)?,
            };
            ensure!(!entered, "every port of the canary is open");
            Ok(())
        })
    }

    /// The sending and the receiving socket.
    fn sockets(&self, port: u16) -> Result<(UdpSocket, UdpSocket)> {
        let to = SocketAddr::new(self.address, port);
        let receiving = self.receiver.enter(|| when_free(|| UdpSocket::bind(to)))??;
        receiving.set_nonblocking(true)?;
        let sending = self.sender.enter(|| {
            let socket = UdpSocket::bind(SocketAddr::new(super::probe::any(to.is_ipv4()), 0))?;
            socket.connect(to)?;
            io::Result::Ok(socket)
        })??;
        Ok((sending, receiving))
    }
}

/// Whether a datagram arrives immediately.
fn arrives((sending, receiving): &(UdpSocket, UdpSocket)) -> io::Result<bool> {
    sending.send(b"canary")?;
    thread::sleep(Duration::from_millis(2));
    match receiving.recv(&mut [0; 16]) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(e) => Err(e),
    }
}
