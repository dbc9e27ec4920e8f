//! Decides whether a pod may join a network, and with what. Pure; the only place of the rule.

use std::net::IpAddr;

use super::{
    NetworkName, NetworkSpec,
    access::{Access, Admitted, Choice},
    policy::Labels,
    service::Service,
};

/// The label that the API server gives every namespace: its name.
pub const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// The pod that joins, or the object of its namespace.
#[derive(Debug, Clone, Copy)]
pub struct Joiner<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// The labels of the namespace, with [`NAMESPACE_NAME_LABEL`].
    pub labels: &'a Labels,
    /// The service account of the pod; empty while it is not known.
    pub account: &'a str,
    /// Whether the account has the verb `join` on the network.
    pub has_verb: bool,
}

/// The requested properties of one interface.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wish<'a> {
    /// Whether it is the pod's primary interface.
    pub primary: bool,
    /// Chosen addresses.
    pub ips: &'a [IpAddr],
    /// Whether a MAC address is chosen.
    pub mac: bool,
    /// Whether it takes the default routes of the pod.
    pub default_route: bool,
}

/// A rule of `PodNetwork.spec.access`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AccessRule {
    /// The namespace.
    Namespaces,
    /// Chosen addresses.
    Addresses,
    /// The ranges of chosen addresses.
    AddressRanges,
    /// A chosen MAC address.
    Mac,
    /// The default routes.
    DefaultRoute,
    /// Another network locks the namespace.
    LockNamespaces,
    /// The verb of the service account.
    RequireJoin,
}

impl AccessRule {
    /// The field of the network that decides.
    pub const fn field(self) -> &'static str {
        match self {
            Self::Namespaces => "spec.access.namespaces",
            Self::Addresses => "spec.access.allowAddresses",
            Self::AddressRanges => "spec.access.addressRanges",
            Self::Mac => "spec.access.allowMac",
            Self::DefaultRoute => "spec.access.allowDefaultRoute",
            Self::LockNamespaces => "spec.access.lockNamespaces",
            Self::RequireJoin => "spec.access.requireJoin",
        }
    }

    /// The reason of a condition, in `CamelCase`.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Namespaces => "NamespaceNotAdmitted",
            Self::Addresses => "AddressNotAllowed",
            Self::AddressRanges => "AddressOutsideRanges",
            Self::Mac => "MACNotAllowed",
            Self::DefaultRoute => "DefaultRouteNotAllowed",
            Self::LockNamespaces => "NamespaceLocked",
            Self::RequireJoin => "JoinNotGranted",
        }
    }
}

/// A refusal: the network whose rule refuses, the rule, and what would be needed. The caller names the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("network {network}: {}: {reason}", rule.field())]
pub struct AccessRefusal {
    /// The network whose rule refuses.
    pub network: NetworkName,
    /// The rule.
    pub rule: AccessRule,
    /// What is refused, to which namespace, and what would allow it.
    pub reason: String,
}

impl NetworkSpec {
    /// Whether pods, attachments and Services of a namespace may join.
    pub fn admits(&self, namespace: &str, labels: &Labels) -> Result<(), AccessRefusal> {
        let Access {
            namespaces, primary_of, ..
        } = &self.access;
        if namespaces.admits(labels) || primary_of.as_ref().is_some_and(|selector| selector.matches(labels)) {
            return Ok(());
        }
        let why = match (namespaces, primary_of) {
            (Admitted::Selected(_), None) => "the selector does not select it",
            (Admitted::Selected(_), Some(_)) => "neither the selector nor spec.namespaceSelector selects it",
            (_, None) => "no namespace is admitted",
            (_, Some(_)) => "only namespaces that spec.namespaceSelector selects are admitted",
        };
        let reason = format!("namespace {namespace} may not join: {why}");
        Err(self.refuse(AccessRule::Namespaces, reason))
    }

    /// Whether a pod may have an interface in the network, with these properties.
    ///
    /// `primary` is the network in which pods of its namespace have their primary interface by default. Only the
    /// primary interface can violate its lock.
    pub fn authorize(&self, joiner: Joiner<'_>, wish: Wish<'_>, primary: Option<&Self>) -> Result<(), AccessRefusal> {
        self.stays(joiner, wish.primary, primary)?;
        self.chooses(joiner.namespace, wish)
    }

    /// Whether a pod that has an interface in the network would be let in again.
    pub fn stays(&self, joiner: Joiner<'_>, is_primary: bool, primary: Option<&Self>) -> Result<(), AccessRefusal> {
        let Joiner {
            namespace,
            labels,
            account,
            has_verb,
        } = joiner;
        self.admits(namespace, labels)?;
        if let Some(home) = primary.filter(|home| is_primary && home.access.lock_namespaces && home.name != self.name) {
            let reason = format!(
                "pods of namespace {namespace} may have no other primary network, such as {}",
                self.name
            );
            return Err(home.refuse(AccessRule::LockNamespaces, reason));
        }
        if self.access.require_join && !has_verb {
            let reason = if account.is_empty() {
                format!("the service account of the pod of namespace {namespace} is not known; a static pod has none")
            } else {
                format!(
                    "service account {namespace}/{account} has no verb join on podnetworks.kni.dev {}, as far as \
                     kni-controller has reported",
                    self.name
                )
            };
            return Err(self.refuse(AccessRule::RequireJoin, reason));
        }
        Ok(())
    }

    fn chooses(&self, namespace: &str, wish: Wish<'_>) -> Result<(), AccessRefusal> {
        let Wish {
            primary,
            ips,
            mac,
            default_route,
        } = wish;
        for ip in ips {
            let (rule, text) = match &self.access.addresses {
                Choice::Any => continue,
                Choice::Within(ranges) if ranges.iter().any(|range| range.contains(ip)) => continue,
                Choice::Within(_) => (AccessRule::AddressRanges, "it is in none of the ranges"),
                Choice::Nothing => (AccessRule::Addresses, "pods may not choose addresses"),
            };
            return Err(self.refuse(
                rule,
                format!("a pod of namespace {namespace} may not choose {ip}: {text}"),
            ));
        }
        if mac && !self.access.mac {
            let reason = format!("a pod of namespace {namespace} may not choose its MAC address");
            return Err(self.refuse(AccessRule::Mac, reason));
        }
        if default_route && !primary && !self.access.default_route {
            let reason = format!(
                "an interface beside the primary one may not take the default routes of a pod of namespace {namespace}"
            );
            return Err(self.refuse(AccessRule::DefaultRoute, reason));
        }
        Ok(())
    }

    fn refuse(&self, rule: AccessRule, reason: String) -> AccessRefusal {
        AccessRefusal {
            network: self.name.clone(),
            rule,
            reason,
        }
    }
}

/// The network in which pods of a namespace have their primary interface by default: the first that selects the
/// namespace, else the default network. `networks` are in the order of their age.
pub fn primary_of<'a>(
    networks: impl IntoIterator<Item = &'a NetworkSpec>,
    namespace: &Labels,
) -> Option<&'a NetworkSpec> {
    let mut default = None;
    for network in networks {
        let selector = network.access.primary_of.as_ref();
        if selector.is_some_and(|selector| selector.matches(namespace)) {
            return Some(network);
        }
        if network.default {
            default = Some(network);
        }
    }
    default
}

/// Whether a Service may have virtual addresses in its network: that of its label, else the default network. `Ok` where
/// there is no such network.
pub fn admits_service<'a>(
    networks: impl IntoIterator<Item = &'a NetworkSpec>,
    service: &Service,
    namespace: &Labels,
) -> Result<(), AccessRefusal> {
    let mut networks = networks.into_iter();
    let network = networks.find(|spec| match &service.network {
        Some(name) => spec.name == *name,
        None => spec.default,
    });
    network.map_or(Ok(()), |spec| spec.admits(&service.reference.namespace, namespace))
}

/// The labels of a namespace of which nothing but the name is known.
pub fn unknown_namespace(name: &str) -> Labels {
    [(NAMESPACE_NAME_LABEL.to_owned(), name.to_owned())].into()
}

#[cfg(test)]
mod tests;
