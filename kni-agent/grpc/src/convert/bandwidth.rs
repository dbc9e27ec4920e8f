//! Parses the rates that a pod requests: from the CNI runtime's capability, else from the pod's annotations.

use std::collections::BTreeMap;

use kni_model::{Bandwidth, Rate};
use kni_proto::cni::BANDWIDTH;
use serde::Deserialize;

use super::{bounds::MAX_QUOTE, error::Refusal};

/// Rates that Kubernetes accepts, in bits per second.
const REASONABLE: std::ops::RangeInclusive<u64> = 1_000..=1_000_000_000_000_000;
const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";
/// Suffixes of a quantity (k8s.io/apimachinery, `resource.Quantity`).
const SUFFIXES: [(&str, u64); 11] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("", 1),
];

/// The capability `bandwidth` of CNI: bits, and bits per second; absent and 0 mean unlimited. containerd writes the
/// keys with a capital letter.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Capability {
    #[serde(rename = "ingressRate", alias = "IngressRate")]
    ingress_rate: u64,
    #[serde(rename = "ingressBurst", alias = "IngressBurst")]
    ingress_burst: u64,
    #[serde(rename = "egressRate", alias = "EgressRate")]
    egress_rate: u64,
    #[serde(rename = "egressBurst", alias = "EgressBurst")]
    egress_burst: u64,
}

/// Parses the rates.
pub(super) fn requested(
    extradata: &BTreeMap<String, String>,
    annotations: &BTreeMap<String, String>,
) -> Result<Bandwidth, Refusal> {
    if let Some(text) = extradata.get(BANDWIDTH).filter(|text| !text.is_empty()) {
        let field = format!("extradata[{BANDWIDTH:?}]");
        let capability: Capability =
            serde_json::from_str(text).map_err(|error| Refusal::new(field, error.to_string()))?;
        return Ok(Bandwidth {
            to_pod: rate(capability.ingress_rate, capability.ingress_burst),
            from_pod: rate(capability.egress_rate, capability.egress_burst),
        });
    }
    let annotation = |key: &str| {
        let text = annotations.get(key).map(|text| text.trim());
        let text = text.filter(|text| !text.is_empty());
        text.map(|text| quantity(key, text)).transpose()
    };
    Ok(Bandwidth {
        to_pod: annotation(INGRESS)?.and_then(|bits| rate(bits, 0)),
        from_pod: annotation(EGRESS)?.and_then(|bits| rate(bits, 0)),
    })
}

fn rate(bits_per_second: u64, burst_bits: u64) -> Option<Rate> {
    (bits_per_second != 0).then_some(Rate {
        bits_per_second,
        burst_bits,
    })
}

fn quantity(key: &str, text: &str) -> Result<u64, Refusal> {
    let refuse = |reason: &str| {
        let quote: String = text.chars().take(MAX_QUOTE).collect();
        Refusal::new(format!("annotations[{key:?}]"), format!("{quote:?} {reason}"))
    };
    let split = SUFFIXES
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)));
    let bits = split.and_then(|(number, unit)| scaled(number, unit));
    let bits = bits.ok_or_else(|| refuse("is not a quantity of bits per second, such as 10M"))?;
    if REASONABLE.contains(&bits) {
        Ok(bits)
    } else {
        Err(refuse("is not between 1k and 1P bits per second"))
    }
}

/// A decimal number times a unit, rounded down.
fn scaled(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) || fraction.len() > 15 {
        return None;
    }
    let parse = |text: &str| {
        if text.is_empty() {
            Some(0)
        } else {
            text.parse::<u128>().ok()
        }
    };
    let unit = u128::from(unit);
    let places = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let parts = parse(fraction)?.checked_mul(unit)? / places;
    u64::try_from(parse(whole)?.checked_mul(unit)?.checked_add(parts)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotated(text: &str) -> Result<Bandwidth, Refusal> {
        let annotations = BTreeMap::from([(INGRESS.to_owned(), text.to_owned())]);
        requested(&BTreeMap::new(), &annotations)
    }

    #[test]
    fn annotations_are_quantities() {
        for (text, bits) in [
            ("10M", 10_000_000),
            (" 1k ", 1_000),
            ("1.5G", 1_500_000_000),
            (".5Mi", 524_288),
            ("1048576", 1_048_576),
            ("1P", 1_000_000_000_000_000),
        ] {
            assert_eq!(annotated(text).unwrap().to_pod.unwrap().bits_per_second, bits, "{text}");
        }
        assert_eq!(annotated("").unwrap(), Bandwidth::default());
        for text in [
            "10m",
            "M",
            "-1M",
            "1e6",
            "999",
            "2P",
            "1.M.",
            "ten",
            "99999999999999999999999999999999999999999",
        ] {
            let refused = annotated(text).unwrap_err();
            assert_eq!(
                refused.field, "annotations[\"kubernetes.io/ingress-bandwidth\"]",
                "{text}"
            );
        }
    }

    #[test]
    fn what_the_runtime_passes_on_comes_first() {
        let extradata = |text: &str| BTreeMap::from([(BANDWIDTH.to_owned(), text.to_owned())]);
        let annotations = BTreeMap::from([(EGRESS.to_owned(), "1M".to_owned())]);
        let read = |text: &str| requested(&extradata(text), &annotations);
        let both = read(r#"{"ingressRate":1000000,"ingressBurst":8000,"egressRate":0}"#).unwrap();
        let to_pod = Rate {
            bits_per_second: 1_000_000,
            burst_bits: 8_000,
        };
        assert_eq!((both.to_pod, both.from_pod), (Some(to_pod), None));
        assert!(read("").unwrap().from_pod.is_some());
        assert_eq!(read("[").unwrap_err().field, "extradata[\"cni.bandwidth\"]");
        assert!(read(r#"{"egressRate":-1}"#).is_err());
    }
}
