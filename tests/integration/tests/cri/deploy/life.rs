//! Tests the whole life of a deployment: deployed, used, upgraded, rolled back, deleted, uninstalled.

use std::{path::Path, time::Instant};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{NodeSnapshot, agent::knictl_binary, eventually_sync, require};
use serde_json::{Value, json};

use super::{
    image,
    scene::{PATIENCE, PORT, Scene, server},
    watch,
};

/// The networks of `deploy/examples`.
const NETWORKS: [&str; 3] = ["default", "blue", "red"];

#[test]
fn the_agent_lives_and_goes_as_a_pod() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let archives = [image::build("one")?, image::build("two")?];
    let mut scene = Scene::start("deploy")?;
    for archive in &archives {
        scene.import(archive)?;
    }
    let before = scene.machine.at_rest()?;
    let start = Instant::now();
    let said = |what: &str| println!("{:>6.1} s  {what}", start.elapsed().as_secs_f32());

    deploy(&mut scene)?;
    said("deployed: the agent's pod and the node are ready");
    use_it(&mut scene)?;
    said("used: pods and services answer, networks are apart");
    ask_as_operator(&scene)?;
    watch::start(&scene, "web")?;
    watch::nothing_lost(&mut scene, "before the upgrade")?;
    said("watched: TCP and UDP, both families");

    replace(&mut scene, "two")?;
    said("upgraded to another image");
    replace(&mut scene, "one")?;
    said("rolled back");
    delete_agents(&mut scene)?;
    said("agents deleted; the pods talk");
    println!("{}", watch::report(&scene)?);
    uninstall(&mut scene, &before)?;
    said("uninstalled");
    Ok(())
}

fn deploy(scene: &mut Scene) -> Result<()> {
    let kustomization = scene.kustomize("", "one")?;
    scene.apply_folder(&kustomization)?;
    let examples = image::root().join("deploy/examples/networks");
    let examples = examples.display().to_string();
    // The API server may need a moment until it serves a newly defined kind.
    scene.machine.local.wait("the examples apply", PATIENCE, |node| {
        node.kubectl(&["apply", "--server-side", "-f", &examples])
            .map(|_said| true)
    })?;
    scene.wait_for_agents()?;
    scene.machine.local.wait_ready(true).with_context(|| scene.agents())?;
    // The holder of the Lease reports the condition, which requires the permissions of the agent's role.
    let networks = ["wait", "--for=condition=Ready", "podnetwork", "--all", "--timeout=60s"];
    scene
        .local()
        .kubectl(&networks)
        .map(drop)
        .with_context(|| scene.agents())
}

/// Pods of the default network and of an overlapping pair, and a service of both families.
fn use_it(scene: &mut Scene) -> Result<()> {
    let network = |name: &str| json!({ "kni.dev/network": name });
    scene.create(&[
        server("web", &json!({})),
        server("client", &json!({})),
        server("blue-server", &network("blue")),
        server("blue-client", &network("blue")),
        server("red-client", &network("red")),
        service(),
    ])?;
    for address in scene.addresses("web")? {
        assert_eq!(scene.ask("client", &address.to_string(), PORT)?, "web");
    }
    let ips = ["get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[*]}"];
    for ip in scene.local().kubectl(&ips)?.split(' ') {
        scene.wait_for_answer("client", ip, 80, "web")?;
    }
    // The subnets are the same in both networks.
    for address in scene.addresses("blue-server")? {
        let address = address.to_string();
        assert_eq!(scene.ask("blue-client", &address, PORT)?, "blue-server");
        // In this network the address is unused, or belongs to another pod.
        let other = scene.ask("red-client", &address, PORT);
        ensure!(
            other.as_deref().ok() != Some("blue-server"),
            "a pod of network red reaches {address} of network blue"
        );
    }
    let web = scene.addresses("web")?;
    let stranger = scene.ask("blue-client", &web[0].to_string(), PORT);
    ensure!(
        stranger.is_err(),
        "a pod of network blue reaches {web:?} of the default network"
    );
    Ok(())
}

/// Tests the operators' view, in the cluster and in the agent's pod.
fn ask_as_operator(scene: &Scene) -> Result<()> {
    let wide = scene.local().kubectl(&["get", "pnw,pna,pif,nnw", "-A", "-o", "wide"])?;
    println!("$ kubectl get pnw,pna,pif,nnw -A -o wide\n{wide}");
    let knictl = scene.machine.node.install(&knictl_binary()?)?;
    let networks = scene.plugin(&knictl, &["networks"])?;
    for name in NETWORKS {
        ensure!(networks.contains(name), "kubectl kni networks:\n{networks}");
    }
    let interfaces = scene.plugin(&knictl, &["interfaces", "web", "-o", "json"])?;
    let interfaces: Value = serde_json::from_str(&interfaces)?;
    let found = interfaces["items"].as_array().context("a list")?;
    assert_eq!(found.len(), 1, "{interfaces}");
    let ips = found[0]["status"]["addresses"].as_array().context("addresses")?;
    let ips: Vec<&str> = ips.iter().filter_map(|address| address["ip"].as_str()).collect();
    let addresses: Vec<String> = scene.addresses("web")?.iter().map(ToString::to_string).collect();
    assert_eq!(ips, addresses);
    let report = scene.plugin(&knictl, &["doctor"])?;
    println!("$ kubectl kni doctor\n{report}");
    ensure!(
        report.contains("All networks work")
            && report.contains("The agent attaches pods")
            && report.contains("A replica of kni-controller acts: kni-controller-")
            && report.contains(" 0 failed"),
        "kubectl kni doctor:\n{report}"
    );
    for words in [
        &["status"][..],
        &["--node", "node1", "status"],
        &["services"],
        &["explain", "default/client", "default/web", &format!("tcp/{PORT}")],
        &["flows", "--pod", "default/client", "-o", "json"],
        &["drops"],
        &["maps"],
    ] {
        let said = scene.plugin(&knictl, words)?;
        println!("$ kubectl kni {}\n{said}", words.join(" "));
    }
    let own = scene.in_agent(&["knictl", "status", "-o", "json"])?;
    let own: Value = serde_json::from_str(&own).with_context(|| own.clone())?;
    assert_eq!(own["ready"], true, "{own}");
    privileges(scene)
}

/// Checks that the agent runs with six capabilities, and is not privileged.
fn privileges(scene: &Scene) -> Result<()> {
    let path = "jsonpath={.items[0].status.containerStatuses[0].containerID}";
    let label = "app.kubernetes.io/name=kni-agent";
    let id = scene
        .local()
        .kubectl(&["-n", "kni-system", "get", "pods", "-l", label, "-o", path])?;
    let id = id.rsplit('/').next().context("a container id")?;
    let tasks = scene.local().ctr(&["tasks", "list"])?;
    let task = tasks.lines().find(|line| line.starts_with(id)).context("a task")?;
    let pid = task.split_whitespace().nth(1).context("a process id")?;
    let status = std::fs::read_to_string(Path::new("/proc").join(pid).join("status"))?;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)).map(str::to_owned)
    };
    // SYS_ADMIN 21, NET_ADMIN 12, NET_RAW 13, SYS_PTRACE 19, PERFMON 38, BPF 39.
    let wanted = [12, 13, 19, 21, 38, 39].iter().fold(0_u64, |mask, bit| mask | 1 << bit);
    let effective = field("CapEff:").context("CapEff")?;
    assert_eq!(u64::from_str_radix(&effective, 16)?, wanted, "CapEff of the agent");
    assert_eq!(field("NoNewPrivs:").as_deref(), Some("1"));
    assert_eq!(field("Seccomp:").as_deref(), Some("2"), "a seccomp filter");
    Ok(())
}

/// Replaces the image; the pods retain their interfaces.
fn replace(scene: &mut Scene, tag: &str) -> Result<()> {
    let kustomization = scene.kustomize("", tag)?;
    scene.apply_folder(&kustomization)?;
    scene.wait_for_agents()?;
    let path = "jsonpath={.items[*].spec.containers[0].image}";
    let label = "app.kubernetes.io/name=kni-agent";
    let images = scene
        .local()
        .kubectl(&["-n", "kni-system", "get", "pods", "-l", label, "-o", path])?;
    assert_eq!(images, format!("{}:{tag}", image::NAME));
    watch::nothing_lost(scene, &format!("with image {tag}"))?;
    // The new agent can attach and detach, too.
    let name = format!("since-{tag}");
    scene.create(&[server(&name, &json!({}))])?;
    for address in scene.addresses(&name)? {
        assert_eq!(scene.ask("client", &address.to_string(), PORT)?, name);
    }
    scene
        .local()
        .kubectl(&["delete", "pod", &name, "--grace-period=1"])
        .map(drop)
}

fn delete_agents(scene: &mut Scene) -> Result<()> {
    let programs = ["daemonset/kni-agent", "deployment/kni-controller", "--timeout=60s"];
    scene
        .local()
        .kubectl(&[&["-n", "kni-system", "delete"], &programs[..]].concat())?;
    let pods = [
        "-n",
        "kni-system",
        "wait",
        "pod",
        "--all",
        "--for=delete",
        "--timeout=60s",
    ];
    scene.local().kubectl(&pods)?;
    watch::nothing_lost(scene, "without an agent")?;
    let web = scene.addresses("web")?;
    assert_eq!(
        scene.ask("client", &web[0].to_string(), PORT)?,
        "web",
        "a new connection"
    );
    Ok(())
}

/// One pod still exists when the node is cleaned up.
fn uninstall(scene: &mut Scene, before: &NodeSnapshot) -> Result<()> {
    // Pods are deleted while an agent is running that removes their interfaces.
    let kustomization = scene.kustomize("", "one")?;
    scene.apply_folder(&kustomization)?;
    scene.wait_for_agents()?;
    let all = ["get", "pods", "-o", "jsonpath={.items[*].metadata.name}"];
    let names = scene.local().kubectl(&all)?;
    let names: Vec<&str> = names.split(' ').filter(|name| *name != "web").collect();
    let delete = ["delete", "pod", "--grace-period=1", "--timeout=60s"];
    scene.local().kubectl(&[&delete[..], &names].concat())?;
    // kube-proxy has rules for it.
    scene.local().kubectl(&["delete", "service", "web"])?;

    let kustomization = scene.kustomize("overlays/uninstall", "one")?;
    scene.apply_folder(&kustomization)?;
    let job = [
        "-n",
        "kni-system",
        "wait",
        "--for=condition=Complete",
        "job/kni-uninstall",
        "--timeout=120s",
    ];
    scene.local().kubectl(&job).with_context(|| scene.agents())?;
    nothing_in_objects(scene)?;
    scene.delete_folder(&kustomization)?;

    let kinds = scene
        .local()
        .kubectl(&["get", "customresourcedefinitions,clusterroles,namespaces", "-o", "name"])?;
    let left: Vec<&str> = kinds.lines().filter(|line| line.contains("kni")).collect();
    assert!(left.is_empty(), "left in the cluster: {left:?}");
    nothing_on_node(scene, before)
}

/// Checks that neither nodes nor pods have labels or annotations of the agent, and that the user's networks can be
/// deleted.
fn nothing_in_objects(scene: &Scene) -> Result<()> {
    for kinds in ["nodes", "pods", "podinterfaces,nodenetworks"] {
        let objects = scene.local().kubectl(&["get", kinds, "-n", "default", "-o", "json"])?;
        let objects: Value = serde_json::from_str(&objects)?;
        for object in objects["items"].as_array().context("a list")? {
            let ours = json!([
                object["metadata"]["finalizers"],
                object["metadata"]["annotations"],
                object["metadata"]["labels"],
                object["spec"]["taints"],
                object["status"]["capacity"],
            ]);
            let text = ours.to_string();
            let bad = text.contains("kni.dev/") || text.contains("network-status");
            assert!(!bad, "{kinds}: {text}");
            assert_ne!(object["apiVersion"], "kni.dev/v1alpha1", "{object}");
        }
    }
    let leases = scene
        .local()
        .kubectl(&["-n", "kni-system", "get", "leases", "-o", "name"])?;
    assert_eq!(leases, "", "leases");
    let path = "jsonpath={.items[*].metadata.finalizers}{.items[*].status}";
    assert_eq!(scene.local().kubectl(&["get", "podnetworks", "-o", path])?, "");
    // No finalizer marks it as in use.
    scene
        .local()
        .kubectl(&["delete", "podnetwork", "blue", "--timeout=30s"])
        .map(drop)
}

fn nothing_on_node(scene: &Scene, before: &NodeSnapshot) -> Result<()> {
    // Lines of the runtime for the remaining pod, and of kube-proxy, which empties its chains before it deletes them.
    let is_ours = |line: &String| !line.contains("/run/netns") && !line.contains(" kube-proxy {");
    eventually_sync(PATIENCE, || {
        let mut left = NodeSnapshot::diff(before, &NodeSnapshot::take(&scene.machine.node)?);
        left.retain(is_ours);
        ensure!(left.is_empty(), "left on the node: {left:#?}");
        Ok(())
    })?;
    let find = ["/var/lib/kni", "/run/kni", "/sys/fs/bpf/kni", "-ls"];
    let listed = scene.machine.node.command("find").args(find).output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.is_empty(), "left on the node:\n{listed}");
    for folder in kni_local_node::LocalNode::cni_folders() {
        let names = scene
            .machine
            .node
            .enter(|| std::fs::read_dir(folder).map(Iterator::count))??;
        assert_eq!(names, 0, "{}", folder.display());
    }
    Ok(())
}

fn service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": {
            "selector": { "app": "web" },
            "ipFamilyPolicy": "RequireDualStack",
            "ports": [{ "port": 80, "targetPort": PORT }],
        },
    })
}
