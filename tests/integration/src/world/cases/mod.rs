//! Defines the cases of the policy suite: sequences of policies and labels, some with manual expectations.

mod extended;
mod generated;

pub use self::{extended::cases as extended, generated::cases as generated};
use super::{PolicyText, Question, Setting, index_of};
use crate::oracle::{Labels, Protocol};

/// The denied pairs, as a manual expectation. Pairs of a pod with itself are excluded: they are always allowed.
pub type Denied = fn(&Question) -> bool;

/// One state of the objects.
#[derive(Debug, Clone)]
pub struct Step {
    /// All policies.
    pub policies: Vec<PolicyText>,
    /// The labels of namespaces and pods.
    pub setting: Setting,
    /// The denied pairs, where they are listed manually.
    pub denied: Option<Denied>,
}

/// A named case. Its states are applied one after the other.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name, unique among all cases.
    pub name: String,
    /// Its states.
    pub steps: Vec<Step>,
}

impl Case {
    fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            steps: Vec::new(),
        }
    }

    /// Adds a state: these policies, as `namespace: spec`, and the previous labels.
    fn with(mut self, policies: &[(&str, &str)]) -> Self {
        let named = policies.iter().enumerate();
        let policies = named
            .map(|(n, (namespace, spec))| PolicyText::new(namespace, &format!("p{n}"), spec))
            .collect();
        let setting = self.steps.last().map(|step| step.setting.clone()).unwrap_or_default();
        self.steps.push(Step {
            policies,
            setting,
            denied: None,
        });
        self
    }

    /// Adds a state: another label of a namespace.
    fn label_namespace(mut self, namespace: &str, key: &str, value: Option<&str>) -> Self {
        let mut step = self.steps.last().expect("a state before").clone();
        let labels = step
            .setting
            .namespaces
            .get_mut(namespace)
            .expect("a namespace of the world");
        change(labels, key, value);
        step.denied = None;
        self.steps.push(step);
        self
    }

    /// Adds a state: another label of a pod.
    fn label_pod(mut self, pod: &str, key: &str, value: Option<&str>) -> Self {
        let mut step = self.steps.last().expect("a state before").clone();
        change(&mut step.setting.pods[index_of(pod)], key, value);
        step.denied = None;
        self.steps.push(step);
        self
    }

    /// Sets the expected denials of the latest state.
    fn denied(mut self, denied: Denied) -> Self {
        self.steps.last_mut().expect("a state").denied = Some(denied);
        self
    }
}

fn change(labels: &mut Labels, key: &str, value: Option<&str>) {
    match value {
        Some(value) => labels.insert(key.into(), value.into()),
        None => labels.remove(key),
    };
}

/// Those with manual expectations, then the variations.
pub fn all() -> Vec<Case> {
    [extended(), generated()].concat()
}

/// Whether it is TCP on this port.
fn tcp(question: &Question, port: u16) -> bool {
    question.protocol == Protocol::Tcp && question.port == port
}
