//! Reads peers of policy rules: pods and address ranges.

use ipnet::IpNet;
use k8s_openapi::api::networking::v1::{IPBlock, NetworkPolicyPeer};
use kni_model::policy::{PolicyPeer, Selector};

use super::{
    cidr::read_cidr_truncated,
    invalid::{FieldError, at, read_each},
    labels::read_selector,
};

/// One entry of a policy's `from` or `to`.
pub(super) fn read_peer(field: &str, peer: &NetworkPolicyPeer) -> Result<PolicyPeer, FieldError> {
    let selector = |name: &str, selector: &Option<_>| {
        selector
            .as_ref()
            .map(|selector| read_selector(&format!("{field}.{name}"), selector))
            .transpose()
    };
    let namespaces = selector("namespaceSelector", &peer.namespace_selector)?;
    let pods = selector("podSelector", &peer.pod_selector)?;
    match (&peer.ip_block, namespaces, pods) {
        (None, None, None) => Err(at(field, "needs a podSelector, a namespaceSelector or an ipBlock")),
        (None, namespaces, pods) => Ok(PolicyPeer::Pods {
            namespaces,
            pods: pods.unwrap_or_else(Selector::default),
        }),
        (Some(block), None, None) => read_block(&format!("{field}.ipBlock"), block),
        (Some(_), _, _) => Err(at(format!("{field}.ipBlock"), "cannot be combined with selectors")),
    }
}

fn read_block(field: &str, block: &IPBlock) -> Result<PolicyPeer, FieldError> {
    let except = block.except.as_deref().unwrap_or_default();
    read_range_except(field, &block.cidr, except, read_cidr_truncated)
}

/// Reads a range and its exceptions; `read` parses each of them.
pub(super) fn read_range_except(
    field: &str,
    cidr: &str,
    except: &[String],
    read: fn(&str) -> Result<IpNet, String>,
) -> Result<PolicyPeer, FieldError> {
    let cidr = read(cidr).map_err(|reason| at(format!("{field}.cidr"), reason))?;
    let except = read_each(&format!("{field}.except"), except, |path, text| {
        let net = read(text).map_err(|reason| at(path, reason))?;
        if cidr.contains(&net) && cidr != net {
            Ok(net)
        } else {
            Err(at(path, format!("{net} is not a part of {cidr}")))
        }
    })?;
    Ok(PolicyPeer::Block { cidr, except })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<PolicyPeer, FieldError> {
        read_peer("from[0]", &serde_json::from_str(json).unwrap())
    }

    fn pods(json: &str) -> (Option<usize>, usize) {
        match read(json).unwrap() {
            PolicyPeer::Pods { namespaces, pods } => {
                (namespaces.map(|s| s.requirements.len()), pods.requirements.len())
            }
            PolicyPeer::Block { .. } => panic!("{json}"),
        }
    }

    #[test]
    fn an_absent_selector_is_not_an_empty_one() {
        assert_eq!(pods(r#"{"podSelector":{}}"#), (None, 0));
        assert_eq!(pods(r#"{"podSelector":{"matchLabels":{"a":"b"}}}"#), (None, 1));
        assert_eq!(pods(r#"{"namespaceSelector":{}}"#), (Some(0), 0));
        assert_eq!(
            pods(r#"{"namespaceSelector":{"matchLabels":{"a":"b"}},"podSelector":{"matchLabels":{"a":"b","c":"d"}}}"#),
            (Some(1), 2)
        );
    }

    #[test]
    fn blocks_lose_their_host_bits() {
        let block = read(r#"{"ipBlock":{"cidr":"10.1.2.3/16","except":["10.1.3.4/24","10.1.0.0/32"]}}"#).unwrap();
        let net = |text: &str| text.parse().unwrap();
        assert_eq!(
            block,
            PolicyPeer::Block {
                cidr: net("10.1.0.0/16"),
                except: vec![net("10.1.3.0/24"), net("10.1.0.0/32")]
            }
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, field, why) in [
            ("{}", "from[0]", "needs a podSelector"),
            (
                r#"{"ipBlock":{"cidr":"::/0"},"podSelector":{}}"#,
                "from[0].ipBlock",
                "combined",
            ),
            (
                r#"{"ipBlock":{"cidr":"::/0"},"namespaceSelector":{}}"#,
                "from[0].ipBlock",
                "combined",
            ),
            (r#"{"ipBlock":{"cidr":"10.0.0.1"}}"#, "from[0].ipBlock.cidr", "CIDR"),
            (r#"{"ipBlock":{"cidr":""}}"#, "from[0].ipBlock.cidr", "CIDR"),
            (
                r#"{"ipBlock":{"cidr":"10.0.0.0/8","except":["10.1.0.0/16","11.0.0.0/16"]}}"#,
                "from[0].ipBlock.except[1]",
                "not a part of 10.0.0.0/8",
            ),
            (
                r#"{"ipBlock":{"cidr":"10.0.0.0/8","except":["10.0.0.0/8"]}}"#,
                "from[0].ipBlock.except[0]",
                "not a part",
            ),
            (
                r#"{"ipBlock":{"cidr":"10.0.0.0/8","except":["fd00::/64"]}}"#,
                "from[0].ipBlock.except[0]",
                "not a part",
            ),
            (
                r#"{"podSelector":{"matchExpressions":[{"key":"a","operator":"x"}]}}"#,
                "from[0].podSelector.matchExpressions[0].operator",
                "Exists",
            ),
        ] {
            let (at, reason) = read(json).unwrap_err();
            assert_eq!(at, field, "{json}");
            assert!(reason.contains(why), "{json}: {reason}");
        }
    }
}
