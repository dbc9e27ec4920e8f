//! `knictl networks`: lists the node's networks and the refused manifests.

use kni_proto::runtime::{ListNetworksRequest, ListNetworksResponse, NetworkStatus};

use crate::{
    cli::{Format, OutputArgs},
    client::{Runtime, answer},
    commands::{List, Outcome},
    error::Error,
    human,
    table::Column,
    terminal::Terminal,
};

const COLUMNS: &[Column<NetworkStatus>] = &[
    Column::new("NAME", |n| n.name.clone()),
    Column::new("ID", |n| n.id.to_string()),
    Column::new("DEFAULT", |n| n.default.to_string()),
    Column::new("READY", |n| n.ready.to_string()),
    Column::new("SUBNETS", |n| n.subnets.join(",")),
    Column::new("MTU", |n| n.mtu.to_string()),
    Column::new("ATTACHMENTS", |n| n.attachments.to_string()),
    Column::new("USED/TOTAL", |n| {
        format!(
            "{}/{}",
            human::amount(&n.used_addresses),
            human::amount(&n.total_addresses)
        )
    }),
    Column::new("ORIGIN", |n| n.origin.clone()),
    Column::wide("REASON", |n| n.reason.clone()),
    Column::wide("PROVIDER", |n| n.provider.clone()),
    Column::wide("FEATURES", |n| n.features.join(",")),
    Column::wide("NUMBER", |n| {
        if n.number == 0 {
            "-".to_owned()
        } else {
            n.number.to_string()
        }
    }),
];

/// Shows the networks; beside a table, lists those that are not ready and refused manifests.
pub(crate) async fn run(args: &OutputArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let document = answer("ListNetworks", agent.list_networks(ListNetworksRequest {})).await?;
    let list = List {
        document: &document,
        rows: &document.networks,
        columns: COLUMNS,
        noun: "networks",
    };
    let outcome = list.show(args.format, terminal)?;
    if matches!(args.format, Format::Table | Format::Wide) {
        remark(&document, terminal);
    }
    Ok(outcome)
}

/// Writes to the error stream, so that the output remains a single table for tools that parse it.
fn remark(document: &ListNetworksResponse, terminal: &mut Terminal<'_>) {
    for network in document.networks.iter().filter(|network| !network.ready) {
        terminal.note(&format!("Network {} is not ready: {}", network.name, network.reason));
    }
    for network in document
        .networks
        .iter()
        .filter(|network| !network.number_problem.is_empty())
    {
        terminal.note(&format!(
            "Network {}, number in the cluster: {}",
            network.name, network.number_problem
        ));
    }
    if !document.refused.is_empty() {
        terminal.note("Refused manifests:");
    }
    for refused in &document.refused {
        terminal.note(&format!(
            "  {}:{}: {}: {}",
            refused.file, refused.line, refused.field, refused.reason
        ));
    }
}
