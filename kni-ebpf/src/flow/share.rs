//! Accounts for the share of the flow tables that each endpoint uses.
//!
//! A flow counts for the pod that opened it, or, if no pod of the node did, for its receiver. The two are counted
//! apart: what others open to a pod takes nothing of what the pod needs to open flows itself. So are connections and
//! datagrams, whose flows end by time only.

use kni_common::{
    Verdict,
    config::{Config, FlowCount, FlowShare, SHARE_WINDOW_SHIFT},
    flow::{END_LOCAL, FlowValue},
};

use crate::{
    config,
    maps::FLOW_SHARES,
    packet::{SCTP, TCP},
    time::jiffies,
};

/// The endpoint that a flow counts for, and how.
#[derive(Clone, Copy)]
pub struct Account {
    /// The endpoint.
    pub endpoint: u32,
    /// Whether the flow was opened to it from outside of the node or by the node.
    pub inbound: bool,
    /// Transport protocol number.
    pub protocol: u8,
}

impl Account {
    /// Whether the class has the whole limit: connections, and what others open. Datagrams have twice as much, because
    /// their flows end by time only.
    #[inline(always)]
    const fn is_single(self) -> bool {
        self.inbound || matches!(self.protocol, TCP | SCTP)
    }

    #[inline(always)]
    const fn of(self, share: &mut FlowShare) -> &mut FlowCount {
        if self.inbound {
            &mut share.inbound
        } else if self.is_single() {
            &mut share.connections
        } else {
            &mut share.datagrams
        }
    }
}

/// Takes one flow of the endpoint's share of the tables.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn take_share(config: &Config, account: Account) -> Result<(), Verdict> {
    let Some(share) = FLOW_SHARES.get_ptr_mut(account.endpoint) else {
        return Ok(());
    };
    #[expect(clippy::cast_possible_truncation, reason = "the low bits distinguish windows")]
    let window = (jiffies() >> SHARE_WINDOW_SHIFT) as u32;
    // SAFETY: a row of an array; several CPUs may write, and a lost update costs a flow more or less until the agent's
    // next count.
    let share = unsafe { &mut *share };
    if window.wrapping_sub(share.window) >= 2 {
        if config::is_dry_run() {
            return Ok(());
        }
        share.window = window;
        share.connections = FlowCount { counted: 0, opened: 0 };
        share.datagrams = FlowCount { counted: 0, opened: 0 };
        share.inbound = FlowCount { counted: 0, opened: 0 };
    }
    let limit = match share.limit {
        0 => config.flows_per_endpoint,
        limit => limit,
    };
    let limit = u64::from(limit) << u32::from(!account.is_single());
    let count = account.of(share);
    let opened = count.opened;
    if limit != 0 && u64::from(count.counted) + u64::from(opened) >= limit {
        return Err(Verdict::FlowQuota);
    }
    if !config::is_dry_run() && opened != u32::MAX {
        count.opened = opened + 1;
    }
    Ok(())
}

/// The account of a flow between endpoints of the node: that of its opener.
#[inline(always)]
pub(super) fn of_row(row: &FlowValue, second: bool, protocol: u8) -> Account {
    let opened_by_sender = !row.is_reply(second);
    let (kind, opener) = row.sender(second == opened_by_sender);
    if kind == END_LOCAL {
        return Account {
            endpoint: opener.id,
            inbound: false,
            protocol,
        };
    }
    let (_, receiver) = row.receiver(second == opened_by_sender);
    Account {
        endpoint: receiver.id,
        inbound: true,
        protocol,
    }
}

/// Returns the share of a flow whose rows were removed.
#[inline(always)]
pub(super) fn release(account: Account) {
    if let Some(share) = FLOW_SHARES.get_ptr_mut(account.endpoint) {
        // SAFETY: as in `take_share`.
        let count = account.of(unsafe { &mut *share });
        if count.opened > 0 {
            count.opened -= 1;
        } else {
            count.counted = count.counted.saturating_sub(1);
        }
    }
}
