//! `knictl services`: lists virtual addresses and their backends.

use kni_proto::runtime::{ListServicesRequest, ServicePort};

use crate::{
    cli::OutputArgs,
    client::{Runtime, answer},
    commands::{List, Outcome},
    error::Error,
    packet,
    table::Column,
    terminal::Terminal,
};

const COLUMNS: &[Column<ServicePort>] = &[
    Column::new("SERVICE", |s| s.service.clone()),
    Column::new("NETWORK", |s| s.network.clone()),
    Column::new("ADDRESS", |s| s.address.clone()),
    Column::new("PORT", |s| format!("{}/{}", s.port, s.protocol)),
    Column::new("BACKENDS", |s| {
        let backends = s.backends.iter();
        let sockets = backends.map(|backend| packet::socket(&backend.ip, Some(backend.port)));
        sockets.collect::<Vec<_>>().join(",")
    }),
    Column::wide("AFFINITY", |s| match s.affinity_seconds {
        0 => String::new(),
        seconds => format!("{seconds}s"),
    }),
    Column::new("PROBLEM", |s| s.problem.clone()),
];

/// Shows the services.
pub(crate) async fn run(args: &OutputArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let document = answer("ListServices", agent.list_services(ListServicesRequest {})).await?;
    List {
        document: &document,
        rows: &document.services,
        columns: COLUMNS,
        noun: "services",
    }
    .show(args.format, terminal)
}
