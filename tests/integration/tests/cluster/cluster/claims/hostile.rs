//! Claims of clients that do not keep to the rules, with the tokens of agents and the policies of the deployment.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, stream};
use ipnet::IpNet;
use kni_api::{AddressBlock, AddressBlockSpec};
use kni_claims::{NetworkRef, address_block, range_of};
use kni_integration::{
    Cluster,
    cluster::{deployed, patience},
    long, wait,
};
use kni_ipam::blocks::{Prefixes, is_unit};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::{clients::agent_of, network, node};

const SUBNETS: [&str; 3] = ["10.50.0.0/22", "10.60.0.0/24", "fd50::/116"];
const PREFIXES: Prefixes = Prefixes {
    ipv4: Some(28),
    ipv6: None,
};
const NODES: usize = 8;
const AT_ONCE: usize = 32;

/// The accepted claims by name: who acted, and the claim.
type Accepted = BTreeMap<String, (usize, AddressBlockSpec)>;

/// Random claims, of which none that overlaps another one is accepted.
pub(crate) async fn claims(cluster: &Cluster) -> Result<()> {
    let network = network(cluster, "green", &SUBNETS, &json!({ "ipv4": 28 })).await?;
    let other = self::network(cluster, "other", &["10.50.0.0/16"], &json!({ "ipv4": 24 })).await?;
    cluster.apply(&deployed("base/addressblocks.yaml")?).await?;
    let clients: Vec<Client> = (0..NODES).map(|n| agent_of(&cluster.client, &name(n))).collect();
    applied(&clients[0], &network).await?;
    a_table_of_claims(cluster, &network, &clients).await?;

    let count = if long() { 10_000 } else { 500 };
    let attempts = (0..count).map(|_| {
        let acting = fastrand::usize(0..NODES);
        let object = random(&network, &other, acting);
        let api: Api<AddressBlock> = Api::all(clients[acting].clone());
        async move {
            match api.create(&PostParams::default(), &object).await {
                Ok(_) => Ok((acting, "accepted".to_owned(), object)),
                Err(kube::Error::Api(status)) => Ok((acting, reason(&status.message), object)),
                Err(error) => Err(error),
            }
        }
    });
    let done: Vec<_> = stream::iter(attempts).buffer_unordered(AT_ONCE).collect().await;
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut accepted = Accepted::new();
    for outcome in done {
        let (acting, reason, object) = outcome?;
        if reason == "accepted" {
            accepted.insert(object.name_any(), (acting, object.spec));
        }
        *reasons.entry(reason).or_default() += 1;
    }
    println!("{count} random claims: {reasons:#?}");
    ensure!(reasons.len() >= 7, "too few reasons: {reasons:?}");

    none_overlaps(cluster, &network, &accepted).await
}

/// Compares the blocks of the network with each other and with the accepted claims.
async fn none_overlaps(cluster: &Cluster, network: &NetworkRef, accepted: &Accepted) -> Result<()> {
    let listed: Api<AddressBlock> = Api::all(cluster.client.clone());
    let own = ListParams::default().fields("spec.network=green");
    let listed = listed.list(&own).await?.items;
    let subnets: Vec<IpNet> = SUBNETS.iter().map(|subnet| subnet.parse()).collect::<Result<_, _>>()?;
    let mut ranges = Vec::new();
    for object in &listed {
        let spec = &object.spec;
        let range = range_of(object).with_context(|| object.name_any())?;
        ensure!(range.to_string() == spec.cidr, "{spec:?}");
        ensure!(is_unit(&subnets, PREFIXES, &range), "{range} is no unit");
        ensure!(spec.network_uid == network.uid, "{spec:?}");
        if let Some((acting, claimed)) = accepted.get(&object.name_any()) {
            ensure!(
                spec.node_name == name(*acting),
                "{spec:?} was claimed by {}",
                name(*acting)
            );
            ensure!(spec == claimed, "{spec:?} is not what was claimed, {claimed:?}");
        }
        ranges.push(range);
    }
    ranges.sort();
    for pair in ranges.windows(2) {
        ensure!(
            !pair[0].contains(&pair[1]) && !pair[1].contains(&pair[0]),
            "{pair:?} overlap"
        );
    }
    println!("{} blocks, none overlaps another", ranges.len());
    ensure!(ranges.len() >= 20, "too few");
    Ok(())
}

fn name(node: usize) -> String {
    format!("n{node}")
}

/// Waits until the API server applies the policies to the network.
async fn applied(client: &Client, network: &NetworkRef) -> Result<()> {
    let api: Api<AddressBlock> = Api::all(client.clone());
    let trial = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let good = address_block(&node("n0"), network, &"10.50.0.16/28".parse()?);
    let bad = [
        address_block(&node("n0"), network, &"10.50.0.0/26".parse()?),
        address_block(&node("n1"), network, &"10.50.0.16/28".parse()?),
    ];
    wait::until("the policies apply", patience(), async || {
        for object in &bad {
            if api.create(&trial, object).await.is_ok() {
                return Ok(false);
            }
        }
        api.create(&trial, &good).await?;
        Ok(true)
    })
    .await
    .map(drop)
}

/// One claim for each rule.
#[expect(clippy::too_many_lines, reason = "a table")]
async fn a_table_of_claims(cluster: &Cluster, network: &NetworkRef, clients: &[Client]) -> Result<()> {
    let good = || address_block(&node("n0"), network, &"10.50.1.0/28".parse().unwrap());
    let with = |change: &dyn Fn(&mut AddressBlock)| {
        let mut object = good();
        change(&mut object);
        object
    };
    let rows: Vec<(&str, AddressBlock, &str)> = vec![
        (
            "another uid of the network",
            with(&|o| o.spec.network_uid = "x".into()),
            "networkUID is not the uid",
        ),
        (
            "outside",
            with(&|o| set_range(o, "10.51.0.0/28")),
            "is in no subnet of network green",
        ),
        (
            "around a subnet",
            with(&|o| set_range(o, "10.50.0.0/20")),
            "is in no subnet of network green",
        ),
        (
            "larger",
            with(&|o| set_range(o, "10.50.1.0/27")),
            "is no unit of network green",
        ),
        (
            "smaller",
            with(&|o| set_range(o, "10.50.1.0/32")),
            "is no unit of network green",
        ),
        (
            "host bits",
            with(&|o| o.spec.cidr = "10.50.1.1/28".into()),
            "write the first address of the range",
        ),
        (
            "no range",
            with(&|o| o.spec.cidr = "10.50.1.0".into()),
            "write it in CIDR notation",
        ),
        (
            "another text",
            with(&|o| o.spec.cidr = "FD50:0::40/122".into()),
            "as the API server prints it",
        ),
        (
            "another name",
            with(&|o| o.metadata.name = Some("green.v4-10-50-1-16-28".into())),
            "is not that of the range",
        ),
        (
            "another node",
            with(&|o| o.spec.node_name = "n1".into()),
            "cannot change address blocks of node n1",
        ),
    ];
    let api: Api<AddressBlock> = Api::all(clients[0].clone());
    for (what, object, words) in rows {
        let refused = api.create(&PostParams::default(), &object).await.err();
        let refused = refused.with_context(|| format!("{what} is accepted"))?.to_string();
        ensure!(refused.contains(words), "{what}: {refused}");
    }
    api.create(&PostParams::default(), &good())
        .await
        .context("a claim by the rules")?;
    let other: Api<AddressBlock> = Api::all(clients[1].clone());
    let name = good().name_any();
    let refused = other
        .delete(&name, &DeleteParams::default())
        .await
        .err()
        .context("another node deletes it")?;
    ensure!(
        refused.to_string().contains("the agent of node n1 cannot change"),
        "{refused}"
    );
    let all: Api<AddressBlock> = Api::all(cluster.client.clone());
    let patch = Patch::Merge(json!({ "spec": { "nodeName": "n1" } }));
    let refused = all
        .patch(&name, &PatchParams::default(), &patch)
        .await
        .err()
        .context("it is given away")?;
    ensure!(
        refused.to_string().contains("an address block cannot be changed"),
        "{refused}"
    );
    Ok(())
}

fn set_range(object: &mut AddressBlock, cidr: &str) {
    cidr.clone_into(&mut object.spec.cidr);
    object.metadata.name = Some(canonical(&object.spec));
}

/// The name that the definition asks for, also where the range is none.
fn canonical(spec: &AddressBlockSpec) -> String {
    let family = if spec.cidr.contains(':') { 6 } else { 4 };
    format!("{}.v{family}-{}", spec.network, spec.cidr.replace(['.', ':', '/'], "-"))
}

/// A claim that is wrong in some way, or right.
fn random(network: &NetworkRef, other: &NetworkRef, acting: usize) -> AddressBlock {
    let low = fastrand::u32(..);
    let cidr = match fastrand::u8(0..10) {
        0..=3 => format!("10.50.{}.{}/28", low % 4, (low >> 8) % 16 * 16),
        4 => format!("10.60.0.{}/28", low % 16 * 16),
        5 => format!("fd50::{:x}/122", low % 64 * 64),
        6 => IpNet::new([10, 50, 0, 0].into(), 20 + u8::try_from(low % 12).unwrap_or(0))
            .map_or_else(|_| String::new(), |net| net.trunc().to_string()),
        7 => IpNet::new(
            [10, 50, (low >> 8 & 3) as u8, (low & 255) as u8].into(),
            24 + (low >> 16 & 7) as u8,
        )
        .map_or_else(|_| String::new(), |net| net.trunc().to_string()),
        8 => format!("10.50.{}.{}/28", low % 4, (low >> 8) % 256),
        _ => format!("fd50::{:x}/{}", low % 4096, 112 + low % 16),
    };
    let spec = AddressBlockSpec {
        network: network.name.to_string(),
        network_uid: match fastrand::u8(0..12) {
            0 => other.uid.clone(),
            1 => "wrong".to_owned(),
            _ => network.uid.clone(),
        },
        cidr,
        node_name: name(if fastrand::u8(0..8) == 0 {
            (acting + 1) % NODES
        } else {
            acting
        }),
        node_uid: format!("uid-of-{}", name(acting)),
    };
    let mut object = AddressBlock::new(&canonical(&spec), spec);
    if fastrand::u8(0..10) == 0 {
        object.metadata.name = Some(format!("green.v4-10-50-{}-{}-28", low % 4, (low >> 8) % 16 * 16));
    }
    object
}

/// The rule that refuses a claim.
fn reason(message: &str) -> String {
    let known = [
        "already exists",
        "networkUID is not the uid",
        "is in no subnet",
        "is no unit",
        "write the first address",
        "as the API server prints it",
        "is not that of the range",
        "cannot change address blocks of node",
    ];
    let found = known.iter().find(|words| message.contains(*words));
    found.map_or_else(|| message.to_owned(), |words| (*words).to_owned())
}
