//! `knictl status`: shows the agent's health and its components.

use kni_proto::runtime::{GetStatusRequest, GetStatusResponse, Program, Uplink};

use crate::{
    cli::{Format, OutputArgs},
    client::{Runtime, answer},
    commands::Outcome,
    document,
    error::Error,
    human,
    table::sheet,
    terminal::Terminal,
};

/// Shows the agent's status; [`Outcome::NotReady`] when pods cannot be attached.
pub(crate) async fn run(args: &OutputArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let status = answer("GetStatus", agent.get_status(GetStatusRequest {})).await?;
    let text = match args.format {
        Format::Json => document::json(&status)?,
        Format::Yaml => document::yaml(&status)?,
        Format::Table | Format::Wide => people(&status),
    };
    terminal.text(&text)?;
    Ok(if status.ready { Outcome::Done } else { Outcome::NotReady })
}

fn people(status: &GetStatusResponse) -> String {
    let mut rows = vec![
        ("Ready", vec![status.ready.to_string()]),
        ("Reasons", status.reasons.clone()),
        ("Version", vec![status.version.clone()]),
        ("PID", vec![status.pid.to_string()]),
        ("Uptime", vec![human::duration(status.uptime_seconds)]),
        ("Kernel", vec![status.kernel_release.clone()]),
        ("Hook", vec![status.hook.clone()]),
        ("Map layout", vec![status.layout_version.to_string()]),
        ("Pins", vec![status.pin_path.clone()]),
        ("Sockets", status.sockets.clone()),
        ("Sandboxes", vec![status.sandboxes.to_string()]),
        ("Attachments", vec![status.attachments.to_string()]),
        ("Endpoint capacity", vec![status.endpoints_capacity.to_string()]),
        ("Warm sandboxes", vec![status.warm_sandboxes.to_string()]),
        ("Pending removals", vec![status.pending_removals.to_string()]),
        ("Pending links", vec![status.pending_links.to_string()]),
    ];
    rows.extend(status.uplink.iter().flat_map(uplink));
    sheet(&rows)
}

/// The uplink of the node; empty where there is none.
fn uplink(uplink: &Uplink) -> Vec<(&'static str, Vec<String>)> {
    let program = |program: &Program| format!("{} {}", program.name, program.hook);
    let mut rows = Vec::new();
    if !uplink.ifname.is_empty() {
        rows.extend([
            ("Uplink", vec![uplink.ifname.clone()]),
            ("Uplink sources", uplink.sources.clone()),
            ("Egress addresses", uplink.dedicated.clone()),
            ("Uplink programs", uplink.programs.iter().map(program).collect()),
            ("Host ports", vec![uplink.host_ports.to_string()]),
        ]);
    }
    if !uplink.warning.is_empty() {
        rows.push(("Uplink warning", vec![uplink.warning.clone()]));
    }
    rows
}
