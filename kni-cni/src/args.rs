//! Parses `CNI_ARGS`: `KEY=VALUE` pairs separated by semicolons, in any order.

/// The values of Kubernetes runtimes; empty where they are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodArgs {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// Address that CRI-O passes on.
    pub(crate) ip: String,
    /// MAC address that CRI-O passes on.
    pub(crate) mac: String,
}

impl PodArgs {
    /// Unknown keys and malformed pairs are ignored: with or without `IgnoreUnknown`, no value makes a call fail.
    pub(crate) fn parse(text: &str) -> Self {
        let mut args = Self::default();
        for (key, value) in text.split(';').filter_map(|pair| pair.split_once('=')) {
            let field = match key.trim() {
                "K8S_POD_NAMESPACE" => &mut args.namespace,
                "K8S_POD_NAME" => &mut args.name,
                "K8S_POD_UID" => &mut args.uid,
                "IP" => &mut args.ip,
                "MAC" => &mut args.mac,
                _ => continue,
            };
            value.trim().clone_into(field);
        }
        args
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_does_not_matter() {
        let pairs = [
            "IgnoreUnknown=1",
            "K8S_POD_NAMESPACE=shop",
            "K8S_POD_NAME=web-0",
            "K8S_POD_INFRA_CONTAINER_ID=abc",
            "K8S_POD_UID=uid-1",
            "IP=10.0.0.7",
            "MAC=02:00:00:00:00:07",
        ];
        let expected = PodArgs {
            namespace: "shop".to_owned(),
            name: "web-0".to_owned(),
            uid: "uid-1".to_owned(),
            ip: "10.0.0.7".to_owned(),
            mac: "02:00:00:00:00:07".to_owned(),
        };
        for first in 0..pairs.len() {
            let mut order = pairs;
            order.rotate_left(first);
            assert_eq!(PodArgs::parse(&order.join(";")), expected, "{order:?}");
            order.reverse();
            assert_eq!(PodArgs::parse(&order.join(";")), expected, "{order:?}");
        }
    }

    #[test]
    fn what_is_no_pair_is_left_out() {
        for text in ["", ";;", "nothing", "=x", "K8S_POD_NAMES=a"] {
            assert_eq!(PodArgs::parse(text), PodArgs::default(), "{text:?}");
        }
        assert_eq!(PodArgs::parse(" K8S_POD_NAME = a ;").name, "a");
    }
}
