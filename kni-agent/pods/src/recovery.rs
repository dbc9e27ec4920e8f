//! Decides at the start whether objects without a record are removed, or whether their records are rebuilt.
//!
//! Objects with the agent's marks and without a record are leftovers of a killed agent, a few at most. After the loss
//! of the state they are the interfaces of running pods.

mod namespaces;
mod rebuild;

use std::collections::BTreeSet;

use kni_model::{EndpointId, error_chain};
use kni_netlink::OurLink;
use kni_store::Contents;

use self::rebuild::Rebuild;
use crate::{
    error::{AttachError, Subject},
    kernel::Kernel,
};

/// More unrecorded interfaces than this, and than a tenth of all, are never removed without the operator's request.
const FEW_LINKS: usize = 3;
const SMALL_PART: usize = 10;

/// The result of the comparison of records and kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Why the state was lost; `None` if it was not.
    pub lost: Option<String>,
    /// Sandboxes whose records were rebuilt from the kernel.
    pub rebuilt: usize,
    /// Rows of the state that this agent cannot decode, with the reason each.
    pub quarantined: Vec<String>,
    /// Endpoints without a record that are left as they are.
    pub kept: BTreeSet<EndpointId>,
}

impl Recovery {
    /// Whether everything without a record may be removed.
    pub(crate) fn sweeps(&self) -> bool {
        self.lost.is_none() && self.quarantined.is_empty()
    }

    /// What the operator has to know, one sentence each.
    pub fn reports(&self) -> Vec<String> {
        let mut reports: Vec<String> = self.lost.iter().map(|reason| self.report(reason)).collect();
        reports.extend(
            self.quarantined
                .iter()
                .map(|reason| format!("a row of the state is quarantined: {reason}")),
        );
        reports
    }

    fn report(&self, reason: &str) -> String {
        let mut text = format!("StateLost: {reason}; nothing was removed");
        if self.rebuilt > 0 {
            let count = self.rebuilt;
            text = format!("{text}, the records of {count} sandboxes were rebuilt from their interfaces");
        }
        if !self.kept.is_empty() {
            let count = self.kept.len();
            text = format!("{text}, {count} interfaces without a usable record are left as they are");
        }
        text
    }
}

/// Adds the records that can be rebuilt to the contents of the store.
pub(crate) async fn recover(
    kernel: &Kernel,
    netns_dir: &std::path::Path,
    contents: &mut Contents,
    force_sweep: bool,
) -> Result<Recovery, AttachError> {
    let node = Subject::node();
    let links = kernel.teardown.list_our_links().await;
    let links = links.map_err(node.failed("listing interfaces"))?;
    let known = recorded(contents);
    let strays: Vec<OurLink> = links
        .iter()
        .filter(|link| endpoint_of(link).is_none_or(|endpoint| !known.contains(&endpoint)))
        .cloned()
        .collect();
    let mut recovery = Recovery {
        lost: lost(contents, strays.len(), links.len(), force_sweep),
        quarantined: contents.quarantined.iter().map(|held| held.reason.clone()).collect(),
        ..Recovery::default()
    };
    let named: BTreeSet<EndpointId> = contents
        .quarantined
        .iter()
        .flat_map(|held| held.endpoints.clone())
        .collect();
    if recovery.sweeps() {
        return Ok(recovery);
    }
    if let Some(reason) = &recovery.lost {
        tracing::error!(
            reason,
            unrecorded = strays.len(),
            interfaces = links.len(),
            "StateLost: nothing is removed; missing records are rebuilt"
        );
    }
    let rebuilt = Rebuild::new(kernel, netns_dir, contents).await?.all(&strays).await;
    recovery.rebuilt = rebuilt.sandboxes.len();
    for sandbox in &rebuilt.sandboxes {
        tracing::warn!(pod = %sandbox.pod, sandbox = %sandbox.id, "rebuilt the record of a sandbox from its interfaces");
    }
    contents.sandboxes.extend(rebuilt.sandboxes);
    contents.namespaces.extend(rebuilt.namespaces);
    let known = recorded(contents);
    let dataplane = &kernel.dataplane;
    let published = dataplane.published_endpoints();
    let pinned = dataplane.pinned_endpoints();
    let rows = published.and_then(|rows| Ok(rows.into_iter().chain(pinned?).collect::<Vec<_>>()));
    let rows = rows.unwrap_or_else(|error| {
        tracing::error!(
            error = error_chain(&error),
            "cannot read the endpoints of the dataplane"
        );
        Vec::new()
    });
    let unrecorded = strays.iter().filter_map(endpoint_of).chain(rows).chain(named);
    recovery.kept = unrecorded.filter(|endpoint| !known.contains(endpoint)).collect();
    Ok(recovery)
}

/// Why the records cannot be complete.
fn lost(contents: &Contents, strays: usize, links: usize, force_sweep: bool) -> Option<String> {
    if contents.lost.is_some() {
        return contents.lost.clone();
    }
    if strays == 0 || force_sweep {
        return None;
    }
    if contents.incomplete.is_some() {
        return contents.incomplete.clone();
    }
    (strays > FEW_LINKS.max(links / SMALL_PART)).then(|| {
        format!(
            "{strays} of {links} interfaces of pods are in no record; --force-sweep removes them, which takes the network \
             from their pods"
        )
    })
}

/// The endpoint number of a link: its index determines it.
pub(crate) fn endpoint_of(link: &OurLink) -> Option<EndpointId> {
    link.ifindex.checked_sub(kni_common::IFINDEX_BASE).map(EndpointId)
}

fn recorded(contents: &Contents) -> BTreeSet<EndpointId> {
    let attached = contents.sandboxes.iter().flat_map(|sandbox| &sandbox.attachments);
    let prewarmed = contents.namespaces.iter().filter_map(|record| record.warm.as_ref());
    attached
        .map(|attachment| attachment.endpoint)
        .chain(prewarmed.map(|warm| warm.endpoint))
        .chain(contents.removals.iter().map(|removal| removal.endpoint))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_unrecorded_links_are_leftovers_and_many_are_a_lost_state() {
        let whole = Contents::default();
        for (strays, links, is_lost) in [
            (0, 0, false),
            (3, 3, false),
            (4, 4, true),
            (4, 40, false),
            (5, 40, true),
        ] {
            let reason = lost(&whole, strays, links, false);
            assert_eq!(reason.is_some(), is_lost, "{strays} of {links}");
            assert!(reason.is_none_or(|reason| reason.contains("--force-sweep")));
            assert_eq!(lost(&whole, strays, links, true), None);
        }
        let incomplete = Contents {
            incomplete: Some("the file is missing".to_owned()),
            ..Contents::default()
        };
        assert_eq!(lost(&incomplete, 0, 0, false), None, "a node that never had an agent");
        assert!(lost(&incomplete, 1, 50, false).unwrap().contains("missing"));
        assert_eq!(lost(&incomplete, 1, 50, true), None);
        let copied = Contents {
            lost: Some("older".to_owned()),
            ..Contents::default()
        };
        assert_eq!(lost(&copied, 0, 0, true).unwrap(), "older");
    }
}
