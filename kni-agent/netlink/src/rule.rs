//! Manages the rules that send traffic for pods of the default network to KNI's routing table.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::RouteProtocol,
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use super::{
    Netlink, Result,
    connection::Request,
    message::family_of,
    own::{ROUTE_PROTOCOL, ROUTE_TABLE, RULE_PRIORITY},
};

/// A rule of KNI: traffic to `subnet` is looked up in KNI's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OurRule {
    /// The destinations that it matches.
    pub subnet: IpNet,
    /// Its priority.
    pub priority: u32,
}

impl Netlink {
    /// Reconciles KNI's rules to exactly one for each subnet: adds missing ones, removes surplus ones. Idempotent.
    pub async fn ensure_rules(&self, subnets: &[IpNet]) -> Result<()> {
        let desired: BTreeSet<OurRule> = subnets
            .iter()
            .map(|subnet| OurRule {
                subnet: subnet.trunc(),
                priority: RULE_PRIORITY,
            })
            .collect();
        let mut present = BTreeSet::new();
        let mut requests = Vec::new();
        for rule in self.list_our_rules().await? {
            if !desired.contains(&rule) || !present.insert(rule) {
                let place = self.place(format!("remove rule to {}", rule.subnet));
                let message = RouteNetlinkMessage::DelRule(rule.message());
                requests.push(Request::new(place, message, 0).forgive(&[libc::ENOENT]));
            }
        }
        for rule in desired.difference(&present) {
            let place = self.place(format!("add rule to {}", rule.subnet));
            let message = RouteNetlinkMessage::NewRule(rule.message());
            requests.push(Request::new(place, message, NLM_F_CREATE | NLM_F_EXCL).forgive(&[libc::EEXIST]));
        }
        self.apply(requests).await
    }

    /// Removes all of KNI's rules. Idempotent.
    pub async fn remove_rules(&self) -> Result<()> {
        self.ensure_rules(&[]).await
    }

    /// All rules of KNI in this namespace, recognised by protocol and table, duplicates included.
    pub async fn list_our_rules(&self) -> Result<Vec<OurRule>> {
        let mut rules = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut filter = RuleMessage::default();
            filter.header.family = family;
            // A family may be disabled.
            let request = Request::new(self.place("list rules"), RouteNetlinkMessage::GetRule(filter), 0)
                .forgive(&[libc::EAFNOSUPPORT, libc::EOPNOTSUPP]);
            for answer in self.dump(request).await? {
                if let RouteNetlinkMessage::NewRule(rule) = answer {
                    rules.extend(OurRule::recognise(&rule));
                }
            }
        }
        Ok(rules)
    }
}

impl OurRule {
    fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = family_of(self.subnet.addr());
        message.header.dst_len = self.subnet.prefix_len();
        message.header.action = RuleAction::ToTable;
        message.attributes = vec![
            RuleAttribute::Priority(self.priority),
            RuleAttribute::Table(ROUTE_TABLE),
            RuleAttribute::Protocol(RouteProtocol::Other(ROUTE_PROTOCOL)),
        ];
        if self.subnet.prefix_len() > 0 {
            message.attributes.push(RuleAttribute::Destination(self.subnet.addr()));
        }
        message
    }

    fn recognise(rule: &RuleMessage) -> Option<Self> {
        let ours = RuleAttribute::Protocol(RouteProtocol::Other(ROUTE_PROTOCOL));
        if !rule.attributes.contains(&ours) || !rule.attributes.contains(&RuleAttribute::Table(ROUTE_TABLE)) {
            return None;
        }
        let mut priority = 0;
        let mut destination = match rule.header.family {
            AddressFamily::Inet => IpAddr::from([0_u8; 4]),
            _ => IpAddr::from([0_u8; 16]),
        };
        for attribute in &rule.attributes {
            match attribute {
                RuleAttribute::Priority(value) => priority = *value,
                RuleAttribute::Destination(address) => destination = *address,
                _ => {}
            }
        }
        let subnet = IpNet::new(destination, rule.header.dst_len).ok()?;
        Some(Self { subnet, priority })
    }
}
