//! Reads the audit log of the API server.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::Cluster;

/// The requests up to a point in time.
#[derive(Debug, Clone, Default)]
pub struct Audit {
    requests: Vec<Request>,
}

/// An answered request; a watch is recorded at its start and at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The requesting user; `USER@NODE` for a token that names a node.
    pub user: String,
    /// The token, if it was one: the id that the API server gives it.
    pub credential: String,
    /// Verb and path, such as `patch /api/v1/...`.
    pub what: String,
    /// HTTP status of the answer, 0 for none.
    pub code: u64,
    /// Time of arrival: RFC 3339 in UTC with microseconds, so that the texts sort by time.
    pub received: String,
}

impl Request {
    /// Whether it asks which kinds a group serves, without an object's name: agents do so every ten seconds, whether
    /// pods come or not.
    pub fn is_discovery(&self) -> bool {
        let path = self.what.strip_prefix("get /apis/");
        path.is_some_and(|path| path.split('/').count() <= 2)
    }

    fn of(event: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let node = &event["user"]["extra"]["authentication.kubernetes.io/node-name"][0];
        let user = text(&event["user"]["username"]);
        Self {
            user: node.as_str().map_or(user.clone(), |node| format!("{user}@{node}")),
            credential: text(&event["user"]["extra"]["authentication.kubernetes.io/credential-id"][0]),
            what: format!("{} {}", text(&event["verb"]), text(&event["requestURI"])),
            code: event["responseStatus"]["code"].as_u64().unwrap_or(0),
            received: text(&event["requestReceivedTimestamp"]),
        }
    }
}

impl Cluster {
    /// The requests until now. The API server writes the log before it answers, so no answered request is missing.
    /// Another client's write can be missing although a watch or a read has shown what it wrote.
    pub fn audit(&self) -> Result<Audit> {
        Ok(Audit::parse(&self.control.audit_log()?))
    }
}

impl Audit {
    /// The requests of a log, without a last line that is incomplete.
    pub fn parse(log: &str) -> Self {
        let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        Self {
            requests: events.map(|event| Request::of(&event)).collect(),
        }
    }

    /// The requests of a user.
    pub fn of(&self, user: &str) -> Vec<&Request> {
        self.requests.iter().filter(|request| request.user == user).collect()
    }

    /// All of them, in order.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// How many requests there are.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The requests after an earlier snapshot.
    pub fn since(&self, earlier: &Self) -> Result<Self> {
        let new = self
            .requests
            .get(earlier.len()..)
            .context("the audit log got shorter")?;
        Ok(Self { requests: new.to_vec() })
    }

    /// Requests that RBAC refused.
    pub fn forbidden(&self) -> Vec<&Request> {
        self.requests.iter().filter(|request| request.code == 403).collect()
    }

    /// The number of requests by verb and resource, for messages.
    pub fn summary(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for request in &self.requests {
            let path = request.what.split('?').next().unwrap_or_default();
            *counts.entry(format!("{} {path}", request.user)).or_default() += 1;
        }
        counts
    }
}
