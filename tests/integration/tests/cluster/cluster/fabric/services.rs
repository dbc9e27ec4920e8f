//! Tests Services whose backends are on other nodes, in every network.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{core::v1::Service, events::v1::Event};
use kni_integration::{
    Pod,
    cluster::{objects, patience},
    require,
    traffic::{NoAnswer, new_token, tcp_get, udp_ask},
    wait,
};
use kube::{Api, api::ListParams};
use serde_json::{Value, json};

use super::{
    super::scene::{ANSWER, PORT, address, identity},
    bed::{Bed, NODES, TEAMS, network_of},
};

/// The port of the Services.
const FRONT: u16 = 80;
/// Their names, and whether they are of IPv4.
const FRONTS: [(&str, bool); 2] = [("front4", true), ("front6", false)];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_service_leads_to_backends_on_other_nodes() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let bed = Bed::start("fabric-services", &[], None).await?;
    bed.connected().await?;
    let mut services: Vec<Value> = Vec::new();
    for team in TEAMS {
        for (name, v4) in FRONTS {
            let backend = address(bed.pod(team, 1), v4).to_string();
            services.extend(objects::service(team, name, FRONT, (&backend, PORT), &labels(team)));
        }
    }
    bed.cluster.apply(&services).await?;
    for team in TEAMS {
        for (name, v4) in FRONTS {
            let front = front_of(&bed, team, name).await?;
            let backend = identity(bed.pod(team, 1));
            // From the backend's own node, from other nodes, and from the backend itself.
            for node in 1..=NODES {
                let from = bed.pod(team, node);
                let what = format!("{} asks {team}/{name} at {front}", identity(from));
                wait::until(&what, patience(), async || {
                    let tcp = tcp_get(&from.inside, front, FRONT, ANSWER)?;
                    let udp = udp_ask(&from.inside, front, FRONT, ANSWER)?;
                    ensure!(tcp.identity == backend && udp.identity == backend, "{tcp:?} {udp:?}");
                    ensure!(node == 1 || tcp.client.ip() == address(from, v4), "{tcp:?}");
                    Ok(true)
                })
                .await?;
            }
        }
    }
    for team in TEAMS {
        for v4 in [true, false] {
            let crowd = Crowd { bed: &bed, team, v4 };
            crowd.all_nodes_have_backends().await?;
            crowd.a_client_stays_with_a_backend().await?;
            crowd.queries_are_answered_elsewhere().await?;
        }
    }
    for (name, v4) in FRONTS {
        pods_of_another_network_get_no_connections(&bed, name, v4).await?;
    }
    Ok(())
}

/// A Service of a tenant without the label belongs to the default network, and its endpoint is the tenant's pod on node
/// 2. Clients are refused, and the node of the pod reports it.
async fn pods_of_another_network_get_no_connections(bed: &Bed, name: &str, v4: bool) -> Result<()> {
    let (team, client) = ("red-team", bed.pod("plain", 1));
    let (name, backend) = (format!("unlabelled-{name}"), bed.pod(team, 2));
    let at = address(backend, v4).to_string();
    let [service, mut slice] = objects::service(team, &name, FRONT, (&at, PORT), &json!({}));
    slice["endpoints"] = json!([{
        "addresses": [at], "nodeName": "node2", "conditions": { "ready": true },
        "targetRef": { "kind": "Pod", "namespace": team, "name": backend.name, "uid": backend.uid },
    }]);
    bed.cluster.apply(&[service, slice]).await?;
    let front = front_of(bed, team, &name).await?;
    let what = format!("{} is refused at {front}", identity(client));
    wait::until(&what, patience(), async || {
        let tcp = tcp_get(&client.inside, front, FRONT, ANSWER);
        ensure!(tcp == Err(NoAnswer::Refused), "{tcp:?}");
        Ok(true)
    })
    .await?;
    let events: Api<Event> = Api::namespaced(bed.cluster.client.clone(), team);
    let expected = format!(
        "endpoint {at} (pod {team}/{}) is neither a pod of network default",
        backend.name
    );
    wait::until(&format!("an event about {team}/{name}"), patience(), async || {
        let listed = events.list(&ListParams::default()).await?.items;
        let about = listed
            .iter()
            .filter(|event| event.reason.as_deref() == Some("EndpointNotInNetwork"))
            .filter(|event| event.regarding.as_ref().and_then(|about| about.name.as_ref()) == Some(&name));
        let notes: Vec<&String> = about.filter_map(|event| event.note.as_ref()).collect();
        ensure!(
            notes.len() == 1 && notes[0].starts_with(&expected),
            "{notes:?}, not {expected}"
        );
        Ok(true)
    })
    .await?;
    Ok(())
}

/// The labels of a team's Services: the network that they belong to; without the label the default one.
fn labels(team: &str) -> Value {
    match network_of(team) {
        "default" => json!({}),
        network => json!({ "kni.dev/network": network }),
    }
}

/// The address of a Service.
async fn front_of(bed: &Bed, team: &str, name: &str) -> Result<IpAddr> {
    let api: Api<Service> = Api::namespaced(bed.cluster.client.clone(), team);
    let spec = api.get(name).await?.spec.unwrap_or_default();
    Ok(spec.cluster_ip.context("an address")?.parse()?)
}

/// Services of a team in one family, with several backends.
struct Crowd<'a> {
    bed: &'a Bed,
    team: &'static str,
    v4: bool,
}

/// Requests from which a backend that is used at all does not stay away by chance: 1 of 280 million.
const REQUESTS: usize = 48;
/// The port of queries.
const QUERIES: u16 = 53;

impl Crowd<'_> {
    /// Writes a Service whose backends are the team's pods of these nodes; returns its address.
    async fn apply(&self, name: &str, port: u16, nodes: &[usize], spec: &Value) -> Result<IpAddr> {
        let name = format!("{name}{}", if self.v4 { 4 } else { 6 });
        let address_of = |node: &usize| address(self.bed.pod(self.team, *node), self.v4).to_string();
        let first = address_of(nodes.first().context("a backend")?);
        let [mut service, mut slice] = objects::service(self.team, &name, port, (&first, PORT), &labels(self.team));
        objects::merge(&mut service["spec"], spec);
        let endpoints = nodes
            .iter()
            .map(|node| json!({ "addresses": [address_of(node)], "conditions": { "ready": true } }));
        slice["endpoints"] = endpoints.collect();
        self.bed.cluster.apply(&[service, slice]).await?;
        front_of(self.bed, self.team, &name).await
    }

    fn names(&self, nodes: &[usize]) -> BTreeSet<String> {
        nodes
            .iter()
            .map(|node| identity(self.bed.pod(self.team, *node)))
            .collect()
    }

    /// Waits until exactly these backends answer a pod, over TCP and over UDP.
    async fn answered(&self, from: &Pod, front: SocketAddr, backends: &[usize]) -> Result<()> {
        let expected = self.names(backends);
        let what = format!("{} is answered at {front} by {expected:?}", identity(from));
        wait::until(&what, patience(), async || {
            let (mut tcp, mut udp) = (BTreeSet::new(), BTreeSet::new());
            for _request in 0..REQUESTS {
                tcp.insert(tcp_get(&from.inside, front.ip(), front.port(), ANSWER)?.identity);
                udp.insert(udp_ask(&from.inside, front.ip(), front.port(), ANSWER)?.identity);
            }
            ensure!(tcp == expected && udp == expected, "TCP {tcp:?}, UDP {udp:?}");
            Ok(true)
        })
        .await
        .map(drop)
    }

    /// Every backend gets requests of every node.
    async fn all_nodes_have_backends(&self) -> Result<()> {
        let front = self.apply("many", FRONT, &[1, 2, 3], &json!({})).await?;
        for node in 1..=NODES {
            let from = self.bed.pod(self.team, node);
            self.answered(from, SocketAddr::new(front, FRONT), &[1, 2, 3]).await?;
        }
        Ok(())
    }

    /// With affinity a client stays with a backend of another node, also when another backend is added.
    async fn a_client_stays_with_a_backend(&self) -> Result<()> {
        let spec = json!({ "sessionAffinity": "ClientIP" });
        let front = self.apply("sticky", FRONT, &[2, 3], &spec).await?;
        let from = self.bed.pod(self.team, 1);
        let ask = || -> Result<[String; 2]> {
            let tcp = tcp_get(&from.inside, front, FRONT, ANSWER)?;
            let udp = udp_ask(&from.inside, front, FRONT, ANSWER)?;
            Ok([tcp.identity, udp.identity])
        };
        let chosen = wait::until_some("the Service answers", patience(), async || Ok(Some(ask()?))).await?;
        let elsewhere = self.names(&[2, 3]);
        ensure!(chosen.iter().all(|backend| elsewhere.contains(backend)), "{chosen:?}");
        let stays = |when: &str| -> Result<()> {
            for _request in 0..REQUESTS {
                let found = ask()?;
                ensure!(found == chosen, "{when}: {found:?} instead of {chosen:?} at {front}");
            }
            Ok(())
        };
        stays("two backends")?;
        self.apply("sticky", FRONT, &[1, 2, 3], &spec).await?;
        // A Service that is written later is known: so is the third backend.
        let later = self.apply("later", FRONT, &[1, 2, 3], &json!({})).await?;
        self.answered(from, SocketAddr::new(later, FRONT), &[1, 2, 3]).await?;
        stays("with a third backend")
    }

    /// As a DNS server is asked: over UDP, by sockets that ask once, and by one that asks again.
    async fn queries_are_answered_elsewhere(&self) -> Result<()> {
        let front = SocketAddr::new(self.apply("dns", QUERIES, &[2, 3], &json!({})).await?, QUERIES);
        let from = self.bed.pod(self.team, 1);
        self.answered(from, front, &[2, 3]).await?;
        let any = SocketAddr::new(if self.v4 { [0; 4].into() } else { [0; 16].into() }, 0);
        let socket = from.inside.enter(|| UdpSocket::bind(any))??;
        socket.set_read_timeout(Some(ANSWER))?;
        let mut backends = BTreeSet::new();
        for _query in 0..REQUESTS {
            let token = new_token();
            socket.send_to(token.as_bytes(), front)?;
            let mut buffer = [0; 512];
            let (length, server) = socket.recv_from(&mut buffer).context("an answer")?;
            ensure!(server == front, "the answer comes from {server} instead of {front}");
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            ensure!(text.trim_end().ends_with(&token), "{text} answers {token}");
            backends.extend(text.split(' ').next().map(str::to_owned));
        }
        ensure!(backends.len() == 1, "one flow has one backend: {backends:?}");
        self.apply("dns", QUERIES, &[3], &json!({})).await?;
        self.answered(from, front, &[3]).await
    }
}
