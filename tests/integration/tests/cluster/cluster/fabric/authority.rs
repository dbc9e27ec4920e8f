//! Tests that the token of a node gains no packet on another node: not by labels, foreign pods, blocks or addresses of
//! nodes.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use kni_api::{AddressBlock, NetworkMembers, NodeEndpoint, network_members::NetworkMember};
use kni_integration::{
    cluster::{connect, objects, patience, token, wire::OVERLAY_PORT},
    frames::{Ip, Link, PacketSocket, Payload, parse_mac},
    require,
    traffic::Servers,
    wait,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    core::ObjectMeta,
};
use serde_json::{Value, json};

use super::{
    super::scene::{PORT, address, ask, assert_reached, assert_silent, identity, patch_metadata, wait_for_silence},
    bed::Bed,
    enemies::numbers,
    forgery::{count, dropped, forged},
};

/// Long enough for what was written to have an effect everywhere.
const EFFECT: Duration = Duration::from_secs(2);
const ATTACKER: &str = "node3";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_token_of_a_node_gains_no_packet_on_another_node() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut bed = Bed::start("fabric-authority", &[], None).await?;
    bed.connected().await?;
    // On node 1, blue accepts its friends only: the pod of node 2 is one.
    let (guarded, friend, own) = (
        bed.pod("blue-team", 1).clone(),
        bed.pod("blue-team", 2).clone(),
        bed.pod("blue-team", 3).clone(),
    );
    patch_metadata(&bed.cluster, &friend, &json!({ "labels": { "friend": "yes" } })).await?;
    let spec = json!({
        "podSelector": {},
        "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "friend": "yes" } } }] }],
    });
    bed.cluster
        .apply(&[objects::policy("blue-team", "friends", &spec)])
        .await?;
    wait_for_silence(&own, &guarded).await?;
    wait::until("the friend is known", patience(), async || {
        Ok(ask(&friend, &guarded) == vec![Ok(identity(&guarded)), Ok(identity(&guarded))])
    })
    .await?;

    // The agent of node 3 writes nothing itself any more; the test does, with its token.
    bed.cluster.nodes[2].agent.kill9()?;
    let token = token(&bed.cluster.client, "kni-agent", Some(ATTACKER)).await?;
    let client = connect(
        bed.cluster.fabric.inside(),
        &bed.cluster.control.token_kubeconfig(&token),
    )
    .await?;
    foreign_objects(&bed, &client).await?;
    let slice = members(&bed, &client, [&friend.uid, &own.uid]).await?;
    assert_silent(&own, &guarded);
    frames_as_the_friend(&bed, "members with the friend's UID and address").await?;
    slice.restore(&client).await?;
    blocks(&bed, &client).await?;
    frames_as_the_friend(&bed, "blocks over the friend's address").await?;
    endpoints(&bed, &client).await?;
    frames_as_the_friend(&bed, "the address of the friend's node").await?;
    assert_silent(&own, &guarded);
    assert_reached(&friend, &guarded);
    Ok(())
}

fn is_refused<T: std::fmt::Debug>(what: &str, result: kube::Result<T>) -> Result<()> {
    match result {
        Err(kube::Error::Api(refusal)) if [403, 409, 422].contains(&refusal.code) => {
            println!("{what}: {}", refusal.message);
            Ok(())
        }
        other => bail!("{what}: {other:?}"),
    }
}

/// What other nodes have written, and what only kni-controller writes.
async fn foreign_objects(bed: &Bed, client: &Client) -> Result<()> {
    let admin = &bed.cluster.client;
    let (patch, delete) = (PatchParams::default(), DeleteParams::default());
    let forged = Patch::Merge(json!({ "spec": { "addresses": ["198.51.100.13"] } }));
    let endpoints: Api<NodeEndpoint> = Api::all(client.clone());
    is_refused("NodeEndpoint of node2", endpoints.patch("node2", &patch, &forged).await)?;
    let blocks: Api<AddressBlock> = Api::all(admin.clone());
    let theirs = blocks.list(&ListParams::default()).await?.items;
    let theirs = theirs
        .iter()
        .find(|block| block.spec.node_name == "node2")
        .context("a block")?;
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    is_refused("block of node2", blocks.delete(&theirs.name_any(), &delete).await)?;
    let slices: Api<NetworkMembers> = Api::all(admin.clone());
    let all = slices.list(&ListParams::default()).await?.items;
    let of = |node: &str| {
        let found = all
            .iter()
            .find(|slice| slice.spec.node_name == node && slice.spec.network == "blue");
        found.map(ResourceExt::name_any).context("members")
    };
    let slices: Api<NetworkMembers> = Api::all(client.clone());
    is_refused("members of node2", slices.delete(&of("node2")?, &delete).await)?;
    let labels = Patch::Merge(json!({ "status": { "kinds": [{ "labels": { "friend": "yes" }, "ports": [] }] } }));
    is_refused(
        "labels of members",
        slices.patch_status(&of(ATTACKER)?, &patch, &labels).await,
    )
}

/// The node's own members, as they were.
struct Slice(NetworkMembers);

impl Slice {
    async fn restore(&self, client: &Client) -> Result<()> {
        write_members(client, &self.0, &self.0.spec.members).await
    }
}

async fn write_members(client: &Client, slice: &NetworkMembers, members: &[NetworkMember]) -> Result<()> {
    let api: Api<NetworkMembers> = Api::all(client.clone());
    let patch = Patch::Merge(json!({ "spec": { "members": members } }));
    api.patch(&slice.name_any(), &PatchParams::default(), &patch).await?;
    Ok(())
}

/// The node reports the friend as its own pod, and its own pod with the friend's address. Neither is confirmed.
async fn members(bed: &Bed, client: &Client, [friend, own]: [&str; 2]) -> Result<Slice> {
    let api: Api<NetworkMembers> = Api::all(bed.cluster.client.clone());
    let all = api.list(&ListParams::default()).await?.items;
    let find = |node: &str| {
        let found = all
            .iter()
            .find(|slice| slice.spec.node_name == node && slice.spec.network == "blue");
        found.cloned().context("members")
    };
    let (slice, theirs) = (find(ATTACKER)?, find("node2")?);
    let member = |slice: &NetworkMembers, uid: &str| {
        let found = slice.spec.members.iter().find(|member| member.pod_uid == uid);
        found.cloned().context("a member")
    };
    let (friend, own) = (member(&theirs, friend)?, member(&slice, own)?);
    // The friend at the node's own address, and the own pod at the friend's.
    let claims = [
        NetworkMember {
            addresses: own.addresses.clone(),
            ..friend.clone()
        },
        NetworkMember {
            addresses: friend.addresses.clone(),
            ..own.clone()
        },
    ];
    for claim in claims {
        write_members(client, &slice, std::slice::from_ref(&claim)).await?;
        let refused = wait::until_some("kni-controller refuses the member", patience(), async || {
            let status = api.get(&slice.name_any()).await?.status.unwrap_or_default();
            let refused = status
                .refused
                .into_iter()
                .find(|refused| refused.pod_uid == claim.pod_uid);
            ensure!(
                status.members.iter().all(|confirmed| confirmed.member != claim),
                "it is confirmed"
            );
            Ok(refused)
        });
        println!("{} at {:?}: {}", claim.pod_name, claim.addresses, refused.await?.reason);
        tokio::time::sleep(EFFECT).await;
        assert_reached(bed.pod("blue-team", 2), bed.pod("blue-team", 1));
    }
    Ok(Slice(slice))
}

/// The token claims the friend's addresses as blocks of its own size, and the block that the friend's node has.
async fn blocks(bed: &Bed, client: &Client) -> Result<()> {
    let admin: Api<AddressBlock> = Api::all(bed.cluster.client.clone());
    let all = admin.list(&ListParams::default()).await?.items;
    let mine = all
        .iter()
        .find(|block| block.spec.node_name == ATTACKER && block.spec.network == "blue")
        .context("a block of the attacker")?;
    let api: Api<AddressBlock> = Api::all(client.clone());
    for v4 in [true, false] {
        let friend = address(bed.pod("blue-team", 2), v4);
        for prefix in if v4 { [32, 26] } else { [128, 122] } {
            let range = ipnet::IpNet::new(friend, prefix)?.trunc();
            let mut block = mine.clone();
            let digits = range.addr().to_string().replace(['.', ':'], "-");
            block.metadata = ObjectMeta {
                name: Some(format!("blue.v{}-{digits}-{prefix}", if v4 { 4 } else { 6 })),
                labels: mine.metadata.labels.clone(),
                finalizers: mine.metadata.finalizers.clone(),
                ..ObjectMeta::default()
            };
            block.spec.cidr = range.to_string();
            is_refused(
                &format!("block {range}"),
                api.create(&PostParams::default(), &block).await,
            )?;
        }
    }
    tokio::time::sleep(EFFECT).await;
    Ok(())
}

/// The token reports the addresses of node 2 as those of its node, over what its agent wrote.
async fn endpoints(bed: &Bed, client: &Client) -> Result<()> {
    let api: Api<NodeEndpoint> = Api::all(client.clone());
    let victim = bed.cluster.nodes[1].node.addresses();
    let patch: Patch<Value> = Patch::Merge(json!({ "spec": { "addresses": victim } }));
    api.patch(ATTACKER, &PatchParams::default(), &patch).await?;
    let refused = wait::until_some("kni-controller refuses the addresses", patience(), async || {
        let status = api.get(ATTACKER).await?.status.unwrap_or_default();
        ensure!(
            status
                .addresses
                .iter()
                .all(|confirmed| !victim.contains(&confirmed.as_str())),
            "{status:?}"
        );
        Ok((status.refused.len() == 2).then(|| status.refused.clone()))
    });
    for refused in refused.await? {
        println!("NodeEndpoint of {ATTACKER}: {refused:?}");
    }
    tokio::time::sleep(EFFECT).await;
    Ok(())
}

/// Sends the friend's packets from the attacker's address, past the programs of its node: none is delivered, each is
/// counted.
async fn frames_as_the_friend(bed: &Bed, what: &str) -> Result<()> {
    let frames = u64::from(count());
    let [.., blue] = numbers(bed).await?;
    let member = &bed.cluster.nodes[0];
    let shown: Value = serde_json::from_str(&member.node.run("ip", &["-j", "link", "show", "uplink0"])?)?;
    let mac = shown[0]["address"]
        .as_str()
        .and_then(parse_mac)
        .context("a MAC address")?;
    let socket = PacketSocket::open(bed.cluster.fabric.inside(), "port11")?;
    for v4 in [true, false] {
        let family = usize::from(!v4);
        let ends: [IpAddr; 2] = [
            bed.cluster.nodes[2].node.addresses()[family].parse()?,
            member.node.addresses()[family].parse()?,
        ];
        let inner = forged(
            blue,
            address(bed.pod("blue-team", 2), v4),
            address(bed.pod("blue-team", 1), v4),
        );
        let frame = Link::new([2, 0, 0, 0, 7, 7], mac).frame(&Ip::new(ends[0], ends[1]).packet(&Payload::udp(
            50_000,
            OVERLAY_PORT,
            &inner,
        )));
        let seen: usize = bed.servers.iter().map(Servers::seen).sum();
        // While the attacker has no confirmed address, it is no node at all, and its packets are refused for the same
        // reason.
        let before = dropped(member, "from_overlay", "foreign_node").await?;
        for _ in 0..frames {
            socket.send(&frame)?;
        }
        wait::until("each forged packet is counted", patience(), async || {
            let now = dropped(member, "from_overlay", "foreign_node").await?;
            ensure!(now - before <= frames, "{}", now - before);
            Ok(now - before == frames)
        })
        .await
        .with_context(|| what.to_owned())?;
        let now: usize = bed.servers.iter().map(Servers::seen).sum();
        ensure!(now == seen, "{what}: {} were delivered", now - seen);
        println!("{what}: {frames} frames to {}:{PORT}, 0 delivered", ends[1]);
    }
    Ok(())
}
