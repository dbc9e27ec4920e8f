//! Defines the versions of CNI and the features of each.

use serde::Deserialize;
use serde_json::json;

use crate::error::{CniError, ErrorCode};

/// A supported version, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    V0_3_0,
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl Version {
    pub(crate) const ALL: [Self; 5] = [Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    const NEWEST: Self = Self::V1_1_0;

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// All versions, for messages.
    pub(crate) fn list() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }

    pub(crate) fn parse(text: &str) -> Result<Self, CniError> {
        Self::ALL
            .into_iter()
            .find(|known| known.as_str() == text)
            .ok_or_else(|| {
                let msg = format!("cniVersion {text:?} is not supported, but {} are", Self::list());
                CniError::new(ErrorCode::IncompatibleVersion, msg)
            })
    }

    /// Requires a version that supports a verb introduced in `since`.
    pub(crate) fn require(self, since: Self, verb: &str) -> Result<(), CniError> {
        if self >= since {
            return Ok(());
        }
        let msg = format!(
            "cniVersion {} has no {verb}, which came with {}",
            self.as_str(),
            since.as_str()
        );
        Err(CniError::new(ErrorCode::IncompatibleVersion, msg))
    }
}

/// The output of VERSION.
pub(crate) fn answer() -> String {
    json!({
        "cniVersion": Version::NEWEST.as_str(),
        "supportedVersions": Version::ALL.map(Version::as_str),
    })
    .to_string()
}

/// The version of the answer: that of the configuration, even if its other fields are invalid.
pub(crate) fn said(stdin: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Said {
        #[serde(rename = "cniVersion")]
        cni_version: String,
    }
    let said = serde_json::from_slice::<Said>(stdin).ok();
    let known = said.and_then(|said| Version::parse(&said.cni_version).ok());
    known.unwrap_or(Version::NEWEST).as_str().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_and_named() {
        assert!(Version::ALL.is_sorted());
        for version in Version::ALL {
            assert_eq!(Version::parse(version.as_str()).unwrap(), version);
        }
        for other in ["", "0.2.0", "0.1.0", "1.2.0", "1.0", "v1.0.0"] {
            assert_eq!(Version::parse(other).unwrap_err().code, ErrorCode::IncompatibleVersion);
        }
        assert!(Version::V0_3_1.require(Version::V0_4_0, "CHECK").is_err());
        assert!(Version::V1_1_0.require(Version::V1_1_0, "GC").is_ok());
    }

    #[test]
    fn the_answer_lists_all_of_them() {
        let expected = r#"{"cniVersion":"1.1.0","supportedVersions":["0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}"#;
        assert_eq!(answer(), expected);
    }

    #[test]
    fn errors_are_told_in_the_callers_version() {
        for (stdin, version) in [
            (r#"{"cniVersion":"0.4.0","name":7}"#, "0.4.0"),
            (r#"{"cniVersion":"9.0.0"}"#, "1.1.0"),
            ("{", "1.1.0"),
            ("", "1.1.0"),
        ] {
            assert_eq!(said(stdin.as_bytes()), version);
        }
    }
}
