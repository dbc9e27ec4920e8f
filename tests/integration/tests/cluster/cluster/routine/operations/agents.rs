//! Stops, kills and replaces agents.

use anyhow::{Result, ensure};
use kni_integration::{
    agent::agent_binary,
    cluster::{objects, patience},
    wait,
};

use super::{
    super::{
        super::scene::leased,
        bed::{Bed, NETWORK, TEAM},
    },
    AWAY,
};

/// The agents of node1 and node2, between which the traffic is, one after the other.
pub(super) fn restarted(bed: &mut Bed) -> Result<()> {
    for member in &mut bed.cluster.nodes[..2] {
        let status = member.agent.terminate()?;
        ensure!(status.success(), "{status}");
        member.agent.restart()?;
    }
    Ok(())
}

/// Both at once, for a while.
pub(super) async fn killed(bed: &mut Bed) -> Result<()> {
    for member in &mut bed.cluster.nodes[..2] {
        member.agent.kill9()?;
    }
    tokio::time::sleep(AWAY).await;
    for member in &mut bed.cluster.nodes[..2] {
        member.agent.restart()?;
    }
    Ok(())
}

/// Another program on every node, one node after the other, as by a rolling update.
pub(super) fn rolled(bed: &mut Bed) -> Result<()> {
    let program = bed.folder.path().join("kni-agent-next");
    std::fs::copy(agent_binary()?, &program)?;
    for member in &mut bed.cluster.nodes {
        member.agent.terminate()?;
        member.agent.replace(&program)?;
    }
    Ok(())
}

/// A pod ends while the agent of its node is away: its kubelet asks in vain until the agent is back.
pub(super) async fn away_while_a_pod_ends(bed: &mut Bed) -> Result<()> {
    let before = leased(&bed.cluster.nodes[1], NETWORK).await?;
    bed.cluster.run(&[objects::pod(TEAM, "brief", "node2")]).await?;
    bed.cluster.nodes[1].agent.kill9()?;
    let ended = bed.cluster.nodes[1].kubelet.refusals().len();
    let (cluster, node) = (&bed.cluster, &bed.cluster.nodes[1]);
    let gone = cluster.remove(TEAM, &["brief"]);
    let refused = wait::until("the kubelet asks in vain", patience(), async || {
        let refusals = node.kubelet.refusals();
        Ok(refusals[ended..]
            .iter()
            .any(|refusal| refusal.call == "DetachInterface"))
    });
    let (delete, refused) = (tokio::time::timeout(AWAY, gone), refused);
    let (delete, refused) = futures::join!(delete, refused);
    refused?;
    ensure!(delete.is_err(), "the kubelet ends the pod without its network runtime");
    bed.cluster.nodes[1].agent.restart()?;
    bed.cluster.remove(TEAM, &["brief"]).await?;
    let node = &bed.cluster.nodes[1];
    wait::until("its addresses are given back", patience(), async || {
        Ok(leased(node, NETWORK).await? == before)
    })
    .await
    .map(drop)
}
