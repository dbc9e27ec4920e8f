//! Tests pods with several interfaces, as the examples have them: each interface answers what arrives at it.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod, Stage, eventually_sync, patience, require,
    stage::address,
    traffic::{Matrix, Probe, Servers, tcp_get, udp_ask},
};
use serde_json::{Value, json};

/// The port of all servers, and that of the Service.
const PORT: u16 = 8080;
const FRONT: u16 = 80;
const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// The rules by source address begin with their priority.
const RULE: &str = "32765:";
/// The first digits of the tables of interfaces.
const TABLE: &str = "19278000";
/// How long one request waits for its answer while a Service is not applied yet.
const ONE_TRY: Duration = Duration::from_millis(500);

/// The example of `deploy` of that name.
macro_rules! example {
    ($path:literal) => {
        include_str!(concat!("../../../../deploy/examples/", $path))
    };
}

/// The networks of the examples; the default one has the range of the examples' Services, too.
fn networks() -> Vec<Manifest> {
    let services = "serviceSubnets: [10.96.0.0/16, \"fd00:96::/112\"]";
    vec![
        Manifest::file("blue.yaml", example!("networks/blue.yaml")),
        Manifest::file("default.yaml", example!("networks/default.yaml")).spec(services),
        Manifest::file("red.yaml", example!("networks/red.yaml")),
    ]
}

/// The annotation of a pod of the examples, on one line or as a block.
fn annotation(pod: &str) -> Result<&str> {
    let (_, rest) = pod.split_once(NETWORKS).context("no such annotation")?;
    let (value, _) = rest.split_once("\nspec:").context("no spec")?;
    let value = value.strip_prefix(':').context("no value")?.trim();
    Ok(value.strip_prefix('|').unwrap_or(value).trim())
}

async fn run(stage: &Stage, name: &str, annotations: &[(&str, &str)]) -> Result<Pod> {
    let pod = stage.kubelet.run_pod("demo", name, annotations).await;
    pod.with_context(|| format!("run pod {name}"))
}

/// A server for each interface of a pod, with the interface's name, at its addresses.
fn serve_each(pod: &Pod) -> Result<Vec<Servers>> {
    let interfaces = pod.interfaces.keys();
    let serve = |ifname: &String| Servers::start_at(&pod.inside, ifname, &pod.ips_of(ifname), PORT);
    interfaces.map(serve).collect()
}

/// Each client asks the addresses of one interface, over TCP, UDP and ping, and no other one answers.
fn assert_answered(pod: &Pod, servers: &[Servers], clients: &[(&Namespaces, &str)]) {
    let mut probes = Vec::new();
    for (from, ifname) in clients {
        probes.extend(pod.ips_of(ifname).into_iter().map(|to| Probe {
            from,
            to,
            expected: Some(ifname),
        }));
    }
    assert_eq!(probes.len(), 2 * clients.len(), "both families");
    let servers: Vec<&Servers> = servers.iter().collect();
    Matrix::run(&probes, &servers, PORT, patience()).assert_expected();
}

/// The rules by source address of both families, and the routes of their tables.
fn by_source(pod: &Pod) -> Result<(Vec<String>, Vec<String>)> {
    let lines = |family: &str, what: &[&str], has: fn(&str) -> bool| -> Result<Vec<String>> {
        let shown = pod.inside.run("ip", &[&[family], what].concat())?;
        Ok(shown.lines().filter(|line| has(line)).map(str::to_owned).collect())
    };
    let (mut rules, mut routes) = (Vec::new(), Vec::new());
    for family in ["-4", "-6"] {
        rules.extend(lines(family, &["rule"], |line| line.starts_with(RULE))?);
        let all = ["route", "show", "table", "all"];
        routes.extend(lines(family, &all, |line| line.contains(TABLE))?);
    }
    Ok((rules, routes))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_at_an_interface_is_answered_by_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut stage = Stage::start("several", networks()).await?;
    let wanted = annotation(example!("pods/extra-networks.yaml"))?;
    let pod = run(&stage, "gateway", &[(NETWORKS, wanted)]).await?;
    let names: Vec<&str> = pod.interfaces.keys().map(String::as_str).collect();
    assert_eq!(names, ["eth0", "net1", "tenant0"]);
    // Both networks begin with the same address, which would belong to both interfaces.
    let (blue, red) = (pod.ips_of("net1"), pod.ips_of("tenant0"));
    assert!(blue.iter().all(|address| !red.contains(address)), "{blue:?}, {red:?}");
    // Clients whose addresses the pod has nowhere: it would send its answers to itself.
    let of = |network, ips| [("kni.dev/network", network), ("kni.dev/ips", ips)];
    let in_blue = run(&stage, "in-blue", &of("blue", "10.10.0.20,fd10::20")).await?;
    let in_red = run(&stage, "in-red", &of("red", "10.10.0.30,fd10::30")).await?;
    let servers = serve_each(&pod)?;
    let node = stage.node.clone();
    let clients = [(&node, "eth0"), (&in_blue.inside, "net1"), (&in_red.inside, "tenant0")];
    assert_answered(&pod, &servers, &clients);
    let (rules, routes) = by_source(&pod)?;
    assert_eq!((rules.len(), routes.len()), (6, 6), "{rules:?}, {routes:?}");

    // Of a pod with one interface there is nothing.
    assert_eq!(by_source(&in_red)?, (vec![], vec![]));
    // The answers do not depend on the agent, and the next one changes nothing.
    stage.agent.kill9()?;
    assert_answered(&pod, &servers, &clients);
    stage.agent.restart()?;
    assert_answered(&pod, &servers, &clients);
    assert_eq!(by_source(&pod)?, (rules, routes));
    // The namespace lives on, the interfaces do not; their devices go in the background.
    stage.kubelet.detach(&pod.id).await?;
    eventually_sync(patience(), || {
        let left = by_source(&pod)?;
        ensure!(left == (vec![], vec![]), "{left:?}");
        Ok(())
    })
}

/// A Service of the default network that leads to one pod, over TCP and UDP; the virtual addresses are those of the
/// examples.
fn service(backend: &Pod) -> Vec<Value> {
    let ports = |port: u16| -> Vec<Value> {
        let port_of = |protocol: &str| json!({"name": protocol.to_lowercase(), "protocol": protocol, "port": port});
        vec![port_of("TCP"), port_of("UDP")]
    };
    let mut objects = vec![json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "demo", "name": "web"},
        "spec": {"clusterIPs": VIRTUAL, "ports": ports(FRONT)},
    })];
    objects.extend([(true, "IPv4"), (false, "IPv6")].map(|(v4, family)| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {
                "namespace": "demo", "name": family.to_lowercase(), "labels": {"kubernetes.io/service-name": "web"},
            },
            "endpoints": [{"addresses": [address(backend, v4)], "conditions": {"ready": true}}],
            "ports": ports(PORT),
        })
    }));
    objects
}

const VIRTUAL: [&str; 2] = ["10.96.0.10", "fd00:96::10"];

/// The pod reaches the Service from its `eth0`, in the default network.
fn assert_served(pod: &Pod) -> Result<()> {
    for to in VIRTUAL {
        let to: IpAddr = to.parse()?;
        let answers = eventually_sync(patience(), || {
            let tcp = tcp_get(&pod.inside, to, FRONT, ONE_TRY).with_context(|| format!("TCP to {to}"))?;
            let udp = udp_ask(&pod.inside, to, FRONT, ONE_TRY).with_context(|| format!("UDP to {to}"))?;
            Ok([tcp, udp])
        })?;
        for answer in answers {
            assert_eq!(answer.identity, "web");
            assert_eq!(answer.client.ip(), address(pod, to.is_ipv4()));
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_and_services_work_where_another_interface_has_the_default_routes() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut stage = Stage::start("default-route", networks()).await?;
    let wanted = annotation(example!("pods/extra-network-json.yaml"))?;
    let pod = run(&stage, "worker", &[(NETWORKS, wanted)]).await?;
    for family in ["-4", "-6"] {
        let default = pod.inside.run("ip", &[family, "route", "show", "default"])?;
        assert!(default.contains("dev data0") && !default.contains("eth0"), "{default}");
    }
    let web = run(&stage, "web", &[]).await?;
    let in_blue = run(&stage, "in-blue", &[("kni.dev/network", "blue")]).await?;
    let backend = Servers::start(&web.inside, "web", PORT)?;
    Manifest::apply(&[Manifest::of("services.yaml", &service(&web))], &stage.node)?;
    let servers = serve_each(&pod)?;
    let node = stage.node.clone();
    // The node as the kubelet's probes; the network of data0 as what the pod has the default routes for.
    let clients = [(&node, "eth0"), (&web.inside, "eth0"), (&in_blue.inside, "data0")];
    assert_answered(&pod, &servers, &clients);
    assert_served(&pod)?;
    stage.agent.kill9()?;
    stage.agent.restart()?;
    assert_answered(&pod, &servers, &clients);
    assert_served(&pod)?;
    ensure!(backend.seen() >= 8, "TCP and UDP of both families, twice");
    Ok(())
}
