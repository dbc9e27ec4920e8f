//! Reports the features of the agent and the methods of `kni.KNI` that it serves.

use std::collections::BTreeMap;

use kni_model::Feature;

/// The methods that the agent serves, in the order of the schema.
pub(super) const METHODS: [&str; 11] = [
    "CreateNetwork",
    "DeleteNetwork",
    "CreateIsolationDomain",
    "DeleteIsolationDomain",
    "AttachInterface",
    "DetachInterface",
    "AttachNetwork",
    "DetachNetwork",
    "QueryPodNetwork",
    "QueryNodeNetworks",
    "SetupNodeNetwork",
];

/// The names of features, in the order of the table of `kni_model`.
pub(super) fn names(features: &[Feature]) -> Vec<String> {
    let names = features.iter().map(|feature| feature.as_str().to_owned());
    names.collect()
}

/// The entries of the response of `QueryNodeNetworks` itself; those of a network are in its own `extradata`.
pub(super) fn extradata() -> BTreeMap<String, String> {
    let entries = [
        ("features.core", names(&Feature::CORE).join(",")),
        ("features.extended", names(&Feature::EXTENDED).join(",")),
        ("kni.methods", METHODS.join(",")),
    ];
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_methods_are_those_of_the_schema() {
        let set = <prost_types::FileDescriptorSet as prost::Message>::decode(kni_proto::DESCRIPTORS).unwrap();
        let mut services = set.file.iter().flat_map(|file| &file.service);
        let service = services.find(|service| service.name() == "KNI").unwrap();
        let methods: Vec<&str> = service
            .method
            .iter()
            .map(prost_types::MethodDescriptorProto::name)
            .collect();
        assert_eq!(methods, METHODS);
    }
}
