//! Describes one row of the table: what an editor attempts, how the API server answers, and where the attempt shows.

use std::{fmt, net::IpAddr};

use super::super::request::{Outcome, Request};

/// Kinds of attempts. The short form of the table has one row of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Addresses,
    Services,
    Policies,
    Attachments,
    Accounts,
    Events,
    Names,
    Finalizers,
    Objects,
    Pods,
}

/// How the API server answers each request of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Accepted,
    /// The editor has no such right.
    Forbidden,
    /// A policy of admission refuses, and names this.
    Refused(&'static str),
    /// The object is not valid: the message contains this.
    Invalid(&'static str),
}

/// Where an accepted attempt shows, which also proves that it was evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// It leads to nothing that waits for an evaluation.
    Nowhere,
    /// Its pods run.
    Running,
    /// The agent refuses its pods, and names this.
    Unattached(&'static str),
    /// A network reports that its addresses are used up.
    Full(Network),
    /// Both nodes list Services of the namespace with a problem that contains this, which may be nothing.
    Listed(&'static str),
    /// An event of the namespace with this reason.
    Event(&'static str),
    /// The nodes report that the policies of the namespace exceed its quota.
    Closed,
}

/// A network that an attempt fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Network {
    /// That of the editor.
    Own,
    /// That of all namespaces.
    Shared,
}

/// What an attempt is aimed at: a victim.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) namespace: String,
    pub(super) network: String,
    /// A backend of its Service: the address, the name and the UID of the pod.
    pub(super) pod: IpAddr,
    pub(super) name: String,
    pub(super) uid: String,
    /// The virtual address of its Service.
    pub(super) service: IpAddr,
}

/// What the attempts of an editor are made of.
#[derive(Debug, Clone)]
pub(super) struct Form {
    pub(super) namespace: String,
    /// Of the editor, from 0 on.
    pub(super) number: usize,
    /// The network that only this namespace may join.
    pub(super) own: String,
    pub(super) node: String,
    /// The address of the pod that the namespace has before any attempt.
    pub(super) probe: IpAddr,
    /// The tenant with its own network, and the one in the default network.
    pub(super) target: [Target; 2],
    /// Addresses of the nodes.
    pub(super) nodes: Vec<String>,
}

/// One row of the table.
pub(super) struct Row {
    pub(super) class: Class,
    /// What is attempted; no two rows have the same name.
    pub(super) name: &'static str,
    pub(super) attempt: fn(&Form) -> Vec<Request>,
    pub(super) answer: Answer,
    pub(super) shown: Shown,
    /// Whether the row is in the short form of the table.
    pub(super) short: bool,
}

impl Row {
    /// A row of an attempt that the API server accepts, and that shows there.
    pub(super) const fn accepted(
        class: Class,
        name: &'static str,
        attempt: fn(&Form) -> Vec<Request>,
        shown: Shown,
    ) -> Self {
        Self {
            class,
            name,
            attempt,
            answer: Answer::Accepted,
            shown,
            short: false,
        }
    }

    /// A row of an attempt that the API server refuses.
    pub(super) const fn refused(
        class: Class,
        name: &'static str,
        attempt: fn(&Form) -> Vec<Request>,
        answer: Answer,
    ) -> Self {
        Self {
            answer,
            ..Self::accepted(class, name, attempt, Shown::Nowhere)
        }
    }

    /// The same row, also in the short form.
    pub(super) const fn in_short(self) -> Self {
        Self { short: true, ..self }
    }
}

impl Answer {
    /// Whether the API server answered like that.
    pub(super) fn is(self, outcome: &Outcome) -> bool {
        let by_admission = outcome.message.contains("denied request");
        match self {
            Self::Accepted => (200..300).contains(&outcome.code),
            Self::Forbidden => outcome.code == 403 && !by_admission,
            Self::Refused(text) => outcome.code == 403 && by_admission && outcome.message.contains(text),
            Self::Invalid(text) => outcome.code == 422 && outcome.message.contains(text),
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accepted => f.write_str("accepted"),
            Self::Forbidden => f.write_str("forbidden by RBAC"),
            Self::Refused(by) => write!(f, "refused by admission: {by}"),
            Self::Invalid(by) => write!(f, "not valid: {by}"),
        }
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nowhere => f.write_str("-"),
            Self::Running => f.write_str("its pods run"),
            Self::Unattached(by) => write!(f, "not attached: {by}"),
            Self::Full(Network::Own) => f.write_str("AddressesAvailable of its network"),
            Self::Full(Network::Shared) => f.write_str("AddressesAvailable of the shared network"),
            Self::Listed("") => f.write_str("listed by both nodes"),
            Self::Listed(problem) => write!(f, "listed by both nodes: {problem}"),
            Self::Event(reason) => write!(f, "event {reason}"),
            Self::Closed => f.write_str("its namespace is closed"),
        }
    }
}
