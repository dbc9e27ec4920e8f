//! Measures the programs in nanoseconds per packet with the kernel's own timer (`BPF_PROG_TEST_RUN`).

mod case;
mod rules;

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aya::TestRunOptions;
use kni_common::{
    IFINDEX_BASE,
    layout::{DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS, DEFAULT_MAX_POLICY_ROWS, DEFAULT_MAX_SERVICES},
};
use kni_dataplane::{Dataplane, DataplaneOptions, EndpointConfig, HookChoice, NodeConfig};
use kni_integration::{Node, programs};
use kni_model::{EndpointId, NetworkId};
use serde_json::{Map, Value, json};
use tokio::runtime;

use self::case::{Case, RECEIVER_MAC, SENDER_MAC, V4, V6, cases};
use crate::{
    Effort,
    bpf::Program,
    cpu::{Cpus, pin},
    report,
    statistics::{least, median},
};

const SENDER: u32 = 5;
const RECEIVER: u32 = 6;

/// Measures all cases and prints the table.
pub(crate) fn measure(cpus: &Cpus, effort: Effort, object: Option<&Path>, json: &mut Map<String, Value>) -> Result<()> {
    let object = object.map_or_else(
        || kni_object::embedded().map_err(Into::into),
        |path| fs::read(path).with_context(|| path.display().to_string()),
    )?;
    let cases = cases()?;
    let node = Node::new("programs")?;
    // The kernel requires the receiving interface of the packet.
    let index = IFINDEX_BASE + SENDER;
    node.ip(&[&format!("link add kni-host index {index} type veth peer name kni-pod")])?;
    let net = node.enter(|| -> Result<Vec<Vec<f64>>> {
        pin(cpus.one)?;
        run(&cases, effort, object, json)
    })??;
    show(&cases, &net, json);
    Ok(())
}

/// The sizes that agents have by default.
pub(crate) fn options(object: Vec<u8>) -> DataplaneOptions {
    DataplaneOptions {
        object,
        root: "/sys/fs/bpf/kni".into(),
        max_endpoints: DEFAULT_MAX_ENDPOINTS,
        max_flows: DEFAULT_MAX_FLOWS,
        max_policy_rows: DEFAULT_MAX_POLICY_ROWS,
        max_services: DEFAULT_MAX_SERVICES,
        hook: HookChoice::Auto,
    }
}

/// Nanoseconds of each case, minus those of the empty program in the same round.
fn run(cases: &[Case], effort: Effort, object: Vec<u8>, json: &mut Map<String, Value>) -> Result<Vec<Vec<f64>>> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let _in_runtime = runtime.enter();
    let (dataplane, _events) = Dataplane::open(&options(object))?;
    // A million first packets exceed the flow limit of one pod.
    dataplane.configure(&NodeConfig {
        flows_per_endpoint: 0,
        ..NodeConfig::default()
    })?;
    publish(&dataplane)?;
    let empty = Program::empty()?;
    let context = context();
    let repeat = if effort.quick { 50_000 } else { 1_000_000 };
    let mut net = vec![Vec::new(); cases.len()];
    let cost = |case: &Case| -> Result<f64> {
        let base = empty.test_run(&case.packet, &context, repeat)?;
        let full = test_run(&dataplane, case, &context, repeat)?;
        Ok((full.as_secs_f64() - base.as_secs_f64()) * 1e9)
    };
    for _ in 0..effort.rounds {
        for (case, net) in cases.iter().zip(&mut net) {
            net.push(cost(case)?);
        }
    }
    let new_flow = cases.first().context("a case that opens a flow")?;
    rules::measure(&dataplane, network()?, new_flow, effort, cost, json)?;
    Ok(net)
}

fn test_run(dataplane: &Dataplane, case: &Case, context: &[u8], repeat: u32) -> Result<Duration> {
    // A single run first: it shows the result for the original packet, and creates its flow.
    for repeat in [1, repeat] {
        let mut options = TestRunOptions::new();
        options.data_in = Some(&case.packet);
        options.ctx_in = Some(context);
        options.repeat = repeat;
        let result = dataplane.test_run(case.program, options)?;
        let (verdict, wanted, title) = (result.return_value, case.verdict, case.title);
        ensure!(
            verdict == wanted,
            "{title}: the program returns {verdict}, not {wanted}"
        );
        if repeat > 1 {
            return Ok(result.duration);
        }
    }
    anyhow::bail!("no repetition")
}

fn network() -> Result<NetworkId> {
    Ok(NetworkId::try_from(7)?)
}

fn publish(dataplane: &Dataplane) -> Result<()> {
    let network = network()?;
    let endpoint = |id: u32, ipv4: &str, ipv6: &str, mac, host_mac| -> Result<EndpointConfig> {
        Ok(EndpointConfig {
            endpoint: EndpointId(id),
            network,
            ipv4: Some(ipv4.parse()?),
            ipv6: Some(ipv6.parse()?),
            mac,
            host_mac,
            host_access: true,
            xdp: false,
            plugin: None,
            shaped: false,
        })
    };
    let routes = programs::routes(&["10.0.0.0/24".parse()?, "fd00::/64".parse()?], true);
    dataplane.set_routes(network, &routes)?;
    programs::publish_unrestricted(dataplane, &endpoint(SENDER, V4[0], V6[0], SENDER_MAC, RECEIVER_MAC)?)?;
    programs::publish_unrestricted(dataplane, &endpoint(RECEIVER, V4[1], V6[1], RECEIVER_MAC, SENDER_MAC)?)
}

/// `struct __sk_buff` of a packet at the sender's interface.
fn context() -> Vec<u8> {
    const SIZE: usize = 192;
    const IFINDEX: usize = 40;
    let mut context = vec![0; SIZE];
    context[IFINDEX..IFINDEX + 4].copy_from_slice(&(IFINDEX_BASE + SENDER).to_ne_bytes());
    context
}

fn show(cases: &[Case], net: &[Vec<f64>], json: &mut Map<String, Value>) {
    let mut rows = Vec::new();
    let mut all = Map::new();
    for (case, net) in cases.iter().zip(net) {
        rows.push(vec![
            format!("{}: {}", case.program, case.title),
            format!("{:.0}", median(net)),
            format!("{:.0}", least(net)),
        ]);
        let values = json!({ "median_ns": median(net), "min_ns": least(net), "rounds_ns": net });
        all.insert(case.key.into(), values);
    }
    report::heading("Nanoseconds per packet in the program, net of an empty program in the same round");
    report::table(&["program and packet", "median", "min"], &rows);
    json.insert("programs".into(), Value::Object(all));
}
