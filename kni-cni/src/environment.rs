//! Reads the runtime's call from the environment.

use kni_proto::cni::MAX_CONTAINER;

use crate::{
    args::PodArgs,
    error::{CniError, ErrorCode},
};

/// Verbs that need a variable.
const NEEDS_CONTAINER: [&str; 3] = ["ADD", "DEL", "CHECK"];
const NEEDS_NETNS: [&str; 2] = ["ADD", "CHECK"];
const VERBS: [&str; 5] = ["ADD", "DEL", "CHECK", "STATUS", "GC"];
/// The kernel's limit of an interface name.
const MAX_IFNAME: usize = 15;

/// Parameters that the runtime passes in addition to the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Environment {
    pub(crate) command: String,
    pub(crate) container: String,
    pub(crate) netns: String,
    pub(crate) ifname: String,
    pub(crate) path: String,
    pub(crate) args: PodArgs,
    /// The runtime's trace context, as gRPC metadata.
    pub(crate) trace: Vec<(&'static str, String)>,
}

impl Environment {
    pub(crate) fn of_process() -> Self {
        Self::read(|name| std::env::var(name).ok())
    }

    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        let text = |name| variable(name).unwrap_or_default();
        let traces = [
            ("TRACEPARENT", "traceparent"),
            ("TRACESTATE", "tracestate"),
            ("BAGGAGE", "baggage"),
        ];
        let trace = traces
            .into_iter()
            .filter_map(|(name, key)| Some((key, variable(name)?)));
        Self {
            command: text("CNI_COMMAND"),
            container: text("CNI_CONTAINERID"),
            netns: text("CNI_NETNS"),
            ifname: text("CNI_IFNAME"),
            path: text("CNI_PATH"),
            args: PodArgs::parse(&text("CNI_ARGS")),
            trace: trace.filter(|(_, value)| !value.is_empty()).collect(),
        }
    }

    /// Checks that the variables of the verb are present and legal.
    pub(crate) fn check(&self) -> Result<(), CniError> {
        let verb = self.command.as_str();
        if !VERBS.contains(&verb) {
            return Err(invalid(&format!(
                "CNI_COMMAND {verb:?} is none of {}",
                VERBS.join(", ")
            )));
        }
        require("CNI_PATH", verb, &self.path)?;
        if NEEDS_CONTAINER.contains(&verb) {
            require("CNI_CONTAINERID", verb, &self.container)?;
            require("CNI_IFNAME", verb, &self.ifname)?;
            if !is_container(&self.container) {
                let rule =
                    format!("1 to {MAX_CONTAINER} of A-Z, a-z, 0-9, '_', '.' and '-', the first a letter or digit");
                return Err(invalid(&format!("CNI_CONTAINERID {:?} is not {rule}", self.container)));
            }
            if !is_ifname(&self.ifname) {
                return Err(invalid(&format!(
                    "CNI_IFNAME {:?} is no name of an interface",
                    self.ifname
                )));
            }
        }
        if NEEDS_NETNS.contains(&verb) {
            require("CNI_NETNS", verb, &self.netns)?;
        }
        Ok(())
    }
}

fn require(name: &str, verb: &str, value: &str) -> Result<(), CniError> {
    if value.is_empty() {
        return Err(invalid(&format!("{name} is not set, which {verb} needs")));
    }
    Ok(())
}

fn is_container(id: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    id.len() <= MAX_CONTAINER && id.bytes().all(legal) && id.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
}

fn is_ifname(name: &str) -> bool {
    name.len() <= MAX_IFNAME
        && !matches!(name, "." | "..")
        && !name
            .chars()
            .any(|c| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control())
}

fn invalid(msg: &str) -> CniError {
    CniError::new(ErrorCode::InvalidEnvironment, msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(&str, &str); 5] = [
        ("CNI_CONTAINERID", "abc"),
        ("CNI_NETNS", "/run/netns/x"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin"),
        ("CNI_ARGS", "K8S_POD_NAME=web-0"),
    ];

    fn check(verb: &str, change: impl Fn(&str, &str) -> Option<String>) -> Result<(), String> {
        let environment = Environment::read(|name| match name {
            "CNI_COMMAND" => Some(verb.to_owned()),
            _ => ALL
                .iter()
                .find(|(known, _)| *known == name)
                .and_then(|(name, value)| change(name, value)),
        });
        environment.check().map_err(|error| {
            assert_eq!(error.code, ErrorCode::InvalidEnvironment);
            error.msg
        })
    }

    fn without(missing: &str) -> impl Fn(&str, &str) -> Option<String> {
        move |name, value| (name != missing).then(|| value.to_owned())
    }

    #[test]
    fn each_verb_says_what_it_lacks() {
        for (verb, needed) in [
            ("ADD", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"][..]),
            ("DEL", &["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"]),
            ("CHECK", &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]),
            ("STATUS", &["CNI_PATH"]),
            ("GC", &["CNI_PATH"]),
        ] {
            assert_eq!(check(verb, without("")), Ok(()), "{verb}");
            for (name, _) in ALL {
                let result = check(verb, without(name));
                if needed.contains(&name) {
                    assert_eq!(result.unwrap_err(), format!("{name} is not set, which {verb} needs"));
                } else {
                    assert_eq!(result, Ok(()), "{verb} without {name}");
                }
            }
        }
        assert!(
            check("UPDATE", without(""))
                .unwrap_err()
                .contains("CNI_COMMAND \"UPDATE\"")
        );
    }

    #[test]
    fn illegal_names_are_refused() {
        let long = "x".repeat(MAX_CONTAINER + 1);
        for (name, value) in [
            ("CNI_CONTAINERID", "a/b"),
            ("CNI_CONTAINERID", ".a"),
            ("CNI_CONTAINERID", "a:net1"),
            ("CNI_CONTAINERID", long.as_str()),
            ("CNI_IFNAME", "a b"),
            ("CNI_IFNAME", "a/b"),
            ("CNI_IFNAME", "a:b"),
            ("CNI_IFNAME", ".."),
            ("CNI_IFNAME", "sixteen-letters-"),
        ] {
            let replaced = |known: &str, old: &str| Some(if known == name { value } else { old }.to_owned());
            assert!(check("ADD", replaced).unwrap_err().contains(name), "{name}={value}");
        }
    }

    #[test]
    fn the_trace_becomes_metadata() {
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let environment = Environment::read(|name| match name {
            "TRACEPARENT" => Some(parent.to_owned()),
            "BAGGAGE" => Some(String::new()),
            _ => None,
        });
        assert_eq!(environment.trace, [("traceparent", parent.to_owned())]);
    }
}
