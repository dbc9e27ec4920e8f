//! `knictl maps`: lists the pinned BPF maps.

use kni_proto::runtime::{ListMapsRequest, Map};

use crate::{
    cli::OutputArgs,
    client::{Runtime, answer},
    commands::{List, Outcome},
    error::Error,
    table::Column,
    terminal::Terminal,
};

const COLUMNS: &[Column<Map>] = &[
    Column::new("NAME", |m| m.name.clone()),
    Column::new("ID", |m| m.id.to_string()),
    Column::new("KIND", |m| m.kind.clone()),
    Column::new("KEY", |m| format!("{}B", m.key_size)),
    Column::new("VALUE", |m| format!("{}B", m.value_size)),
    Column::new("ENTRIES/MAX", |m| format!("{}/{}", m.entries, m.max_entries)),
    Column::new("PURPOSE", |m| m.purpose.clone()),
    Column::wide("PIN", |m| m.pin.clone()),
];

/// Shows the maps.
pub(crate) async fn run(args: &OutputArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let document = answer("ListMaps", agent.list_maps(ListMapsRequest {})).await?;
    List {
        document: &document,
        rows: &document.maps,
        columns: COLUMNS,
        noun: "maps",
    }
    .show(args.format, terminal)
}
