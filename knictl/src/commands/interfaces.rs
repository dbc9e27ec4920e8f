//! `knictl interfaces`: lists every interface of every attached pod.

use kni_proto::runtime::{Counter, Interface, ListInterfacesRequest, Program};

use crate::{
    cli::InterfacesArgs,
    client::{Runtime, answer},
    commands::{List, Outcome},
    error::Error,
    human,
    table::Column,
    terminal::Terminal,
};

const COLUMNS: &[Column<Interface>] = &[
    Column::new("NAMESPACE", |i| i.pod_namespace.clone()),
    Column::new("POD", |i| i.pod_name.clone()),
    Column::new("NETWORK", |i| i.network.clone()),
    Column::new("IFNAME", |i| i.ifname.clone()),
    Column::new("ADDRESSES", |i| {
        i.addresses.iter().map(|a| a.ip.as_str()).collect::<Vec<_>>().join(",")
    }),
    Column::new("HOST-IFNAME", |i| i.host_ifname.clone()),
    Column::new("READY", |i| i.healthy.to_string()),
    Column::wide("KIND", |i| i.kind.clone()),
    Column::wide("IFINDEX", |i| i.ifindex.to_string()),
    Column::wide("HOST-IFINDEX", |i| i.host_ifindex.to_string()),
    Column::wide("MAC", |i| i.mac.clone()),
    Column::wide("MTU", |i| i.mtu.to_string()),
    Column::wide("SANDBOX", |i| i.sandbox_id.clone()),
    Column::wide("NETNS", |i| i.netns_path.clone()),
    Column::wide("PROGRAMS", |i| {
        i.programs.iter().map(program).collect::<Vec<_>>().join(",")
    }),
    Column::wide("FROM-POD", |i| traffic(i.from_pod)),
    Column::wide("TO-POD", |i| traffic(i.to_pod)),
    Column::wide("DROPPED", |i| traffic(i.dropped)),
    Column::wide("POLICY", |i| {
        if i.policy_enforced { "enforced" } else { "not enforced" }.to_owned()
    }),
    Column::wide("PROBLEMS", |i| i.problems.join("; ")),
];

/// Shows the interfaces that the filters select; the agent applies the filters.
pub(crate) async fn run(
    args: InterfacesArgs,
    agent: &mut Runtime,
    terminal: &mut Terminal<'_>,
) -> Result<Outcome, Error> {
    let request = ListInterfacesRequest {
        pod_namespace: args.namespace.unwrap_or_default(),
        pod_name: args.pod.unwrap_or_default(),
        network: args.network.unwrap_or_default(),
        sandbox_id: args.sandbox.unwrap_or_default(),
    };
    let document = answer("ListInterfaces", agent.list_interfaces(request)).await?;
    let list = List {
        document: &document,
        rows: &document.interfaces,
        columns: COLUMNS,
        noun: "interfaces",
    };
    list.show(args.output.format, terminal)
}

fn program(program: &Program) -> String {
    format!("{}:{}@{}", program.name, program.id, program.hook)
}

/// Packets and bytes, `12/1.4KiB`.
fn traffic(counter: Option<Counter>) -> String {
    let counter = counter.unwrap_or_default();
    format!("{}/{}", counter.packets, human::bytes(counter.bytes))
}
