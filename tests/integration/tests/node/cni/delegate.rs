use anyhow::Result;
use kni_integration::require;
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
