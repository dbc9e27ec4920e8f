//! Tests the rings of events: a flood of drops hides no new flow, and the reverse.

use std::time::Duration;

use anyhow::{Result, ensure};
use kni_common::{
    Direction, Verdict,
    layout::{ALL_MAPS, MapKind},
};
use kni_integration::{
    frames::Payload,
    programs::{Lockstep, Programs},
    require,
};

use super::table::{A4, B4, BLUE, BLUE_A, BLUE_B, endpoint, from, ip};

/// More events than a ring holds.
fn flood() -> Result<u32> {
    let ring = ALL_MAPS.iter().find(|spec| spec.kind == MapKind::RingBuf);
    let bytes = ring.map_or(0, |spec| spec.max_entries);
    Ok(bytes / u32::try_from(size_of::<kni_common::event::FlowEvent>())? + 1000)
}

fn sent(step: &Lockstep, source_port: u16, destination_port: u16, spoofed: bool) -> Result<()> {
    let source = if spoofed { B4 } else { A4 };
    let packet = ip(source, B4).packet(&Payload::udp(source_port, destination_port, b""));
    step.programs()
        .run(Direction::FromPod, BLUE_A, &from(BLUE_A).frame(&packet))?;
    Ok(())
}

#[test]
fn a_flood_of_one_kind_of_event_hides_none_of_the_other() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("rings", 65_536, |programs| {
        let mut step = Lockstep::new(programs)?;
        step.set_routes(BLUE, &["10.0.0.0/24".parse()?], false)?;
        for id in [BLUE_A, BLUE_B] {
            step.publish(id, &endpoint(id))?;
        }
        for (what, drops_first) in [("drops", true), ("flows", false)] {
            // What one pod may report is bounded per window; those of many pods together are not.
            for count in 0..flood()? {
                if count % 16 == 0 {
                    step.open_event_gates()?;
                }
                let port = 1024 + u16::try_from(count)?;
                sent(&step, port, 53, drops_first)?;
            }
            step.open_event_gates()?;
            sent(&step, 999, 53, !drops_first)?;
            let records = step.events(Duration::from_secs(2))?;
            let times: Vec<u64> = records.iter().map(|record| record.event.time_ns).collect();
            ensure!(times.is_sorted(), "not in the order of time");
            let wanted = if drops_first {
                Verdict::Redirected
            } else {
                Verdict::SourceAddress
            };
            let found = records.iter().filter(|record| record.verdict == wanted).count();
            ensure!(
                found == 1,
                "behind a flood of {what}, {} records: {found} of the other kind",
                records.len()
            );
            ensure!(records.len() > 5000, "{} records of a flood", records.len());
        }
        Ok(())
    })
}
