//! Decides which pod of the cluster a runtime means: the only place that compares a UID of a runtime with one of the
//! API server.

use std::sync::Arc;

use kni_crd::PodFacts;
use kni_model::PodRef;

use super::tables::Tables;

impl Tables {
    /// The pod of `node` that a runtime means. It has the namespace and the name, and the UID: its own, or that of the
    /// static pod of which it is the mirror. A client that sends no UID means the pod that has the name now.
    ///
    /// What a user writes into the annotation of a mirror pod matters only for a sandbox that has the namespace and the
    /// name of that pod, and no object but this one has them.
    pub fn pod_of(&self, node: &str, meant: &PodRef) -> Option<&Arc<PodFacts>> {
        let PodRef { namespace, name, uid } = meant;
        let pod = self.pods.get(namespace, name)?;
        let is_it = uid.is_empty() || pod.uid == *uid || pod.mirror_of.as_ref() == Some(uid);
        (pod.node == node && is_it).then_some(pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    const NODE: &str = "n1";
    const HASH: &str = "9fd2a1c8d3e94f0e8a4bb1c2d3e4f506";

    fn cluster(pods: &[(&str, &str, Option<&str>, &str)]) -> Tables {
        let mut tables = Tables::default();
        for (name, uid, mirror_of, node) in pods {
            let facts = PodFacts {
                uid: (*uid).to_owned(),
                mirror_of: mirror_of.map(str::to_owned),
                node: (*node).to_owned(),
                ..PodFacts::default()
            };
            tables.pods.put(Key::new("shop", name), Some(Arc::new(facts)));
        }
        tables
    }

    fn found(tables: &Tables, (namespace, name, uid): (&str, &str, &str)) -> Option<String> {
        let meant = PodRef {
            uid: uid.to_owned(),
            ..PodRef::named(namespace, name)
        };
        tables.pod_of(NODE, &meant).map(|pod| pod.uid.clone())
    }

    #[test]
    fn a_pod_is_meant_by_its_uid_or_by_that_of_its_static_pod() {
        let tables = cluster(&[("web", "u1", None, NODE), ("fixed-n1", "u2", Some(HASH), NODE)]);
        for (meant, expected) in [
            (("shop", "web", "u1"), Some("u1")),
            (("shop", "web", ""), Some("u1")),
            (("shop", "web", HASH), None),
            (("shop", "fixed-n1", HASH), Some("u2")),
            (("shop", "fixed-n1", "u2"), Some("u2")),
            (("shop", "fixed-n1", ""), Some("u2")),
            // The manifest was changed, and the kubelet has not replaced the mirror pod yet.
            (("shop", "fixed-n1", "0123456789abcdef0123456789abcdef"), None),
            (("shop", "fixed", HASH), None),
            (("other", "fixed-n1", HASH), None),
        ] {
            assert_eq!(found(&tables, meant).as_deref(), expected, "{meant:?}");
        }
    }

    #[test]
    fn a_forged_annotation_makes_no_pod_another_one() {
        let forged = [
            ("web", "u1", None, NODE),
            ("copy", "u2", Some("u1"), NODE),
            ("both", "u3", Some(HASH), NODE),
            ("fixed-n1", "u4", Some(HASH), NODE),
            ("empty", "u5", Some(""), NODE),
            ("elsewhere", "u6", Some("u1"), "n2"),
        ];
        let tables = cluster(&forged);
        assert_eq!(found(&tables, ("shop", "web", "u1")).as_deref(), Some("u1"));
        assert_eq!(found(&tables, ("shop", "fixed-n1", HASH)).as_deref(), Some("u4"));
        for meant in [
            ("shop", "web", "u2"),
            ("shop", "fixed-n1", "u3"),
            ("shop", "empty", "u1"),
            ("shop", "elsewhere", "u1"),
            ("shop", "elsewhere", "u6"),
            ("shop", "elsewhere", ""),
        ] {
            assert_eq!(found(&tables, meant), None, "{meant:?}");
        }
        // Whatever a runtime sends, it means the pod of that name or none.
        for (name, ..) in forged {
            for uid in ["u1", "u2", "u3", "u4", "u5", HASH] {
                let pod = found(&tables, ("shop", name, uid));
                let own = forged.iter().find(|(own, ..)| *own == name).map(|(_, uid, ..)| *uid);
                assert!(pod.is_none() || pod.as_deref() == own, "{name} {uid}: {pod:?}");
            }
        }
    }
}
