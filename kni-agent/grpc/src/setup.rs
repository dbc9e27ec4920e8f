//! Defines [`Setup`], the preparation of the node that `SetupNodeNetwork` requests, and its report in metadata.

use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};

use super::status::one_line;

/// Prefix of the metadata entry of each part.
const PREFIX: &str = "kni-setup-";
/// Longest description of a problem in an entry, in bytes. Clients limit the size of all metadata together.
const MAX_PROBLEM: usize = 256;

/// Prepares the node. Every call examines all parts and restores what is missing; it may be repeated, also
/// concurrently.
pub trait Setup: Send + Sync + 'static {
    /// Prepares the node and reports each part, in a fixed order. A part that fails does not prevent the others.
    /// Blocks, possibly for seconds.
    fn prepare(&self) -> Vec<PreparedPart>;
}

/// A part of the node's preparation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedPart {
    /// Its name: lower-case letters.
    pub name: &'static str,
    /// What was done.
    pub outcome: Outcome,
}

/// The result of preparing a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing was missing.
    Ok,
    /// Something was missing, and is there now or is being made.
    Prepared,
    /// It cannot be prepared. The agent repeats the attempt in the background.
    Failed(String),
}

impl Outcome {
    /// `ok`, `prepared` or the problem, in printable ASCII.
    fn text(&self) -> String {
        match self {
            Self::Ok => "ok".to_owned(),
            Self::Prepared => "prepared".to_owned(),
            Self::Failed(problem) => {
                let ascii = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
                one_line(problem).chars().map(ascii).take(MAX_PROBLEM).collect()
            }
        }
    }
}

/// One line for the log: `bpffs ok, tables ok`.
pub(super) fn summary(parts: &[PreparedPart]) -> String {
    let each = parts
        .iter()
        .map(|part| format!("{} {}", part.name, part.outcome.text()));
    each.collect::<Vec<_>>().join(", ")
}

/// Writes an entry for each part: the response message has no fields.
pub(super) fn report(parts: &[PreparedPart], metadata: &mut MetadataMap) {
    for part in parts {
        let key = MetadataKey::from_bytes(format!("{PREFIX}{}", part.name).as_bytes());
        let value = MetadataValue::try_from(part.outcome.text());
        if let (Ok(key), Ok(value)) = (key, value) {
            metadata.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_an_entry_of_ascii() {
        let part = |name, outcome| PreparedPart { name, outcome };
        let parts = [
            part("bpffs", Outcome::Ok),
            part("tables", Outcome::Prepared),
            part("uplink", Outcome::Failed(format!("no däy\n{}", "x".repeat(2000)))),
        ];
        let mut metadata = MetadataMap::new();
        report(&parts, &mut metadata);
        assert_eq!(metadata.get("kni-setup-bpffs").unwrap(), "ok");
        assert_eq!(metadata.get("kni-setup-tables").unwrap(), "prepared");
        let problem = metadata.get("kni-setup-uplink").unwrap().to_str().unwrap();
        assert!(
            problem.starts_with("no d?y x") && problem.len() == MAX_PROBLEM,
            "{problem}"
        );
        assert!(summary(&parts).starts_with("bpffs ok, tables prepared, uplink no d?y x"));
    }
}
