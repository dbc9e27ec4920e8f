//! Determines the pod of a request.

use std::collections::BTreeMap;

use kni_model::PodRef;

use super::{
    bounds,
    error::{MAX_NAME, Refusal},
    extradata::{self, POD_UID},
};

/// The kubelet's labels of a sandbox.
pub(super) const LABEL_NAME: &str = "io.kubernetes.pod.name";
pub(super) const LABEL_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub(super) const LABEL_UID: &str = "io.kubernetes.pod.uid";

/// Longest name of a namespace and longest UID, in bytes, and most digits of an attempt (32 bits).
const MAX_NAMESPACE: usize = 63;
const MAX_UID: usize = 64;
const MAX_ATTEMPT: usize = 10;
/// Longest field `name`, in bytes: a container runtime that is itself the client sends its name of the sandbox,
/// `NAME_NAMESPACE_UID_ATTEMPT`.
const MAX_SANDBOX_NAME: usize = MAX_NAME + MAX_NAMESPACE + MAX_UID + MAX_ATTEMPT + "___".len();

type Entries = BTreeMap<String, String>;

/// The fields of a request that identify its pod.
#[derive(Clone, Copy, Default)]
pub(crate) struct Identity<'a> {
    /// Name of the pod, or of the sandbox.
    pub(crate) name: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) labels: Option<&'a Entries>,
    pub(crate) extradata: Option<&'a Entries>,
}

impl<'a> Identity<'a> {
    /// That of a sandbox with these labels.
    pub(crate) fn labelled(name: &'a str, namespace: &'a str, labels: &'a Entries) -> Self {
        Self {
            name,
            namespace,
            labels: Some(labels),
            ..Self::default()
        }
    }

    /// The pod. The kubelet's labels take precedence for name and namespace, because the field `name` may be that of a
    /// sandbox. The field `uid` takes precedence for the UID, then the label, then `extradata`.
    pub(crate) fn pod(&self) -> PodRef {
        let sandbox = SandboxName::parse(self.name).filter(|found| [found.namespace, ""].contains(&self.namespace));
        let sandbox = sandbox.as_ref();
        let label = |key: &str| self.labels.and_then(|labels| labels.get(key)).map(String::as_str);
        let pod_uid = self.extradata.map(extradata::pod_uid);
        let first = |sources: [Option<&str>; 4]| {
            let mut given = sources.into_iter().flatten();
            given.find(|value| !value.is_empty()).unwrap_or_default().to_owned()
        };
        PodRef {
            namespace: first([
                label(LABEL_NAMESPACE),
                Some(self.namespace),
                sandbox.map(|found| found.namespace),
                None,
            ]),
            name: first([
                label(LABEL_NAME),
                sandbox.map(|found| found.name),
                Some(self.name),
                None,
            ]),
            uid: first([
                Some(self.uid),
                label(LABEL_UID),
                pod_uid,
                sandbox.map(|found| found.uid),
            ]),
        }
    }

    /// Checks length and characters of the fields and of the pod that they identify. All parts may be empty. Two
    /// sources with different UIDs are refused: one of them is of another pod.
    pub(super) fn check(&self, pod: &PodRef) -> Result<(), Refusal> {
        bounds::text("name", self.name, MAX_SANDBOX_NAME)?;
        bounds::name("name", &pod.name)?;
        bounds::name("namespace", &pod.namespace)?;
        bounds::name("uid", &pod.uid)?;
        let pod_uid = self.extradata.map(extradata::pod_uid).unwrap_or_default();
        if pod_uid.is_empty() || pod_uid == pod.uid {
            return Ok(());
        }
        let source = if self.uid.is_empty() {
            format!("label {LABEL_UID}")
        } else {
            "field uid".to_owned()
        };
        let quote: String = pod_uid.chars().take(bounds::MAX_QUOTE).collect();
        let reason = format!("{quote:?} is not the UID of {source}, {:?}", pod.uid);
        Err(Refusal::new(format!("extradata[{POD_UID:?}]"), reason))
    }
}

/// The parts of a container runtime's name of a sandbox. Names, namespaces and UIDs contain no underscore.
struct SandboxName<'a> {
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
}

impl<'a> SandboxName<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split('_');
        let [name, namespace, uid, attempt] = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
        attempt.parse::<u32>().ok()?;
        let complete = parts.next().is_none() && ![name, namespace, uid].contains(&"");
        complete.then_some(Self { name, namespace, uid })
    }
}
