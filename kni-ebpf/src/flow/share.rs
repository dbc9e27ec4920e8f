//! Accounts for the share of the flow tables that each endpoint uses.

use kni_common::{
    Verdict,
    config::{FlowShare, SHARE_WINDOW_SHIFT},
    flow::{FLOW_REPLY, FlowValue},
};

use crate::{config, maps::FLOW_SHARES, time::jiffies};

/// Takes one flow of an endpoint's share of the tables.
#[inline(always)]
pub fn take_share(endpoint: u32) -> Result<(), Verdict> {
    let (Some(config), Some(share)) = (config::get(), FLOW_SHARES.get_ptr_mut(endpoint)) else {
        return Ok(());
    };
    #[expect(clippy::cast_possible_truncation, reason = "the low bits distinguish windows")]
    let window = (jiffies() >> SHARE_WINDOW_SHIFT) as u32;
    // SAFETY: a row of an array; several CPUs may write, and a lost update costs a flow more or less until the agent's
    // next count.
    let share = unsafe { &mut *share };
    let stale = window.wrapping_sub(share.window) >= 2;
    let taken = if stale {
        0
    } else {
        share.counted.saturating_add(share.opened)
    };
    if config.flows_per_endpoint != 0 && taken >= config.flows_per_endpoint {
        return Err(Verdict::FlowQuota);
    }
    if config::is_dry_run() {
        return Ok(());
    }
    if stale {
        *share = FlowShare {
            counted: 0,
            opened: 0,
            window,
        };
    }
    share.opened = share.opened.saturating_add(1);
    Ok(())
}

/// The endpoint that the flow is charged to: the pod that opened it, or that it was opened to from outside.
#[inline(always)]
pub(super) fn owner(row: &FlowValue, opposite: &FlowValue) -> u32 {
    let (reply, original) = if row.flags & FLOW_REPLY != 0 {
        (row, opposite)
    } else {
        (opposite, row)
    };
    if reply.destination == 0 {
        original.destination
    } else {
        reply.destination
    }
}

/// Returns the share of a closed flow.
#[inline(always)]
pub(super) fn release(endpoint: u32) {
    if let Some(share) = FLOW_SHARES.get_ptr_mut(endpoint) {
        // SAFETY: as in `take_share`.
        let share = unsafe { &mut *share };
        if share.opened > 0 {
            share.opened -= 1;
        } else {
            share.counted = share.counted.saturating_sub(1);
        }
    }
}
