//! Parses the comma list: `[namespace/]network[@interface]`, spaces around items allowed.

use super::{Located, NetworkSelection, SelectionError, namespace};

pub(super) fn parse(annotation: &'static str, value: &str) -> Result<Vec<Located>, SelectionError> {
    value
        .split(',')
        .enumerate()
        .map(|(index, item)| {
            let text = item.trim();
            let selection = parse_item(text)
                .map_err(|(field, reason)| SelectionError::item(annotation, index, text, field, reason))?;
            Ok(Located {
                annotation,
                index,
                text: text.to_owned(),
                selection,
            })
        })
        .collect()
}

fn parse_item(text: &str) -> Result<NetworkSelection, (&'static str, String)> {
    if text.is_empty() {
        return Err(("name", "is empty".to_owned()));
    }
    let (path, ifname) = match text.split_once('@') {
        Some((path, ifname)) => (path, Some(ifname.parse().map_err(|e| ("interface", format!("{e}")))?)),
        None => (text, None),
    };
    let (namespace, name) = match path.split_once('/') {
        Some((ns, name)) => (Some(namespace(ns).map_err(|e| ("namespace", e))?), name),
        None => (None, path),
    };
    Ok(NetworkSelection {
        network: name.parse().map_err(|e| ("name", format!("{e}")))?,
        namespace,
        definition: None,
        ifname,
        ips: Vec::new(),
        mac: None,
        default_route: false,
    })
}
