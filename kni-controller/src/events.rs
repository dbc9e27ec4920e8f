//! Publishes events (events.k8s.io) on objects, for what an operator must know. Repeated ones are counted in one
//! object.

use k8s_openapi::api::core::v1::ObjectReference;
use kni_api::{Condition, ConditionStatus};
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

/// The name of the program in events.
const CONTROLLER: &str = "kni-controller";
/// Maximum length of a note in bytes.
const MAX_NOTE: usize = 1024;

/// Publishes events; those of one term with one reason about one object are counted. Clones share the counts.
#[derive(Clone)]
pub(crate) struct Events(Recorder);

impl Events {
    pub(crate) fn new(client: Client) -> Self {
        Self(Recorder::new(client, Reporter::from(CONTROLLER)))
    }

    /// Publishes a warning about an object. An event that cannot be written is lost, and nothing else.
    pub(crate) async fn warning<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        reason: &str,
        action: &str,
        note: &str,
    ) {
        self.publish(EventType::Warning, &object.object_ref(&()), (reason, action), note)
            .await;
    }

    /// Publishes a warning about an object that is known by name.
    pub(crate) async fn warning_about(&self, about: &ObjectReference, reason: &str, action: &str, note: &str) {
        self.publish(EventType::Warning, about, (reason, action), note).await;
    }

    /// Publishes an event about an object that may be gone.
    pub(crate) async fn normal(&self, about: &ObjectReference, reason: &str, action: &str, note: &str) {
        self.publish(EventType::Normal, about, (reason, action), note).await;
    }

    async fn publish(&self, type_: EventType, about: &ObjectReference, (reason, action): (&str, &str), note: &str) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(shortened(note)),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.0.publish(&event, about).await {
            tracing::debug!(%error, reason, "cannot publish an event");
        }
    }
}

/// The condition of a type, if it holds no longer, or does not hold from the beginning.
pub(crate) fn failed<'a>(before: &[Condition], after: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    let find = |conditions: &'a [Condition]| conditions.iter().find(|condition| condition.type_ == kind);
    let now = find(after).filter(|now| now.status == ConditionStatus::False)?;
    let was = before.iter().find(|condition| condition.type_ == kind);
    was.is_none_or(|was| was.status != ConditionStatus::False)
        .then_some(now)
}

/// The condition of a type, if it holds now and did not before.
pub(crate) fn turned_true<'a>(before: &[Condition], after: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    let holds = |condition: &&Condition| condition.type_ == kind && condition.status == ConditionStatus::True;
    let now = after.iter().find(holds)?;
    before.iter().find(holds).is_none().then_some(now)
}

fn shortened(note: &str) -> String {
    let mut note = note.to_owned();
    note.truncate(note.floor_char_boundary(MAX_NOTE));
    note
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_for_the_worse_is_an_event() {
        let is = |holds| vec![Condition::now("Ready", holds, "Reason", "message", None)];
        for (before, after, expected) in [
            (vec![], is(false), true),
            (is(true), is(false), true),
            (is(false), is(false), false),
            (is(false), is(true), false),
            (vec![], is(true), false),
            (is(true), vec![], false),
        ] {
            assert_eq!(
                failed(&before, &after, "Ready").is_some(),
                expected,
                "{before:?} {after:?}"
            );
        }
    }

    #[test]
    fn a_condition_that_comes_to_hold_is_an_event() {
        let is = |holds| vec![Condition::now("Exceeded", holds, "Reason", "message", None)];
        for (before, after, expected) in [
            (vec![], is(true), true),
            (is(false), is(true), true),
            (is(true), is(true), false),
            (is(true), is(false), false),
            (vec![], vec![], false),
        ] {
            let found = turned_true(&before, &after, "Exceeded");
            assert_eq!(found.is_some(), expected, "{before:?} {after:?}");
        }
    }

    #[test]
    fn notes_are_cut_between_characters() {
        assert_eq!(shortened("short"), "short");
        let long = "ü".repeat(MAX_NOTE);
        assert_eq!(shortened(&long).len(), MAX_NOTE);
        assert!(shortened(&format!("x{long}")).len() < MAX_NOTE);
    }
}
