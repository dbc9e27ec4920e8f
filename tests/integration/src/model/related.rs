//! ICMP errors: which flow they are about, and what becomes of them where it is translated.

use super::{
    Flow, Model, Verdict,
    flows::{Entry, Kind, Opener},
    packet::{self, ETHERNET, Packet, Quote},
    translate::{self, Quoted},
    world::Row,
};

impl Model {
    /// The packet that an error quotes; it must have come from whom the error goes to.
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

    /// An error goes where the pod's own packets of the quoted flow go, and must be about a packet that the pod got
    /// from the one it reports. Which packets go where.
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

    /// `entry` is of the direction in which the error goes. The owner of the rest of a quoted fragment is unknown, and a
    /// pod that reaches itself has itself to ask.
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
