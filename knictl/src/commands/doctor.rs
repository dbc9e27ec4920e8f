//! `knictl doctor`: checks the node by the answers of its agent.

use kni_proto::runtime::{GetStatusRequest, ListInterfacesRequest, ListMapsRequest, ListNetworksRequest};

use crate::{
    cli::{Format, OutputArgs},
    client::{Runtime, answer},
    commands::Outcome,
    doctor::{
        Report,
        node::{NodeFacts, checks},
    },
    error::Error,
    terminal::Terminal,
};

/// Shows what is wrong on the node, and what to do; [`Outcome::NotReady`] when something does not work.
pub(crate) async fn run(args: &OutputArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let facts = NodeFacts {
        status: answer("GetStatus", agent.get_status(GetStatusRequest {})).await?,
        networks: answer("ListNetworks", agent.list_networks(ListNetworksRequest {})).await?,
        interfaces: answer(
            "ListInterfaces",
            agent.list_interfaces(ListInterfacesRequest::default()),
        )
        .await?,
        maps: answer("ListMaps", agent.list_maps(ListMapsRequest {})).await?,
    };
    let checks = checks("this node", &facts);
    show(&Report { checks }, args.format, terminal)
}

/// Writes a report; [`Outcome::NotReady`] if something does not work.
pub(crate) fn show(report: &Report, format: Format, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    terminal.text(&report.text(format)?)?;
    Ok(if report.has_failures() {
        Outcome::NotReady
    } else {
        Outcome::Done
    })
}
