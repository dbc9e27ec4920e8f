//! Finds flows that packets would follow although the present policies deny them.

use super::{
    Flow, Model,
    flows::{End, Entry, Opener},
    policy::Hits,
    world::{Route, Row, Version},
};

impl Model {
    /// Flows of which both ends are as they were at the decision, and whose opener the policies deny them now.
    pub fn unjustified(&self) -> Vec<Flow> {
        let denied = self.flows.iter().filter(|(key, entry)| self.is_denied(**key, entry));
        denied.map(|(key, _)| *key).collect()
    }

    fn is_denied(&self, key: Flow, entry: &Entry) -> bool {
        let by = entry.opened_by;
        let flow = as_received(key, entry);
        let mut hits = Hits::new();
        let judged = match (entry.ends[by], entry.ends[1 - by], entry.opener) {
            (_, _, Opener::Itself | Opener::Node) | (End::Stack(_), End::Stack(_), _) => return false,
            (End::Local(from, version), End::Local(to, other), _) => {
                match (self.at(from, version), self.at(to, other)) {
                    (Some(sender), Some(receiver)) if sender.endpoint.network == receiver.endpoint.network => {
                        self.between(&sender, &receiver, flow, &mut hits)
                    }
                    _ => return false,
                }
            }
            (End::Local(from, version), End::Stack(epoch), _) => match self.at(from, version) {
                Some(sender) if sender.epoch == epoch => self.leaving(&sender, flow, &mut hits),
                _ => return false,
            },
            (End::Stack(epoch), End::Local(to, version), _) => match self.at(to, version) {
                // What a pod of the node sends through the stack is evaluated by the pod's identity when the flow is
                // opened.
                Some(receiver) if receiver.epoch == epoch && !self.is_of_a_pod(flow) => {
                    let peer = self.identity_at(flow.network, flow.source.0);
                    self.entering(&receiver, peer, flow, &mut hits)
                }
                _ => return false,
            },
        };
        judged.is_err()
    }

    /// Whether the opener has an address for pods, which are known to the dataplane.
    fn is_of_a_pod(&self, flow: Flow) -> bool {
        self.world.route(flow.network, flow.source.0) == Some(Route::Unreachable)
    }

    /// The endpoint, if it still has this version.
    fn at(&self, id: u32, version: Version) -> Option<Row> {
        self.world.ready(id).filter(|row| row.version == version)
    }
}

/// The opener's packets as the receiver gets them.
fn as_received(key: Flow, entry: &Entry) -> Flow {
    let by = entry.opened_by;
    let oriented = |from: usize| if from == 0 { key } else { key.reversed() };
    match entry.only_from {
        None => oriented(by),
        Some(from) if from == by => entry.becomes,
        Some(from) => oriented(from).reversed(),
    }
}
