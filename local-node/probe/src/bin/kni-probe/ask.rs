//! Sends one request to a server, and resolves names.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _, UdpSocket},
    time::Duration,
};

use crate::options::Options;

/// Prints the answer, or fails with the reason.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let server = server(options)?;
    let text = options.value("text").unwrap_or("hello");
    let timeout = options.value("timeout-ms").unwrap_or("2000");
    let timeout = Duration::from_millis(timeout.parse().map_err(|e| format!("--timeout-ms {timeout}: {e}"))?);
    let answer = match options.value("protocol").unwrap_or("tcp") {
        "tcp" => tcp(server, text, timeout),
        "udp" => udp(server, text, timeout),
        other => return Err(format!("--protocol {other} is neither tcp nor udp")),
    };
    println!("{}", answer.map_err(|e| format!("{server}: {e}"))?.trim_end());
    Ok(())
}

/// The address and the port of the first two words; of a name, its first address.
pub(crate) fn server(options: &Options) -> Result<SocketAddr, String> {
    let (name, port) = (options.word(0, "ADDRESS")?, options.word(1, "PORT")?);
    let port = port.parse().map_err(|e| format!("{port}: {e}"))?;
    let addresses = resolve(name)?;
    let address = addresses.first().ok_or_else(|| format!("{name} has no address"))?;
    Ok(SocketAddr::new(*address, port))
}

/// Prints the addresses of a name, one a line.
pub(crate) fn print_addresses(options: &Options) -> Result<(), String> {
    for address in resolve(options.word(0, "NAME")?)? {
        println!("{address}");
    }
    Ok(())
}

/// The addresses of a name by the resolver of the C library, which reads /etc/resolv.conf; an address is its own.
fn resolve(name: &str) -> Result<Vec<IpAddr>, String> {
    if let Ok(address) = name.parse() {
        return Ok(vec![address]);
    }
    let mut addresses: Vec<IpAddr> = (name, 0)
        .to_socket_addrs()
        .map_err(|e| format!("{name}: {e}"))?
        .map(|address| address.ip())
        .collect();
    // The resolver lists an address once per kind of socket.
    addresses.dedup();
    Ok(addresses)
}

fn tcp(server: SocketAddr, text: &str, timeout: Duration) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&server, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(format!("{text}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(answer)
}

fn udp(server: SocketAddr, text: &str, timeout: Duration) -> std::io::Result<String> {
    let any = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.send(text.as_bytes())?;
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer)?;
    Ok(String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned())
}
