//! Sends single requests to the API server, and shows how it answered.

use std::fmt;

use anyhow::{Result, bail};
use kni_integration::cluster::objects;
use kube::Client;
use serde_json::Value;

/// How an object is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Get,
    Create,
    Update,
    /// A merge patch.
    Patch,
    /// A strategic merge patch, which knows the keys of lists.
    Strategic,
    /// Server-side apply.
    Apply,
    Delete,
}

/// One request.
#[derive(Debug, Clone)]
pub(super) struct Request {
    verb: Verb,
    path: String,
    body: Value,
    /// The user to impersonate.
    as_user: Option<&'static str>,
}

/// The answer.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) code: u16,
    pub(super) message: String,
}

impl Request {
    pub(super) fn new(verb: Verb, path: &str, body: Value) -> Self {
        Self {
            verb,
            path: path.to_owned(),
            body,
            as_user: None,
        }
    }

    /// The creation of an object.
    pub(super) fn create(object: &Value) -> Result<Self> {
        let (resource, namespace, _) = objects::locate(object)?;
        let group = if resource.group.is_empty() { "api" } else { "apis" };
        let within = namespace.map_or_else(String::new, |namespace| format!("/namespaces/{namespace}"));
        let path = format!("/{group}/{}{within}/{}", resource.api_version, resource.plural);
        Ok(Self::new(Verb::Create, &path, object.clone()))
    }

    pub(super) fn impersonating(mut self, user: &'static str) -> Self {
        self.as_user = Some(user);
        self
    }

    /// The path of the object that it creates.
    fn created_at(&self) -> String {
        format!(
            "{}/{}",
            self.path,
            self.body["metadata"]["name"].as_str().unwrap_or_default()
        )
    }

    /// The deletion of the object that it creates, which waits for nothing if it is `at_once`.
    pub(super) fn deletion(&self, at_once: bool) -> Self {
        let grace = if at_once { "?gracePeriodSeconds=0" } else { "" };
        Self::new(Verb::Delete, &format!("{}{grace}", self.created_at()), Value::Null)
    }

    /// A merge patch of the object that it creates.
    pub(super) fn change(&self, body: Value) -> Self {
        Self::new(Verb::Patch, &self.created_at(), body)
    }

    /// The read of the object that it creates.
    pub(super) fn read(&self) -> Self {
        Self::new(Verb::Get, &self.created_at(), Value::Null)
    }

    /// The object that it creates.
    pub(super) fn created(&self) -> Option<&Value> {
        (self.verb == Verb::Create && self.body["metadata"]["name"].is_string()).then_some(&self.body)
    }

    /// Sends it; `dry` runs all checks and changes nothing.
    pub(super) async fn send(&self, client: &Client, dry: bool) -> Result<Outcome> {
        let (method, kind) = match self.verb {
            Verb::Get => ("GET", "application/json"),
            Verb::Create => ("POST", "application/json"),
            Verb::Update => ("PUT", "application/json"),
            Verb::Patch => ("PATCH", "application/merge-patch+json"),
            Verb::Strategic => ("PATCH", "application/strategic-merge-patch+json"),
            Verb::Apply => ("PATCH", "application/apply-patch+yaml"),
            Verb::Delete => ("DELETE", "application/json"),
        };
        let mut query = Vec::new();
        if self.verb == Verb::Apply {
            query.push("fieldManager=table&force=true");
        }
        if dry && self.verb != Verb::Get {
            query.push("dryRun=All");
        }
        let mut uri = self.path.clone();
        if !query.is_empty() {
            let mark = if uri.contains('?') { '&' } else { '?' };
            uri = format!("{uri}{mark}{}", query.join("&"));
        }
        let mut request = http::Request::builder()
            .method(method)
            .uri(uri)
            .header("content-type", kind);
        if let Some(user) = self.as_user {
            request = request.header("impersonate-user", user);
        }
        let body = if self.body.is_null() {
            Vec::new()
        } else {
            serde_json::to_vec(&self.body)?
        };
        match client.request::<Value>(request.body(body)?).await {
            Ok(_answer) => Ok(Outcome {
                code: 200,
                message: String::new(),
            }),
            Err(kube::Error::Api(status)) => Ok(Outcome {
                code: status.code,
                message: status.message.clone(),
            }),
            Err(error) => bail!("{self}: {error}"),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.replace("/apis/kni.dev/v1alpha1", "");
        write!(f, "{:?} {path}", self.verb)?;
        if self.verb == Verb::Patch {
            write!(f, " {}", self.body)?;
        }
        if let Some(user) = self.as_user {
            write!(f, " as {user}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The reason of an admission policy is at the end.
        let reason = self.message.rsplit("denied request: ").next().unwrap_or_default();
        let by = match self.code {
            200 => "accepted",
            403 if reason.len() < self.message.len() => "refused by admission",
            403 => "refused by RBAC",
            _ => "answered",
        };
        write!(f, "{by}")?;
        match self.code {
            200 => Ok(()),
            403 if reason == self.message => Ok(()),
            403 => write!(f, " ({reason})"),
            code => write!(f, " {code} ({reason})"),
        }
    }
}
