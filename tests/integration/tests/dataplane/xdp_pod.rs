//! Tests networks with `spec.xdp`: datagrams of real pods pass between interfaces without the stack.

mod changes;
mod exchange;

use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod, Stage,
    bind::when_free,
    foreign::{ForeignProgram, Position, Side},
    stage::address,
};

pub(crate) use kni_integration::patience;

/// The port of servers.
pub(crate) const PORT: u16 = 8080;
/// Datagrams of one exchange.
pub(crate) const MANY: u64 = 200;

/// `default` and `blue` with XDP, and `plain` without.
pub(crate) fn networks() -> Vec<Manifest> {
    vec![
        Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]).spec("xdp: true"),
        Manifest::network("blue", &["10.10.0.0/16", "fd10::/64"]).spec("xdp: true"),
        Manifest::network("red", &["10.10.0.0/16", "fd10::/64"]).spec("xdp: true"),
        Manifest::network("plain", &["10.20.0.0/16", "fd20::/64"]),
    ]
}

/// A foreign program at TC ingress of a pod's host interface, before KNI's: it sees the packets that XDP passes on.
pub(crate) async fn passed(stage: &Stage, pod: &Pod) -> Result<ForeignProgram> {
    let ifindex = stage.interface(pod, "eth0").await?.host_ifindex;
    stage
        .node
        .enter(|| ForeignProgram::attach(ifindex, Side::Ingress, Position::First))?
}

/// Two connected UDP sockets.
pub(crate) struct Ends {
    pub(crate) client: UdpSocket,
    pub(crate) server: UdpSocket,
}

impl Ends {
    pub(crate) fn between(client: &Pod, server: &Pod, v4: bool) -> Result<Self> {
        let to = SocketAddr::new(address(server, v4), PORT);
        let any = SocketAddr::new(if v4 { "0.0.0.0" } else { "::" }.parse()?, 0);
        let bind = |ns: &Namespaces, at: SocketAddr| -> Result<UdpSocket> {
            let socket = ns.enter(|| when_free(|| UdpSocket::bind(at)))??;
            socket.set_read_timeout(Some(patience()))?;
            Ok(socket)
        };
        let (client, server) = (bind(&client.inside, any)?, bind(&server.inside, to)?);
        client.connect(to)?;
        Ok(Self { client, server })
    }

    /// Sends a datagram and the same one back. Sockets discard datagrams with a wrong checksum.
    pub(crate) fn exchange(&self, data: &[u8]) -> Result<()> {
        let mut buffer = vec![0; 65_536];
        self.client.send(data)?;
        let (length, from) = self.server.recv_from(&mut buffer).context("nothing arrives")?;
        ensure!(buffer[..length] == *data, "{} bytes arrive changed", data.len());
        self.server.send_to(data, from)?;
        let length = self.client.recv(&mut buffer).context("nothing comes back")?;
        ensure!(buffer[..length] == *data, "{} bytes come back changed", data.len());
        Ok(())
    }
}
