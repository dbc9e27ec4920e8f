//! Attributes flows to their endpoints, and recognises those of deleted or moved ones.

use std::collections::HashMap;

use kni_common::{
    address::from_ip,
    endpoint::{EndpointRow, is_older},
    flow::{END_LOCAL, FlowEnd, FlowValue},
    uplink::Masquerade,
};
use kni_model::EndpointId;

use crate::tuple::{Tuple, is_reply_row, sends_second};

/// The local end of a flow with one, else the sender.
pub(super) fn local_end(value: &FlowValue) -> Option<FlowEnd> {
    let second = sends_second(value);
    [value.sender(second), value.receiver(second)]
        .into_iter()
        .find(|(kind, _)| *kind == END_LOCAL)
        .map(|(_, end)| end)
}

/// The endpoint rows, to recognise flows of earlier owners.
pub(super) struct Owners<'a> {
    rows: HashMap<u32, &'a EndpointRow>,
    egress: HashMap<u32, &'a Masquerade>,
}

impl<'a> Owners<'a> {
    pub(super) fn new(endpoints: &'a [(u32, EndpointRow)], egress: &'a [(u32, Masquerade)]) -> Self {
        let published = endpoints.iter().filter(|(_, row)| row.network != 0);
        let leaving = egress.iter().filter(|(_, row)| row.last != 0);
        Self {
            rows: published.map(|(endpoint, row)| (*endpoint, row)).collect(),
            egress: leaving.map(|(endpoint, row)| (*endpoint, row)).collect(),
        }
    }

    /// Whether the end is still the endpoint's.
    pub(super) fn is_current(&self, end: FlowEnd) -> bool {
        self.rows
            .get(&end.id)
            .is_some_and(|row| !is_older(end.generation, row.incarnation))
    }

    /// Whether a row of a flow across the uplink belonged to a deleted endpoint: it would block its port for the rest
    /// of its lifetime. An endpoint that was added after the rows were read has flows from `now` on only.
    pub(super) fn is_orphan(&self, value: &FlowValue, now: u32) -> bool {
        let has_no_owner = || !local_end(value).is_some_and(|end| self.is_current(end));
        value.age(now) > 0 && has_no_owner()
    }

    /// Whether the endpoint of a masqueraded flow leaves with another address by now. The programs end the flow with
    /// its next packet; its peer may send more to the former address.
    pub(super) fn has_moved(&self, tuple: &Tuple, value: &FlowValue) -> bool {
        let egress = local_end(value).and_then(|end| self.egress.get(&end.id));
        let Some(egress) = egress.filter(|_| is_reply_row(value)) else {
            return false;
        };
        tuple.destination != from_ip(egress.ipv4.into()) && tuple.destination != egress.ipv6
    }

    /// The endpoint that the flow counts for, and whether it was opened to it from elsewhere; `None` where the flow is
    /// of an earlier owner of its number.
    pub(super) fn of(&self, value: &FlowValue) -> Option<(EndpointId, bool)> {
        let second = sends_second(value);
        let opened_by_sender = !value.is_reply(second);
        let (kind, opener) = value.sender(second == opened_by_sender);
        let inbound = kind != END_LOCAL;
        let (_, receiver) = value.receiver(second == opened_by_sender);
        let owner = if inbound { receiver } else { opener };
        self.is_current(owner).then_some((EndpointId(owner.id), inbound))
    }
}
