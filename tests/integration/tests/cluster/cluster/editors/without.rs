//! Lists the defences, each with the rows of the table that are red in a build without it.

use std::{collections::BTreeSet, env};

use anyhow::{Context as _, Result, ensure};

/// The variable with the name of the defence that the programs and the deployment do not have.
const VARIABLE: &str = "KNI_WITHOUT";

/// A defence, by the name of the file in `tests/integration/without` that removes it.
pub(super) struct Without {
    pub(super) name: &'static str,
    rows: &'static [&'static str],
}

const fn of(name: &'static str, rows: &'static [&'static str]) -> Without {
    Without { name, rows }
}

/// Those of the deployment come first: they need no build.
const ALL: &[Without] = &[
    of(
        "admission-of-pods",
        &[
            "the victim's network: kni.dev/network",
            "address of a victim's pod: kni.dev/ips beside a network",
            "network that needs a verb: kni.dev/network",
        ],
    ),
    of(
        "admission-of-attachments",
        &[
            "the victim's network: attachment",
            "address of a victim's pod: attachment",
            "MAC address: attachment",
        ],
    ),
    of("admission-of-services", &["label of the victim's network"]),
    of("rights-of-editors", &["EgressPolicy", "interfaces of its own pods"]),
    of("names-of-interfaces", &["interface of the kernel"]),
    of("names-of-networks", &["network that can be none"]),
    of(
        "taints-of-the-default-network",
        &["own network full", "shared network full"],
    ),
    of("members-of-services", &["endpoint: pod of another network"]),
    of(
        "shares-of-services",
        &["Services with very many ports", "Services with very many endpoints"],
    ),
];

impl Without {
    /// The defence that is absent, if one is.
    pub(super) fn from_environment() -> Result<Option<&'static Self>> {
        let Ok(name) = env::var(VARIABLE) else {
            return Ok(None);
        };
        let found = ALL.iter().find(|without| without.name == name);
        found.map(Some).with_context(|| format!("no defence is named {name}"))
    }

    /// The rows that are red.
    pub(super) fn rows(&self) -> BTreeSet<&'static str> {
        self.rows.iter().copied().collect()
    }
}

/// Whether each defence has rows, which are rows of the table.
pub(super) fn are_rows(names: &BTreeSet<&str>) -> Result<()> {
    for without in ALL {
        let unknown: Vec<_> = without.rows.iter().filter(|row| !names.contains(*row)).collect();
        ensure!(
            unknown.is_empty() && !without.rows.is_empty(),
            "{}: {unknown:?}",
            without.name
        );
    }
    Ok(())
}

#[test]
fn each_defence_has_a_change_and_each_change_a_defence() -> Result<()> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/without");
    let mut changes = BTreeSet::new();
    for entry in std::fs::read_dir(folder).context(folder)? {
        let name = entry?.file_name();
        let name = name.to_str().and_then(|name| name.strip_suffix(".patch"));
        changes.extend(name.map(str::to_owned));
    }
    let named: BTreeSet<String> = ALL.iter().map(|without| without.name.to_owned()).collect();
    ensure!(changes == named, "{changes:?}, not {named:?}");
    Ok(())
}
