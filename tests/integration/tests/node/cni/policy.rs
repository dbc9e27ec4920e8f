use std::{net::UdpSocket, time::Duration};

use anyhow::{Context as _, Result};
use kni_integration::{Manifest, require, traffic};
use serde_json::json;

use super::scene::{Call, Scene};

/// Pods with `app=shut` receive nothing.
fn shut() -> Manifest {
    let text = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n  name: shut\n  namespace: team\nspec:\n  podSelector:\n    matchLabels:\n      app: shut\n  policyTypes: [Ingress]\n";
    Manifest::file("shut.yaml", text)
}

#[tokio::test(flavor = "multi_thread")]
async fn b20_policy_is_in_force_before_add_returns() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut manifests = Manifest::overlapping();
    manifests.push(shut());
    let scene = Scene::with("policy", manifests).await?;
    let client = scene.netns("client")?;
    scene.add(&Call::new("client", "client"))?;
    for round in 0..6 {
        for (labels, open) in [("app=shut", false), ("app=open,tier=front", true)] {
            let name = format!("server{round}-{}", u8::from(open));
            let inside = scene.netns(&name)?;
            let servers = traffic::Servers::start(&inside, &name, 8080)?;
            let result = scene.add(&Call::new(&name, &name).annotated(&json!({"kni.dev/labels": labels})))?;
            // The first packets are sent immediately.
            let address = result["ips"][0]["address"]
                .as_str()
                .and_then(|cidr| cidr.split('/').next())
                .context("no address")?;
            let to = format!("{address}:8080");
            client.enter(|| {
                let socket = UdpSocket::bind("0.0.0.0:0")?;
                (0..5).try_for_each(|_| socket.send_to(name.as_bytes(), &to).map(drop))
            })??;
            let patience = if open {
                Duration::from_secs(10)
            } else {
                Duration::from_millis(200)
            };
            assert_eq!(servers.saw_within(&name, patience), open, "{name} with {labels}");
            drop(servers);
            scene.del(&Call::new(&name, &name))?;
        }
    }
    scene.del(&Call::new("client", "client"))?;
    let refused = Call::new("bad", "client").annotated(&json!({"kni.dev/labels": "app=not valid"}));
    let error = scene.call("ADD", &refused)?.error(7);
    assert!(
        error["msg"].as_str().is_some_and(|msg| msg.contains("kni.dev/labels")),
        "{error}"
    );
    Ok(())
}
