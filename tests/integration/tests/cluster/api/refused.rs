//! Tests that invalid objects are refused with a message that contains the correction, and that every rule has such an
//! object.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{api_server::ApiServer, require};
use serde_json::Value;

use super::{
    changes::is_heard,
    invalid::{INVALID, NAMES, NUMBERS},
    scene::{manifest, server},
};

#[test]
fn invalid_objects_are_refused_with_advice() -> Result<()> {
    require!(root, netns, api_server);
    let server = server()?;
    let mut said = String::new();
    let mut wrong = Vec::new();
    for (number, (kind, what, spec, words)) in INVALID.iter().enumerate() {
        let object = manifest(kind, &format!("invalid-{number}"), spec);
        let message = server
            .refusal(&["create", "-f", "-"], &object)
            .with_context(|| format!("{kind}: {what}"))?;
        if !words.iter().all(|word| message.contains(word)) {
            wrong.push(format!("{kind}: {what}: {words:?} are not all in\n{message}"));
        }
        said.push_str(&message);
    }
    for name in NAMES {
        let message = server.refusal(
            &["create", "-f", "-"],
            &manifest("PodNetwork", name, "{subnets: [10.1.0.0/16]}"),
        )?;
        if !(message.contains("metadata.name") || message.contains("1 to 50 of a-z")) {
            wrong.push(format!("PodNetwork named {name}:\n{message}"));
        }
        said.push_str(&message);
    }
    for name in NUMBERS {
        let object = manifest("NetworkNumber", name, "{network: blue, networkUID: u}");
        let message = server.refusal(&["create", "-f", "-"], &object)?;
        if !message.contains("metadata.name is not a number of a network") {
            wrong.push(format!("NetworkNumber {name}:\n{message}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    let unheard = unheard(&server, &said)?;
    ensure!(unheard.is_empty(), "no invalid object breaks these rules: {unheard:#?}");
    println!(
        "{} invalid objects were refused",
        INVALID.len() + NAMES.len() + NUMBERS.len()
    );
    Ok(())
}

/// Messages of rules that are not in `said`, except those about changes.
fn unheard(server: &ApiServer, said: &str) -> Result<Vec<String>> {
    let definitions = server.kubectl_json(&["get", "crd"])?;
    let mut messages = BTreeSet::new();
    collect(&definitions, &mut messages);
    ensure!(messages.len() > 40, "only {} rules were found", messages.len());
    Ok(messages
        .into_iter()
        .filter(|message| !said.contains(message) && !is_heard(message))
        .collect())
}

fn collect(value: &Value, messages: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for rule in fields
                .get("x-kubernetes-validations")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
            {
                messages.extend(rule["message"].as_str().map(str::to_owned));
            }
            fields.values().for_each(|field| collect(field, messages));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, messages)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
