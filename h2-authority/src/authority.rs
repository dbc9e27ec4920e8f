//! Decides which authorities are legal, by the very parser h2 uses, and what an illegal one becomes.

use http::uri::Authority;

/// Returns the value to send instead of `value`, or `None` when `value` can stay.
///
/// The replacement has the length of `value` and parses as an authority. An empty `value` stays although h2 refuses
/// it, since no legal value is as short.
pub(crate) fn replacement(value: &[u8]) -> Option<Vec<u8>> {
    if value.is_empty() || Authority::try_from(value).is_ok() {
        return None;
    }
    Some(
        value
            .iter()
            .map(|byte| if is_host_byte(*byte) { *byte } else { b'-' })
            .collect(),
    )
}

/// Bytes with no meaning beyond "part of a host name", so that any sequence of them, in any place, is legal. Colon,
/// at sign, percent and brackets are legal in some places only.
fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'.' || byte == b'-'
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn replaced(value: &str) -> Option<String> {
        replacement(value.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn socket_paths_become_host_names() {
        assert_eq!(replaced("%2Ftmp%2Fkni.sock").as_deref(), Some("-2Ftmp-2Fkni.sock"));
        assert_eq!(replaced("/tmp/kni.sock").as_deref(), Some("-tmp-kni.sock"));
    }

    #[test]
    fn legal_authorities_stay() {
        for value in [
            "localhost",
            "localhost:80",
            "[::1]:443",
            "10.0.0.1",
            "user@host",
            "1",
            "a_b~c",
            "",
        ] {
            assert_eq!(replaced(value), None, "{value}");
        }
    }

    #[test]
    fn marks_that_are_legal_elsewhere_are_replaced_too() {
        for (value, expected) in [
            ("/a:80", "-a-80"),
            ("a:1:2", "a-1-2"),
            ("[::1", "---1"),
            ("host@", "host-"),
            ("a]b[", "a-b-"),
            ("9 9", "9-9"),
            ("%", "-"),
            ("/", "-"),
            ("?:@", "---"),
        ] {
            assert_eq!(replaced(value).as_deref(), Some(expected), "{value}");
        }
    }

    proptest! {
        #[test]
        fn replacement_is_legal_and_as_long(value in prop::collection::vec(any::<u8>(), 0..300)) {
            match replacement(&value) {
                Some(legal) => {
                    prop_assert_eq!(legal.len(), value.len());
                    prop_assert!(Authority::from_maybe_shared(bytes::Bytes::from(legal)).is_ok());
                }
                None => prop_assert!(value.is_empty() || Authority::try_from(value.as_slice()).is_ok()),
            }
        }

        #[test]
        fn replacement_of_almost_legal_values_is_legal(value in "[a-f0-9.:@%/\\[\\]-]{1,40}") {
            if let Some(legal) = replacement(value.as_bytes()) {
                prop_assert_eq!(legal.len(), value.len());
                prop_assert!(Authority::try_from(legal.as_slice()).is_ok());
            }
        }
    }
}
