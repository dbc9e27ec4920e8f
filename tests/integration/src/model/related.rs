//! Models ICMP errors: finds their flow, and translates them.

use super::{
    Flow, Model, Verdict,
    flows::{End, Known, Opener},
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
    ) -> Result<End, Verdict> {
        let (quote, quoted) = Self::quoted(row, packet, at, frame)?;
        if quoted.flow.destination.0 != packet.source {
            return Err(Verdict::IcmpUnrelated);
        }
        let own = self.known(quoted.flow.reversed());
        let own = own.filter(|known| self.is_current_from(row, known));
        let own = own.ok_or(Verdict::IcmpUnrelated)?;
        Self::translate_error(packet, &quote, &quoted, &own, frame)?;
        Ok(own.receiver())
    }

    /// `known` has the direction of the error. The owner of a quoted later fragment is unknown; for a pod that reaches
    /// itself, the pod is both ends.
    pub(super) fn translate_error(
        packet: &Packet,
        quote: &Quote,
        quoted: &Quoted,
        known: &Known,
        frame: &mut [u8],
    ) -> Result<(), Verdict> {
        if known.becomes() == quoted.flow.reversed() {
            return Ok(());
        }
        if known.entry.opener == Opener::Itself {
            return Err(Verdict::IcmpUnrelated);
        }
        if !quote.whole {
            return Err(Verdict::IcmpFragment);
        }
        translate::apply_quoted(frame, packet, quoted, &known.becomes().reversed())
    }
}
