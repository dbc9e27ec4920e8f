//! Tests the same ports with and without a service in between: replies are never translated wrongly.

use std::net::IpAddr;

use anyhow::Result;
use kni_common::Verdict::{self, TupleInUse};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};

use super::table::{BLUE, BLUE_A, BLUE_B, FAMILIES, Table, family, from, ip, service, table, virtual_like};

const SYN: TcpFlags = TcpFlags::SYN;
const SYN_ACK: TcpFlags = TcpFlags::SYN_ACK;
const RST: TcpFlags = TcpFlags::RST;

/// A client, its backend, and the virtual address.
struct Ends {
    a: IpAddr,
    b: IpAddr,
    virt: IpAddr,
}

impl Ends {
    fn asks(&self, table: &mut Table<'_>, name: &str, through: bool, flags: TcpFlags) -> Result<()> {
        let (there, port) = if through { (self.virt, 80) } else { (self.b, 8080) };
        let frame = from(BLUE_A).frame(&ip(self.a, there).packet(&Payload::tcp(4000, port, flags)));
        let gotten = ip(self.a, self.b).packet(&Payload::tcp(4000, 8080, flags));
        table.becomes(&format!("{} {name}", family(self.a)), BLUE_A, &frame, BLUE_B, &gotten)?;
        Ok(())
    }

    fn answers(&self, table: &mut Table<'_>, name: &str, through: bool, flags: TcpFlags) -> Result<()> {
        let (there, port) = if through { (self.virt, 80) } else { (self.b, 8080) };
        let frame = from(BLUE_B).frame(&ip(self.b, self.a).packet(&Payload::tcp(8080, 4000, flags)));
        let seen = ip(there, self.a).packet(&Payload::tcp(port, 4000, flags));
        table.becomes(&format!("{} {name}", family(self.a)), BLUE_B, &frame, BLUE_A, &seen)?;
        Ok(())
    }

    fn is_refused(&self, table: &mut Table<'_>, name: &str, through: bool) -> Result<()> {
        let (there, port) = if through { (self.virt, 80) } else { (self.b, 8080) };
        let frame = from(BLUE_A).frame(&ip(self.a, there).packet(&Payload::tcp(4000, port, SYN)));
        table.silent(&format!("{} {name}", family(self.a)), BLUE_A, &frame, TupleInUse)
    }
}

fn each(name: &str, work: impl Fn(&mut Table<'_>, &Ends) -> Result<()> + Send + Sync) -> Result<()> {
    table(name, |table| {
        for (a, b) in FAMILIES {
            let virt = virtual_like(a);
            for protocol in [6, 17] {
                let service = service(protocol.into(), &[(b, 8080)]);
                table.step.serve((BLUE, virt, protocol, 80), &service)?;
            }
            work(table, &Ends { a, b, virt })?;
            table.step.flush()?;
        }
        Ok(())
    })
}

/// A live flow retains its ports; a new SYN with the same ends as the old one is allowed.
#[test]
fn a_living_connection_keeps_its_ports() -> Result<()> {
    require!(root, netns, bpf, ip);
    each("ports in use", |table, ends| {
        for through in [true, false] {
            ends.asks(table, "SYN", through, SYN)?;
            // Without an answer, a second one loses nothing.
            ends.asks(table, "SYN the other way", !through, SYN)?;
            ends.asks(table, "SYN again", through, SYN)?;
            ends.answers(table, "SYN+ACK", through, SYN_ACK)?;
            ends.is_refused(table, "SYN the other way, answered", !through)?;
            ends.asks(table, "data", through, TcpFlags::ACK)?;
            ends.asks(table, "SYN of the same", through, SYN)?;
            ends.answers(table, "its SYN+ACK", through, SYN_ACK)?;
            ends.answers(table, "RST", through, RST)?;
        }
        Ok(())
    })
}

/// Replies of the direct connection must not come from the virtual address of the earlier one.
#[test]
fn a_direct_connection_is_not_answered_by_an_earlier_service() -> Result<()> {
    require!(root, netns, bpf, ip);
    each("reused ports", |table, ends| {
        for (before, after) in [(true, false), (false, true)] {
            ends.asks(table, "SYN before", before, SYN)?;
            ends.answers(table, "SYN+ACK before", before, SYN_ACK)?;
            ends.asks(table, "RST before", before, RST)?;
            ends.asks(table, "SYN after", after, SYN)?;
            ends.answers(table, "SYN+ACK after", after, SYN_ACK)?;
            ends.asks(table, "ACK after", after, TcpFlags::ACK)?;
            ends.answers(table, "data after", after, TcpFlags::ACK)?;
            ends.asks(table, "FIN after", after, TcpFlags::FIN_ACK)?;
            ends.answers(table, "FIN of both after", after, TcpFlags::FIN_ACK)?;
        }
        Ok(())
    })
}

/// A flow with a replaced endpoint does not match a packet with the same addresses.
#[test]
fn a_dead_translation_does_not_touch_a_new_flow() -> Result<()> {
    require!(root, netns, bpf, ip);
    each("dead translations", |table, ends| {
        let Ends { a, b, virt } = *ends;
        let udp = |source, destination, from, to| ip(source, destination).packet(&Payload::udp(from, to, b""));
        let question = from(BLUE_A).frame(&udp(a, virt, 4000, 80));
        table.becomes("question", BLUE_A, &question, BLUE_B, &udp(a, b, 4000, 8080))?;
        // The next owner has the client's address; the backend sends to it from the same port.
        table.step.withdraw(BLUE_A)?;
        table.step.publish(BLUE_A, &super::table::endpoint(BLUE_A))?;
        let own = udp(b, a, 8080, 4000);
        table.becomes("the backend's own", BLUE_B, &from(BLUE_B).frame(&own), BLUE_A, &own)?;
        let back = udp(a, b, 4000, 8080);
        table.becomes("its answer", BLUE_A, &from(BLUE_A).frame(&back), BLUE_B, &back)?;
        Ok(())
    })
}

/// A table may lose one of the two rows; the restored row is equivalent.
#[test]
fn a_row_that_was_evicted_is_put_back_as_it_was() -> Result<()> {
    require!(root, netns, bpf, ip);
    each("evicted rows", |table, ends| {
        ends.asks(table, "SYN", false, SYN)?;
        ends.answers(table, "SYN+ACK", false, SYN_ACK)?;
        ends.asks(table, "FIN", false, TcpFlags::FIN_ACK)?;
        let answers = kni_integration::model::Flow {
            network: BLUE,
            protocol: 6,
            source: (ends.b, 8080),
            destination: (ends.a, 4000),
        };
        table.step.evict(&answers)?;
        ends.answers(table, "data behind the eviction", false, TcpFlags::ACK)?;
        table.step.compare_tables()?;
        ends.asks(table, "SYN of the same ports", false, SYN)?;
        Ok(())
    })
}

/// Either row of a translated flow may be evicted without the other. An answer alone leads to no flow; the opener's
/// next packet in a later window writes the row again.
#[test]
fn a_translated_row_that_was_evicted_is_written_again() -> Result<()> {
    require!(root, netns, bpf, ip);
    each("evicted translations", |table, ends| {
        ends.asks(table, "SYN", true, SYN)?;
        ends.answers(table, "SYN+ACK", true, SYN_ACK)?;
        ends.asks(table, "ACK", true, TcpFlags::ACK)?;
        table.step.evict(&kni_integration::model::Flow {
            network: BLUE,
            protocol: 6,
            source: (ends.b, 8080),
            destination: (ends.a, 4000),
        })?;
        table.step.age(300)?;
        ends.asks(table, "data behind the eviction", true, TcpFlags::ACK)?;
        table.step.compare_tables()?;
        ends.answers(table, "answer behind it", true, TcpFlags::ACK)?;
        Ok(())
    })
}

#[test]
fn a_packet_to_the_wrong_side_of_a_service_is_a_flow_of_its_own() -> Result<()> {
    require!(root, netns, bpf, ip);
    each("past the service", |table, ends| {
        ends.asks(table, "SYN", true, SYN)?;
        ends.answers(table, "SYN+ACK", true, SYN_ACK)?;
        // The virtual address belongs to no endpoint, so no packet may come from it.
        let frame = from(BLUE_B).frame(&ip(ends.virt, ends.a).packet(&Payload::tcp(80, 4000, SYN_ACK)));
        table.sent("from the virtual address", BLUE_B, &frame, Verdict::SourceAddress)?;
        Ok(())
    })
}
