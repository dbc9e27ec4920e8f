//! Tests the harness itself, which all other tests rely on.

mod agent;
mod fake;
mod frames;
mod kubelet;
mod node;
mod snapshot;
mod traffic;

use anyhow::Result;
use kni_integration::Namespaces;

/// MAC addresses of the two ends of [`pair`].
pub(crate) const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
/// Addresses of the two ends of [`pair`].
pub(crate) const V4: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
/// See [`V4`].
pub(crate) const V6: [&str; 2] = ["2001:db8::1", "2001:db8::2"];

/// Two namespaces with a veth pair `eth0` between them, with addresses and known neighbours.
pub(crate) fn pair(names: [&str; 2]) -> Result<[Namespaces; 2]> {
    let ends = [Namespaces::fresh_net(names[0])?, Namespaces::fresh_net(names[1])?];
    ends[0].veth("eth0", &ends[1], "eth0")?;
    for (end, here, there) in [(&ends[0], 0, 1), (&ends[1], 1, 0)] {
        let mac = |at: usize| MACS[at].map(|byte| format!("{byte:02x}")).join(":");
        end.ip(&[&format!("link set eth0 address {}", mac(here))])?;
        end.add_address("eth0", &format!("{}/24", V4[here]))?;
        end.add_address("eth0", &format!("{}/64", V6[here]))?;
        end.ip(&[
            &format!(
                "neighbour replace {} lladdr {} dev eth0 nud permanent",
                V4[there],
                mac(there)
            ),
            &format!(
                "neighbour replace {} lladdr {} dev eth0 nud permanent",
                V6[there],
                mac(there)
            ),
        ])?;
    }
    Ok(ends)
}
