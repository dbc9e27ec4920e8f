//! Reads a `Namespace`: its name, and the labels by which policies select it.

use k8s_openapi::api::core::v1::Namespace;
use kni_model::policy::Labels;

use super::{
    invalid::InvalidObject,
    labels::read_labels,
    names::{NameRule, of_object, read_name},
};

/// The label that the API server gives every namespace.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Reads name and labels of a namespace. The label with its name is always set to the name.
pub fn read_namespace(object: &Namespace) -> Result<(String, Labels), InvalidObject> {
    let read = || {
        let name = read_name(&object.metadata, NameRule::Label)?;
        let mut labels = read_labels(&object.metadata)?;
        labels.insert(NAME_LABEL.to_owned(), name.clone());
        Ok((name, labels))
    };
    read().map_err(of_object("Namespace", &object.metadata))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(name: &str, labels: &[(&str, &str)]) -> Namespace {
        let mut object = Namespace::default();
        object.metadata.name = Some(name.to_owned());
        object.metadata.labels = Some(labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect());
        object
    }

    #[test]
    fn the_label_of_the_name_is_always_there_and_true() {
        let (name, labels) = read_namespace(&namespace("x", &[("ns", "x"), (NAME_LABEL, "y")])).unwrap();
        assert_eq!(name, "x");
        let expect = [("ns", "x"), (NAME_LABEL, "x")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(labels, expect.into());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = read_namespace(&namespace("a.b", &[])).unwrap_err();
        assert_eq!(error.field, "metadata.name");
        let error = read_namespace(&namespace("x", &[("a", "b c")])).unwrap_err();
        assert_eq!(
            (error.object.as_str(), error.field.as_str()),
            ("x", "metadata.labels.a")
        );
        assert_eq!(read_namespace(&Namespace::default()).unwrap_err().reason, "is missing");
    }
}
