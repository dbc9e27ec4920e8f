//! Asks other nodes whether the tunnel's packets arrive, when an operator wants to know.

use kni_model::flow_view::{ProbedNode, QuestionError, TunnelProbe};
use kni_netlink::{EchoPeer, Netlink};

use super::Inspector;

/// Most nodes that one call asks: every node of a large cluster may be asked about all others at once.
const MOST: usize = 32;

impl Inspector {
    /// Asks other nodes for echo replies, by the underlay and through the tunnel; of more than 32 nodes some, others
    /// each time. Each answer through the tunnel counts as one `no_destination` of `from_overlay`, since no pod expects
    /// it. Blocks for a second or two. Call it in the node's network namespace.
    pub fn probe_tunnel(&self) -> Result<TunnelProbe, QuestionError> {
        let Some(stacks) = self.fabric.stacks() else {
            return Ok(TunnelProbe {
                obstacle: "the default network does not use the tunnel".to_owned(),
                ..TunnelProbe::default()
            });
        };
        let spare = |ipv4| self.pods.spare_address(stacks.network, ipv4);
        let (v4, v6) = (spare(true), spare(false));
        let mut nodes: Vec<_> = stacks.nodes.into_iter().collect();
        let total = nodes.len();
        if total > MOST {
            let first = usize::from(fastrand::u16(..)) % total;
            nodes.rotate_left(first);
            nodes.truncate(MOST);
        }
        let mut probed = Vec::new();
        let mut peers = Vec::new();
        for (node, (underlay, own)) in nodes {
            if let Some(inside) = if underlay.is_ipv4() { v4 } else { v6 } {
                peers.push(EchoPeer { underlay, own, inside });
                probed.push((node, underlay));
            }
        }
        let mut probe = TunnelProbe {
            others: total - probed.len(),
            port: stacks.port,
            ..TunnelProbe::default()
        };
        if peers.is_empty() {
            if total > 0 {
                "no address of the default network is free to ask with".clone_into(&mut probe.obstacle);
            }
            return Ok(probe);
        }
        let answers = Netlink::ask_for_echo(stacks.device, fastrand::u16(..), &peers);
        let answers = answers.map_err(|error| QuestionError::Failed(kni_model::error_chain(&error)))?;
        let nodes = probed.into_iter().zip(answers);
        probe.nodes = nodes
            .map(|((node, underlay), answers)| ProbedNode {
                node,
                underlay,
                answers: answers.underlay,
                answers_through_tunnel: answers.tunnel,
            })
            .collect();
        probe.nodes.sort_by(|one, other| one.node.cmp(&other.node));
        Ok(probe)
    }
}
