//! Writes the owner of an interface into its alias, and reads it back: also from links of earlier agents.

use kni_model::{CniAttachment, IfName, NetworkName, PodRef, Sandbox, SandboxId};
use kni_netlink::own::IFALIAS_PREFIX;

/// The longest alias, in bytes: the kernel's `dev_set_alias` takes less than `IFALIASZ` (256) bytes, and rtnetlink's
/// final zero is one of them.
const MOST: usize = 254;
/// An absent word.
const NONE: &str = "-";

/// The owner of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) pod: PodRef,
    pub(super) ifname: IfName,
    pub(super) network: NetworkName,
    /// Absent in aliases of earlier agents, and where it did not fit.
    pub(super) sandbox: Option<SandboxId>,
    /// Name of the runtime's CNI configuration.
    pub(super) cni: Option<String>,
}

/// `kni:NAMESPACE/POD IFNAME NETWORK SANDBOX UID CNI-NETWORK`. Words that do not fit are left out from the end; `ip
/// link` shows it.
pub(crate) fn alias(
    pod: &PodRef,
    sandbox: &str,
    ifname: &IfName,
    network: &NetworkName,
    cni: Option<&CniAttachment>,
) -> String {
    let mut text = format!("{IFALIAS_PREFIX}{}/{} {ifname} {network}", pod.namespace, pod.name);
    let plain = |word: &str| {
        let usable = !word.is_empty() && !word.chars().any(|c| c.is_whitespace() || c.is_control());
        if usable { word.to_owned() } else { NONE.to_owned() }
    };
    let cni = cni.map_or_else(String::new, |cni| cni.network.clone());
    for word in [sandbox, &pod.uid, &cni] {
        let word = plain(word);
        if text.len() + 1 + word.len() > MOST {
            break;
        }
        text = format!("{text} {word}");
    }
    text.chars()
        .filter(|c| !c.is_control())
        .scan(0, |bytes, c| {
            *bytes += c.len_utf8();
            (*bytes <= MOST).then_some(c)
        })
        .collect()
}

impl Owner {
    /// Reads an alias; `None` for a prewarmed interface, and where it was cut.
    pub(super) fn parse(alias: &str) -> Option<Self> {
        let mut words = alias.strip_prefix(IFALIAS_PREFIX)?.split(' ');
        let (namespace, name) = words.next()?.split_once('/')?;
        let ifname = words.next()?.parse().ok()?;
        let network = words.next()?.parse().ok()?;
        let mut word = || words.next().filter(|word| *word != NONE);
        let sandbox = word().and_then(|id| id.parse().ok());
        let uid = word().unwrap_or_default().to_owned();
        Some(Self {
            pod: PodRef {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                uid,
            },
            ifname,
            network,
            sandbox,
            cni: word().map(str::to_owned),
        })
    }

    /// The CNI attachment, as far as the alias has it. The invocation is lost: it only distinguishes repeated calls.
    pub(super) fn cni(&self, sandbox: &SandboxId) -> Option<CniAttachment> {
        let network = self.cni.clone()?;
        let container = sandbox.as_str().split(':').next().unwrap_or_default().to_owned();
        Some(CniAttachment {
            network,
            container,
            ifname: self.ifname.clone(),
            invocation: String::new(),
            completed_ns: 0,
        })
    }
}

/// The pod's own sandbox of an additional interface, by the form of its id.
pub(super) fn parent_of(id: &SandboxId, others: &[Sandbox]) -> Option<SandboxId> {
    let (parent, _) = id.as_str().rsplit_once('~')?;
    let known = others.iter().any(|sandbox| sandbox.id.as_str() == parent);
    known.then(|| parent.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> PodRef {
        PodRef {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            uid: "3f1c".to_owned(),
        }
    }

    #[test]
    fn an_alias_names_the_owner() {
        let (ifname, network) = ("net1".parse().unwrap(), "blue".parse().unwrap());
        let cni = CniAttachment {
            network: "kni".to_owned(),
            container: "abc".to_owned(),
            ifname: "net1".parse().unwrap(),
            invocation: "7".to_owned(),
            completed_ns: 5,
        };
        let text = alias(&pod("web-0"), "abc:net1", &ifname, &network, Some(&cni));
        assert_eq!(text, "kni:shop/web-0 net1 blue abc:net1 3f1c kni");
        let owner = Owner::parse(&text).unwrap();
        let sandbox = owner.sandbox.clone().unwrap();
        assert_eq!((owner.pod.clone(), sandbox.as_str()), (pod("web-0"), "abc:net1"));
        let rebuilt = owner.cni(&sandbox).unwrap();
        assert_eq!((rebuilt.container, rebuilt.network), (cni.container, cni.network));
        let text = alias(&pod("web-0"), "abc", &ifname, &network, None);
        assert_eq!(text, "kni:shop/web-0 net1 blue abc 3f1c -");
        assert_eq!(Owner::parse(&text).unwrap().cni, None);
    }

    #[test]
    fn aliases_of_earlier_agents_and_long_ones_are_read() {
        let owner = Owner::parse("kni:shop/web-0 eth0 blue").unwrap();
        assert_eq!((owner.pod.name.as_str(), owner.sandbox), ("web-0", None));
        assert_eq!(Owner::parse("kni:prewarmed"), None);
        assert_eq!(Owner::parse("other"), None);
        let (ifname, network) = ("eth0".parse().unwrap(), "blue".parse().unwrap());
        let text = alias(&pod(&"x".repeat(200)), &"s".repeat(64), &ifname, &network, None);
        assert!(text.len() <= MOST);
        assert_eq!(Owner::parse(&text).unwrap().sandbox, None);
    }
}
