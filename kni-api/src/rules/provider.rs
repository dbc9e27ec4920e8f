//! Rules of `PodNetwork.spec.provider`: which parameters a type takes and needs.

use kube::core::Rule;

use super::{rule, rule_at};

/// Parameters and the types that they are for.
const PARAMETERS: [(&str, &[&str]); 10] = [
    ("parent", &["Macvlan"]),
    ("allowUplink", &["Macvlan"]),
    ("mode", &["Macvlan"]),
    ("devices", &["HostDevice"]),
    ("gateways", &["Macvlan", "HostDevice"]),
    ("owner", &["Tap"]),
    ("group", &["Tap"]),
    ("multiQueue", &["Tap"]),
    ("confName", &["CNI"]),
    ("file", &["CNI"]),
];

/// Rules of the whole.
pub(crate) fn spec() -> Vec<Rule> {
    let mut rules: Vec<Rule> = PARAMETERS.iter().map(|(name, types)| only_with(name, types)).collect();
    rules.extend([
        rule_at(
            ".parent",
            "self.type != 'Macvlan' || has(self.parent)",
            "is missing: type Macvlan needs the name of an interface of the node",
        ),
        rule_at(
            ".devices",
            "self.type != 'HostDevice' || (has(self.devices) && self.devices.size() > 0)",
            "is empty: type HostDevice needs the names of interfaces of the node",
        ),
        rule_at(
            ".confName",
            "self.type != 'CNI' || has(self.confName) != has(self.file)",
            "type CNI needs either confName or file: write one of them, not both",
        ),
    ]);
    rules
}

/// The name of a CNI configuration.
pub(crate) fn plain_name() -> Vec<Rule> {
    vec![rule(
        r"self.size() > 0 && !self.matches('\\p{Cc}')",
        "is not a name: write 1 to 255 printable characters",
    )]
}

/// The name of a file with a CNI configuration.
pub(crate) fn file_name() -> Vec<Rule> {
    let mut rules = plain_name();
    rules.push(rule(
        "!self.contains('/') && (self.endsWith('.conflist') || self.endsWith('.conf') || self.endsWith('.json'))",
        "is not a file of the CNI configuration folder: write the name of a .conflist, .conf or .json file, without a \
         folder",
    ));
    rules
}

fn only_with(name: &str, types: &[&str]) -> Rule {
    let quoted: Vec<String> = types.iter().map(|kind| format!("'{kind}'")).collect();
    let absent = match name {
        // An empty list has no meaning.
        "devices" | "gateways" => format!("!has(self.{name}) || self.{name}.size() == 0"),
        _ => format!("!has(self.{name})"),
    };
    rule_at(
        &format!(".{name}"),
        &format!("{absent} || self.type in [{}]", quoted.join(", ")),
        &format!(
            "{name} has a meaning with type {} only: remove it, or change the type",
            types.join(" or ")
        ),
    )
}
