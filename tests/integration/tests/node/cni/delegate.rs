use anyhow::{Result, ensure};
use kni_integration::{Namespaces, eventually_sync, patience, require};
use serde_json::json;

use super::scene::{Call, Scene};

#[tokio::test(flavor = "multi_thread")]
async fn interfaces_that_a_plugin_delegates_live_beside_the_pods_own() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("delegate").await?;
    let inside = scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let eth0 = Call::new("abc", "web-0");
    // The pod's annotations belong to the plugin that reads them: nothing is attached twice.
    let net1 = eth0.clone().interface("net1").with("network", json!("blue"));
    let net1 = net1.annotated(&json!({"k8s.v1.cni.cncf.io/networks": "blue"}));
    let net2 = eth0.clone().interface("net2").with("network", json!("red"));
    for (first, second) in [(&eth0, &net1), (&net1, &eth0)] {
        scene.add(first)?;
        scene.add(second)?;
        let result = scene.add(&net2)?;
        assert_eq!(result["interfaces"][1]["name"], "net2", "{result}");
        assert!(!result["routes"].to_string().contains("0.0.0.0/0"), "{result}");
        let routes = inside.run("ip", &["route"])?;
        assert!(
            routes.contains("dev eth0") && routes.matches("default").count() == 1,
            "{routes}"
        );
        assert!(
            routes
                .lines()
                .any(|line| line.starts_with("default") && line.contains("eth0")),
            "{routes}"
        );
        // Each is removed separately.
        scene.del(&net1)?;
        assert_eq!(
            (scene.listed("abc").await?.len(), scene.listed("abc:net2").await?.len()),
            (1, 1)
        );
        assert!(inside.run("ip", &["-o", "link", "show", "dev", "eth0"])?.contains("UP"));
        scene.del(&eth0)?;
        scene.del(&net2)?;
        scene.stage.assert_as(&before).await?;
    }
    // The pod's primary interface may belong to another plugin, and this one may have the default routes.
    let only = net1.clone().with("defaultRoute", json!(true));
    let result = scene.add(&only)?;
    assert!(result["routes"].to_string().contains("0.0.0.0/0"), "{result}");
    // Another container is refused.
    scene.call("ADD", &Call::new("intruder", "web-0"))?.error(101);
    scene
        .call("ADD", &Call::new("intruder", "web-0").interface("net5"))?
        .error(101);
    scene.del(&only)?;
    scene.stage.assert_as(&before).await
}

/// The rules by source address of both families, each with its table.
fn rules(inside: &Namespaces) -> Result<Vec<String>> {
    let mut rules = Vec::new();
    for family in ["-4", "-6"] {
        let shown = inside.run("ip", &[family, "rule"])?;
        let ours = shown.lines().filter(|line| line.starts_with("32765:"));
        rules.extend(ours.map(str::to_owned));
    }
    Ok(rules)
}

/// Waits until the tables of interfaces have so many routes: devices go in the background, and their routes with them.
fn wait_for_routes(inside: &Namespaces, count: usize) -> Result<()> {
    eventually_sync(patience(), || {
        let mut routes = Vec::new();
        for family in ["-4", "-6"] {
            let shown = inside.run("ip", &[family, "route", "show", "table", "all"])?;
            routes.extend(
                shown
                    .lines()
                    .filter(|line| line.contains("19278000"))
                    .map(str::to_owned),
            );
        }
        ensure!(routes.len() == count, "{routes:?}");
        Ok(())
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_by_source_address_come_with_the_second_interface_and_go_with_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    let mut scene = Scene::new("by-source").await?;
    let inside = scene.netns("web-0")?;
    let eth0 = Call::new("abc", "web-0");
    let net1 = eth0.clone().interface("net1").with("network", json!("blue"));
    let net2 = eth0.clone().interface("net2").with("network", json!("red"));
    for _again in 0..2 {
        scene.add(&eth0)?;
        assert_eq!(rules(&inside)?, Vec::<String>::new(), "one interface");
        scene.add(&net1)?;
        let of_two = rules(&inside)?;
        assert_eq!(of_two.len(), 4, "two addresses of two interfaces: {of_two:?}");
        wait_for_routes(&inside, 4)?;
        scene.add(&net2)?;
        assert_eq!(rules(&inside)?.len(), 6);
        // A new agent knows them.
        scene.stage.agent.kill9()?;
        scene.stage.agent.restart()?;
        scene.del(&net2)?;
        assert_eq!(rules(&inside)?, of_two);
        wait_for_routes(&inside, 4)?;
        scene.del(&net1)?;
        assert_eq!(rules(&inside)?, Vec::<String>::new(), "one interface is left");
        wait_for_routes(&inside, 0)?;
        scene.del(&eth0)?;
    }
    // The cleanup of the node leaves none in a namespace that belongs to the runtime.
    scene.add(&eth0)?;
    scene.add(&net1)?;
    assert_eq!(rules(&inside)?.len(), 4);
    scene.stage.agent.terminate()?;
    let cleaned = scene.stage.agent.cleanup()?;
    ensure!(cleaned.status.success(), "{}", String::from_utf8_lossy(&cleaned.stderr));
    assert_eq!(rules(&inside)?, Vec::<String>::new(), "after the cleanup");
    Ok(())
}
