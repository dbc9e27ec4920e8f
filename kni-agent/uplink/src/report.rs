//! Reports the state of the uplink and the problems of egress to operators.

use std::{net::IpAddr, ops::RangeInclusive};

use kni_model::view::UplinkView;
use kni_netlink::LocalPorts;

use super::{Uplink, lock};

/// What an operator reads where the programs of the node's own sockets cannot be attached.
pub(super) const NODE_UNSERVED: &str = "the node's own processes do not reach host ports";

/// The number of the ports that sockets of the node get, too; a connection of the node and one of a pod from the same
/// port to the same server would take each other's answers.
pub(super) fn shared_ports(ports: &RangeInclusive<u16>) -> u32 {
    let shared = match LocalPorts::read() {
        Ok(local) => local.shared_with(ports),
        Err(error) => {
            tracing::warn!(%error, "it is unknown which ports sockets of the node get");
            0
        }
    };
    if let Some(warning) = warning(shared) {
        tracing::warn!("{warning}");
    }
    shared
}

fn warning(shared: u32) -> Option<String> {
    (shared > 0).then(|| {
        format!(
            "{shared} ports for masquerading are given to sockets of the node, too: reserve them in \
             net.ipv4.ip_local_reserved_ports, or choose others with --masquerade-ports"
        )
    })
}

impl Uplink {
    /// The current problem, if there is one; while a change is being carried out, that before it. Does not wait for it.
    pub fn problem(&self) -> Option<String> {
        let shown = lock(&self.shown).clone();
        if let Some(reason) = &shown.problem {
            return Some(format!("egress of the node is not applied: {reason}"));
        }
        if !shown.needs_programs {
            return None;
        }
        let Some(uplink) = shown.uplink else {
            return Some("the node has no uplink: nothing leaves it by masquerading".to_owned());
        };
        let (_, _, problems) = self.dataplane.uplink_programs(&uplink.ifname, uplink.ifindex);
        (!problems.is_empty()).then(|| problems.join("; "))
    }

    /// The state of the uplink for operators; while a change is being carried out, that before it. Does not wait for
    /// it.
    pub fn view(&self) -> UplinkView {
        let shown = lock(&self.shown).clone();
        let unserved = shown.node_unserved.map(|reason| format!("{NODE_UNSERVED}: {reason}"));
        let warnings: Vec<String> = warning(self.shared_ports).into_iter().chain(unserved).collect();
        let warning = warnings.join("; ");
        let Some(uplink) = shown.uplink else {
            return UplinkView {
                warning,
                ..UplinkView::default()
            };
        };
        let (programs, xdp, _) = self.dataplane.uplink_programs(&uplink.ifname, uplink.ifindex);
        UplinkView {
            ifname: uplink.ifname,
            ifindex: uplink.ifindex,
            sources: uplink
                .ipv4
                .map(IpAddr::V4)
                .into_iter()
                .chain(uplink.ipv6.map(IpAddr::V6))
                .collect(),
            dedicated: shown.dedicated,
            programs,
            xdp: xdp.map(|mode| mode.as_str().to_owned()).unwrap_or_default(),
            host_ports: u32::try_from(shown.host_ports).unwrap_or(u32::MAX),
            warning,
        }
    }
}
