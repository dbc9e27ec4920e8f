//! Counts what becomes of the packets of a row: those that arrive at any pod, and the drops of all nodes.

use std::{collections::BTreeMap, sync::Mutex};

use anyhow::{Result, ensure};
use kni_integration::{Pod, frames::PacketSocket};

use super::{
    super::super::{super::scene::identity, bed::Bed, forgery::all_dropped},
    packet::row_of,
    row::{Counter, Fate},
};

/// The packets that arrived at each pod, in each row.
pub(super) struct Watch {
    pods: Vec<(String, PacketSocket)>,
    arrived: Mutex<BTreeMap<usize, BTreeMap<String, u64>>>,
}

impl Watch {
    pub(super) fn open<'a>(pods: impl Iterator<Item = &'a Pod>) -> Result<Self> {
        let open = |pod: &Pod| Ok((identity(pod), PacketSocket::open_arriving(&pod.inside, "eth0")?));
        Ok(Self {
            pods: pods.map(open).collect::<Result<_>>()?,
            arrived: Mutex::default(),
        })
    }

    /// How many packets of the row each pod has received until now.
    pub(super) fn received(&self, row: usize) -> Result<BTreeMap<String, u64>> {
        let mut arrived = self.arrived.lock().expect("no other thread panics");
        for (pod, socket) in &self.pods {
            socket.drain(|frame| {
                if let Some(row) = row_of(frame) {
                    let of_row: &mut BTreeMap<_, _> = arrived.entry(row).or_default();
                    *of_row.entry(pod.clone()).or_default() += 1;
                }
            })?;
            let lost = socket.lost()?;
            ensure!(lost == 0, "{lost} frames at {pod} were not captured");
        }
        Ok(arrived.get(&row).cloned().unwrap_or_default())
    }
}

/// All counters of drops of all nodes.
pub(super) async fn drops(bed: &Bed) -> Result<BTreeMap<Counter, u64>> {
    let mut all = BTreeMap::new();
    for (position, member) in bed.cluster.nodes.iter().enumerate() {
        let dropped = all_dropped(member).await?.into_iter();
        all.extend(dropped.map(|((program, reason), number)| ((position + 1, program, reason), number)));
    }
    Ok(all)
}

/// What has become of the packets of the row since the counters were `before`.
pub(super) async fn fate(bed: &Bed, watch: &Watch, row: usize, before: &BTreeMap<Counter, u64>) -> Result<Fate> {
    let mut dropped = drops(bed).await?;
    for (counter, number) in &mut dropped {
        *number = number.saturating_sub(*before.get(counter).unwrap_or(&0));
    }
    dropped.retain(|_, number| *number != 0);
    Ok(Fate {
        dropped,
        // After the counters: a packet that was dropped at one place and delivered by another has arrived by then.
        received: watch.received(row)?,
    })
}
