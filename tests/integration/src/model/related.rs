//! Models ICMP errors: finds their flow, and translates them.

use super::{
    Flow, Model, Verdict,
    flows::{Entry, Kind, Opener},
    packet::{self, ETHERNET, Packet, Quote},
    translate::{self, Quoted},
    world::Row,
};

impl Model {
    /// The packet quoted by an error; its source must be the receiver of the error.
    pub(super) fn quoted(row: &Row, packet: &Packet, at: usize, frame: &[u8]) -> Result<(Quote, Quoted), Verdict> {
        let bytes = &frame[ETHERNET + at..ETHERNET + packet.length];
        let quote = packet::quote(bytes, packet.source.is_ipv4())?;
        let flow = Flow {
            network: row.endpoint.network,
            protocol: quote.protocol,
            source: quote.source,
            destination: quote.destination,
        };
        if flow.source.0 != packet.destination {
            return Err(Verdict::IcmpUnrelated);
        }
        let quoted = Quoted {
            at: ETHERNET + at,
            transport: quote.transport,
            flow,
        };
        Ok((quote, quoted))
    }

    /// An error takes the path of the pod's own packets of the quoted flow, and must be about a packet that the pod
    /// received from the destination of the error. Returns that path.
    pub(super) fn error_from_pod(
        &self,
        row: &Row,
        packet: &Packet,
        at: usize,
        frame: &mut [u8],
    ) -> Result<(Kind, Option<u32>), Verdict> {
        let (quote, quoted) = Self::quoted(row, packet, at, frame)?;
        if quoted.flow.destination.0 != packet.source {
            return Err(Verdict::IcmpUnrelated);
        }
        let own = self.flows.get(&quoted.flow.reversed());
        let own = own.filter(|entry| self.is_current_from(row, entry));
        let own = own.ok_or(Verdict::IcmpUnrelated)?;
        Self::translate_error(packet, &quote, &quoted, own, frame)?;
        Ok((own.kind, own.to))
    }

    /// `entry` has the direction of the error. The owner of a quoted later fragment is unknown; for a pod that reaches
    /// itself, the pod is both ends.
    pub(super) fn translate_error(
        packet: &Packet,
        quote: &Quote,
        quoted: &Quoted,
        entry: &Entry,
        frame: &mut [u8],
    ) -> Result<(), Verdict> {
        if entry.becomes == quoted.flow.reversed() {
            return Ok(());
        }
        if entry.opener == Opener::Itself {
            return Err(Verdict::IcmpUnrelated);
        }
        if !quote.whole {
            return Err(Verdict::IcmpFragment);
        }
        translate::apply_quoted(frame, packet, quoted, &entry.becomes.reversed())
    }
}
