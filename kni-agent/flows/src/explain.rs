//! Explains the fate of a packet: builds it, runs the programs on it and renders their decision as text.

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

/// Range of source ports: the upper part of the range that Linux assigns to clients, without registered ports.
const SOURCE_PORTS: std::ops::RangeInclusive<u16> = 49_152..=60_999;

impl Flows {
    /// Explains the fate of a connection's first packet. The programs decide with the current tables, without side
    /// effects. Blocking; the first request loads the programs once more, which takes some ten milliseconds.
    pub fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError> {
        let ends = ends::find(question, &*self.naming)?;
        let (interface, direction, ingress_ifindex) = place(&ends)?;
        let attachment = &interface.attachment;
        let (source_mac, destination_mac) = match direction {
            Direction::FromPod | Direction::ToUplink => (attachment.mac, attachment.host_mac),
            Direction::ToPod | Direction::FromUplink => (attachment.host_mac, attachment.mac),
        };
        let frame = frame::build(&Packet {
            source_mac,
            destination_mac,
            source: ends.source_ip,
            destination: ends.destination_ip,
            protocol: question.protocol,
            source_port: fastrand::u16(SOURCE_PORTS),
            destination_port: question.port,
        });
        let frame = frame.ok_or_else(|| QuestionError::Failed("the addresses are not of one family".to_owned()))?;
        self.explain_frame(attachment.endpoint, direction, ingress_ifindex, frame)
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
