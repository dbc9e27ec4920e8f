//! Combines a world with its questions.

use kni_integration::oracle::{Direction, Peer, World};

use super::{generate::Question, objects::Numbers};

/// A world and its questions.
pub(crate) struct Case<'a> {
    pub(crate) number: u64,
    /// Whether there is no state of earlier cases.
    pub(crate) is_first: bool,
    pub(crate) world: &'a World,
    pub(crate) numbers: Numbers,
    pub(crate) questions: Vec<Question>,
}

impl Case<'_> {
    /// The oracle's decisions on the source's sending and the destination's receiving.
    pub(crate) fn oracle(&self, question: &Question) -> (bool, bool) {
        let [from, to] = [question.from, question.to].map(|address| self.world.peer(question.network, address));
        let may = |direction, own, other| self.world.may(direction, own, other, question.protocol, question.port);
        (may(Direction::Egress, from, to), may(Direction::Ingress, to, from))
    }

    /// Whether an end is a pod of another node.
    pub(crate) fn is_remote(&self, question: &Question) -> bool {
        [question.from, question.to].into_iter().any(|address| {
            matches!(self.world.peer(question.network, address), Peer::Pod(..))
                && self.numbers.endpoint(question.network, address).is_none()
        })
    }
}
