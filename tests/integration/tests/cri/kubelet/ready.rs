//! Tests the readiness of the node.

use anyhow::Result;
use kni_integration::{Machine, require};

use super::exhaustion::{a_full_network_evicts_nothing, small_default_network};

#[test]
fn the_node_is_ready_while_the_agent_serves_also_without_a_free_address() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut machine = Machine::with_cluster("kubelet-ready")?;
    // The plugin is installed, but the agent is not running, which the plugin reports.
    machine.install_cni()?;
    machine
        .local
        .wait("the plugin gives the reason", super::scene::PATIENCE, |node| {
            let condition = node.ready_condition()?;
            Ok(condition.starts_with("False KubeletNotReady") && condition.contains("kni.sock"))
        })?;
    let mut agent = machine.start_member()?;
    small_default_network(&mut machine)?;
    machine.local.wait_ready(true)?;
    a_full_network_evicts_nothing(&mut machine)?;
    agent.terminate()?;
    machine.local.wait_ready(false)?;
    agent.restart()?;
    machine.local.wait_ready(true)
}
