//! Nodes that claim and release blocks at random.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Result, ensure};
use ipnet::IpNet;
use kni_claims::{Claim, Claims, NetworkRef};

/// Who leases from which block, as the actors themselves state it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leasing(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    by: BTreeMap<IpNet, String>,
    most: usize,
}

impl Leasing {
    /// A node begins to lease from a block; an error if another one does.
    pub(crate) fn begin(&self, block: IpNet, node: &str) -> Result<()> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = state.by.insert(block, node.to_owned()) {
            ensure!(other == node, "{block} has two owners: {other} and {node}");
        }
        state.most = state.most.max(state.by.len());
        Ok(())
    }

    /// The block has no lessee any more.
    pub(crate) fn end(&self, block: &IpNet) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).by.remove(block);
    }

    /// The largest number of blocks that were leased from at once.
    pub(crate) fn most(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).most
    }
}

/// The units of the test's network: 16 of each family.
fn units() -> Vec<IpNet> {
    let v4 = (0..16_u8).map(|n| IpNet::new([10, 20, 0, n * 16].into(), 28));
    let v6 = (0..16_u16).map(|n| IpNet::new([0xfd20, 0, 0, 0, 0, 0, 0, n * 16].into(), 124));
    v4.chain(v6).filter_map(Result::ok).collect()
}

/// A node. It leases only between a confirmed claim and the begin of a release.
pub(crate) async fn node(
    claims: Claims,
    network: NetworkRef,
    leasing: Leasing,
    steps: usize,
    seed: u64,
) -> Result<String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let units = units();
    let mut held: BTreeSet<IpNet> = BTreeSet::new();
    let mut unsettled: BTreeSet<IpNet> = BTreeSet::new();
    let (mut claimed, mut taken, mut released, mut failed) = (0, 0, 0, 0);
    let name = claims.node().name.clone();
    for step in 0..steps * 2 {
        let ending = step >= steps;
        let unit = random.choice(&unsettled).or_else(|| random.choice(&held)).copied();
        let unit = match unit {
            Some(unit) if ending || random.bool() => unit,
            None if ending => break,
            Some(_) | None => *random.choice(&units).unwrap_or(&units[0]),
        };
        if held.remove(&unit) || ending || random.u8(0..4) == 0 {
            leasing.end_of(&unit, &name);
            if claims.release(&network.name, &unit).await.is_ok() {
                released += 1;
                unsettled.remove(&unit);
            } else {
                failed += 1;
                unsettled.insert(unit);
            }
            continue;
        }
        match claims.claim(&network, &unit).await {
            Ok(Claim::Ours) => {
                claimed += 1;
                leasing.begin(unit, &name)?;
                unsettled.remove(&unit);
                held.insert(unit);
            }
            Ok(Claim::Taken(_)) => {
                taken += 1;
                unsettled.remove(&unit);
            }
            Err(_) => {
                failed += 1;
                unsettled.insert(unit);
            }
        }
    }
    for unit in held {
        leasing.end_of(&unit, &name);
    }
    Ok(format!(
        "{name}: {claimed} claimed, {taken} taken, {released} released, {failed} failed"
    ))
}

impl Leasing {
    /// Ends the leasing of `node`, and not that of another one.
    fn end_of(&self, block: &IpNet, node: &str) {
        let is_its = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .by
            .get(block)
            .is_some_and(|by| by == node);
        if is_its {
            self.end(block);
        }
    }
}
