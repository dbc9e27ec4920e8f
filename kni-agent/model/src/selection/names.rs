//! Assigns names to the interfaces that a pod has beside its primary one.

use std::collections::BTreeSet;

use super::{IfName, NetworkSelection, PRIMARY_IFNAME, SelectionError};

pub(super) fn check_explicit(ifname: &IfName) -> Result<(), String> {
    if ifname.as_str() == PRIMARY_IFNAME {
        return Err(format!("{PRIMARY_IFNAME} is the name of the primary interface"));
    }
    Ok(())
}

/// Gives each selection its interface name, in order: the requested one, else `net<i>` where i is its position, counted
/// from one. If another selection requests that very name, the first number after the list is taken instead, so that
/// the names of the others do not shift. The result has one distinct name per selection, none of them
/// [`PRIMARY_IFNAME`].
pub fn assign_interface_names(selections: &[NetworkSelection]) -> Result<Vec<IfName>, SelectionError> {
    let mut taken = BTreeSet::new();
    for (index, selection) in selections.iter().enumerate() {
        if let Some(ifname) = &selection.ifname {
            check_explicit(ifname).map_err(|reason| refuse(index, selection, reason))?;
            if !taken.insert(ifname.clone()) {
                return Err(refuse(
                    index,
                    selection,
                    format!("interface {ifname} is requested twice"),
                ));
            }
        }
    }
    let mut behind = selections.len();
    let mut names = Vec::with_capacity(selections.len());
    for (index, selection) in selections.iter().enumerate() {
        let mut number = index.saturating_add(1);
        let name = loop {
            if let Some(ifname) = &selection.ifname {
                break ifname.clone();
            }
            let name: IfName = format!("net{number}")
                .parse()
                .map_err(|error| refuse(index, selection, format!("{error}")))?;
            if taken.insert(name.clone()) {
                break name;
            }
            behind = behind.saturating_add(1);
            number = behind;
        };
        names.push(name);
    }
    Ok(names)
}

fn refuse(index: usize, selection: &NetworkSelection, reason: String) -> SelectionError {
    SelectionError {
        annotation: None,
        index: Some(index),
        text: selection.network.to_string(),
        field: "interface".to_owned(),
        reason,
    }
}
