//! `knictl doctor`: checks the node by the answers of its agent.

use kni_proto::runtime::{
    GetStatusRequest, ListInterfacesRequest, ListMapsRequest, ListNetworksRequest, ProbeTunnelRequest,
    ProbeTunnelResponse,
};
use tonic::Code;

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
    let (tunnel, tunnel_problem) = match tunnel(agent).await {
        Ok(probe) => (probe, None),
        Err(problem) => (ProbeTunnelResponse::default(), Some(problem)),
    };
    let facts = NodeFacts {
        status: answer("GetStatus", agent.get_status(GetStatusRequest {})).await?,
        networks: answer("ListNetworks", agent.list_networks(ListNetworksRequest {})).await?,
        interfaces: answer(
            "ListInterfaces",
            agent.list_interfaces(ListInterfacesRequest::default()),
        )
        .await?,
        maps: answer("ListMaps", agent.list_maps(ListMapsRequest {})).await?,
        tunnel,
        tunnel_problem,
    };
    let checks = checks("this node", &facts);
    show(&Report { checks }, args.format, terminal)
}

/// What other nodes answer. Whatever goes wrong with that concerns one check only.
async fn tunnel(agent: &mut Runtime) -> Result<ProbeTunnelResponse, String> {
    match agent.probe_tunnel(ProbeTunnelRequest {}).await {
        Ok(response) => Ok(response.into_inner()),
        Err(status) if status.code() == Code::Unimplemented => Ok(ProbeTunnelResponse {
            obstacle: "the agent is of an earlier release".to_owned(),
            ..ProbeTunnelResponse::default()
        }),
        Err(status) => Err(format!("other nodes could not be asked: {}", status.message())),
    }
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
