//! Explains the fate of a packet: builds it, runs the programs on it and renders their decision as text.

use std::net::SocketAddr;

use kni_common::{Direction, Verdict};
use kni_dataplane::{FlowRecord, Probe};
use kni_model::{
    EndpointId,
    flow_view::{ExplainQuestion, ExplainView, QuestionError},
};

use super::{
    Flows,
    ends::{self, Ends, Interface},
    frame::{self, Packet},
    name, node, steps,
};

/// First source port: the upper part of the range that Linux assigns to clients, without registered ports.
const FIRST_SOURCE_PORT: u16 = 49_152;
/// Number of source ports, up to 60999.
const SOURCE_PORTS: u16 = 11_848;

/// ICMP, whose echo identifier takes the place of the source port, for IPv4 and IPv6.
const ICMP: [u8; 2] = [1, 58];

impl Flows {
    /// Explains the fate of a connection's first packet. The programs decide with the current tables, without side
    /// effects. Blocking; the first request loads the programs once more, which takes some ten milliseconds.
    pub fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError> {
        let ends = ends::find(question, &*self.naming)?;
        let (interface, direction, ingress_ifindex) = place(&ends)?;
        let attachment = &interface.attachment;
        let (source_mac, destination_mac) = match direction {
            Direction::FromPod | Direction::ToUplink | Direction::ToOverlay => (attachment.mac, attachment.host_mac),
            Direction::ToPod | Direction::FromUplink | Direction::FromOverlay => (attachment.host_mac, attachment.mac),
        };
        let source_port = self.unused_port(&ends, question)?;
        let frame = frame::build(&Packet {
            source_mac,
            destination_mac,
            source: ends.source_ip,
            destination: ends.destination_ip,
            protocol: question.protocol,
            source_port,
            destination_port: question.port,
        });
        let frame = frame.ok_or_else(|| QuestionError::Failed("the addresses are not of one family".to_owned()))?;
        self.explain_frame(attachment.endpoint, direction, ingress_ifindex, frame)
    }

    /// A source port without a flow to the destination: a packet of an established flow is not judged, and the answer
    /// would lack the policies and the service.
    fn unused_port(&self, ends: &Ends, question: &ExplainQuestion) -> Result<u16, QuestionError> {
        let (protocol, destination_port) = match question.protocol {
            icmp if ICMP.contains(&icmp) => (if ends.source_ip.is_ipv4() { ICMP[0] } else { ICMP[1] }, 0),
            other => (other, question.port),
        };
        let destination = SocketAddr::new(ends.destination_ip, destination_port);
        let has_flow = |port| {
            let source = SocketAddr::new(ends.source_ip, port);
            self.dataplane.has_flow(ends.network, source, destination, protocol)
        };
        let found = first_unused(fastrand::u16(..SOURCE_PORTS), has_flow).map_err(|error| failed(&error))?;
        found.ok_or_else(|| {
            QuestionError::Failed(format!(
                "each of the source ports {FIRST_SOURCE_PORT} to {} has a flow from {} to {destination}",
                FIRST_SOURCE_PORT + (SOURCE_PORTS - 1),
                ends.source_ip
            ))
        })
    }

    /// Explains the fate of a frame at an endpoint's host interface. `ingress_ifindex` is the interface on which the
    /// node would have received it, 0 for none. Blocking, as [`Self::explain`].
    pub fn explain_frame(
        &self,
        endpoint: EndpointId,
        direction: Direction,
        ingress_ifindex: u32,
        frame: Vec<u8>,
    ) -> Result<ExplainView, QuestionError> {
        let probe = Probe {
            endpoint,
            direction,
            frame,
            ingress_ifindex,
        };
        let answer = self.dataplane.explain(&probe).map_err(|error| failed(&error))?;
        let verdict = Verdict::from_code(answer.event.verdict).ok_or_else(|| {
            QuestionError::Failed(format!("the programs gave no known verdict ({})", answer.event.verdict))
        })?;
        let record = FlowRecord {
            event: answer.event,
            direction,
            verdict,
        };
        let flow = name::flow(&record, &*self.naming);
        let steps = steps::of(&flow, ingress_ifindex);
        Ok(ExplainView { flow, steps })
    }
}

/// The first port without a flow, from the one at an offset in the range on, and then from the start of the range.
fn first_unused<E>(offset: u16, mut has_flow: impl FnMut(u16) -> Result<bool, E>) -> Result<Option<u16>, E> {
    for step in 0..SOURCE_PORTS {
        let port = FIRST_SOURCE_PORT + (offset + step) % SOURCE_PORTS;
        if !has_flow(port)? {
            return Ok(Some(port));
        }
    }
    Ok(None)
}

/// The interface whose program sees the packet first.
fn place(ends: &Ends) -> Result<(&Interface, Direction, u32), QuestionError> {
    if let Some(source) = &ends.source {
        return Ok((source, Direction::FromPod, 0));
    }
    let destination = ends.destination.as_ref();
    let destination =
        destination.ok_or_else(|| QuestionError::Failed("neither end is a pod of this node".to_owned()))?;
    Ok((destination, Direction::ToPod, node::ingress_of(ends.source_ip)))
}

fn failed(error: &dyn std::error::Error) -> QuestionError {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    QuestionError::Failed(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: u16 = 60_999;

    fn found(offset: u16, used: impl Fn(u16) -> bool) -> Option<u16> {
        first_unused(offset, |port| Ok::<_, ()>(used(port))).unwrap()
    }

    #[test]
    fn a_port_with_a_flow_is_not_taken() {
        assert_eq!(found(0, |_| false), Some(FIRST_SOURCE_PORT));
        assert_eq!(found(0, |port| port < 50_000), Some(50_000));
        assert_eq!(found(SOURCE_PORTS - 1, |port| port == LAST), Some(FIRST_SOURCE_PORT));
        for offset in [0, 1, 5_000, SOURCE_PORTS - 1] {
            assert_eq!(found(offset, |port| port != 60_000), Some(60_000));
            assert_eq!(found(offset, |_| true), None);
        }
    }

    #[test]
    fn a_failure_to_read_ends_the_search() {
        let mut asked = 0;
        let result = first_unused(3, |_| {
            asked += 1;
            if asked == 2 { Err("the table") } else { Ok(true) }
        });
        assert_eq!((result, asked), (Err("the table"), 2));
    }
}
