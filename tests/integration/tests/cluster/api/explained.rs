//! Tests that `kubectl explain` describes every field.

use anyhow::{Context as _, Result, ensure};
use kni_integration::require;
use serde_json::Value;

use super::scene::server;

const KINDS: [&str; 11] = [
    "AddressBlock",
    "PodNetwork",
    "PodNetworkAttachment",
    "PodInterface",
    "NodeNetwork",
    "NetworkNumber",
    "NetworkMembers",
    "NodeEndpoint",
    "EgressPolicy",
    "EgressAddressPool",
    "EgressAddressClaim",
];

#[test]
fn every_field_has_a_description() -> Result<()> {
    require!(root, netns, api_server);
    let explained = server()?.explained()?;
    let mut fields = 0;
    let mut silent = Vec::new();
    for kind in KINDS {
        let schema = &explained["components"]["schemas"][format!("dev.kni.v1alpha1.{kind}")];
        ensure!(describes(schema), "{kind}");
        for part in ["spec", "status"]
            .into_iter()
            .filter(|part| schema["properties"].get(part).is_some())
        {
            let at = format!("{kind}.{part}");
            walk(&at, &schema["properties"][part], &mut fields, &mut silent);
        }
    }
    ensure!(silent.is_empty(), "no description: {silent:#?}");
    ensure!(fields > 120, "only {fields} fields were found");
    println!("{fields} fields are described");
    Ok(())
}

fn describes(schema: &Value) -> bool {
    schema["description"].as_str().is_some_and(|text| text.len() >= 8)
}

fn walk(at: &str, schema: &Value, fields: &mut usize, silent: &mut Vec<String>) {
    *fields += 1;
    if !describes(schema) {
        silent.push(at.to_owned());
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        walk(&format!("{at}.{name}"), field, fields, silent);
    }
    for (name, field) in schema["items"]["properties"].as_object().into_iter().flatten() {
        walk(&format!("{at}[].{name}"), field, fields, silent);
    }
}

#[test]
fn kubectl_explains_fields_and_values() -> Result<()> {
    require!(root, netns, api_server);
    let server = server()?;
    for (field, words) in [
        (
            "pnw",
            ["isolated address space", "spec\t<Object> -required-"].as_slice(),
        ),
        ("pnw.spec.subnets", &["Address ranges in CIDR notation"]),
        ("pnw.spec.provider.mode", &["Passthru", "One pod has the parent's link"]),
        (
            "pna.spec.podSelector.matchExpressions",
            &["operator", "enum: In, NotIn, Exists, DoesNotExist"],
        ),
        ("pif.status.addresses", &["IPv4 first"]),
        ("nnw.status.networks", &["capacity", "exhausted"]),
        (
            "egp.spec.rules.to",
            &["except", "Ranges inside it that do not belong to it"],
        ),
    ] {
        let text = server.kubectl(&["explain", field])?;
        for word in words {
            ensure!(text.contains(word), "{field}: {word:?} is not in\n{text}");
        }
    }
    let all = server.kubectl(&["explain", "egp", "--recursive"]).context("explain")?;
    ensure!(all.contains("endPort"), "{all}");
    Ok(())
}
