//! Tests that the node reaches its pods under every policy; policies apply to packets that it only forwards.

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    patience, require,
    traffic::{NoAnswer, Servers, tcp_get, udp_ask},
    world::{NinePods, index_of},
};

use super::{PATIENCE, PORT, at, enforce};

const DENY_ALL: &str = "{podSelector: {}, policyTypes: [Ingress, Egress]}";
const FROM_FABRIC: &str = "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress], ingress: [{from: [{ipBlock: {cidr: 198.51.100.1/32}}, {ipBlock: {cidr: '2001:db8:100::1/128'}}]}]}";

#[tokio::test(flavor = "multi_thread")]
async fn node_may_always_reach_its_pods() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut world = NinePods::start("node").await?;
    let _server = Servers::start(&world.member(index_of("x/a")).inside, "x/a", PORT)?;
    // The node forwards the same request from the fabric, to which the exception does not apply.
    for (policies, fabric_may) in [
        (&[][..], true),
        (&[("x", DENY_ALL)], false),
        (&[("x", DENY_ALL), ("x", FROM_FABRIC)], true),
        (&[("x", DENY_ALL)], false),
    ] {
        enforce(&mut world, policies).await?;
        for v4 in [true, false] {
            let x = at(&world, "x/a", v4, PORT).ip();
            let told = || format!("IPv4 {v4} under {policies:?}");
            let by_node = tcp_get(&world.stage.node, x, PORT, patience()).with_context(told)?;
            ensure!(by_node.identity == "x/a", "{}", told());
            ensure!(
                udp_ask(&world.stage.node, x, PORT, patience())
                    .with_context(told)?
                    .identity
                    == "x/a"
            );
            let fabric = world.stage.node.fabric();
            for answer in [tcp_get(fabric, x, PORT, PATIENCE), udp_ask(fabric, x, PORT, PATIENCE)] {
                match answer {
                    Ok(answer) => ensure!(
                        fabric_may && answer.identity == "x/a",
                        "the fabric reaches it, {}",
                        told()
                    ),
                    Err(why) => ensure!(!fabric_may && why == NoAnswer::Timeout, "the fabric: {why}, {}", told()),
                }
            }
        }
    }
    Ok(())
}
