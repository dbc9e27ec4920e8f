use std::time::Duration;

use anyhow::Result;
use kni_integration::{Manifest, require};
use kni_proto::runtime::{CniAttachment, CollectGarbageRequest};
use serde_json::{Value, json};

use super::scene::{Call, Scene};

const PODS: usize = 24;
/// More than a step of `/proc/uptime`.
const CLOCK_STEP: Duration = Duration::from_millis(20);
const KEYS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

fn valid(container: &str, ifname: &str) -> Value {
    json!({"containerID": container, "ifname": ifname})
}

/// The call of a runtime for a network with that name.
fn gc(network: &str) -> Call {
    let call = Call {
        netns: String::new(),
        ifname: String::new(),
        ..Call::new("", "")
    };
    call.with("name", json!(network))
}

/// The clock that the plugin reads.
fn since_boot_ns() -> Result<u64> {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)?;
    Ok(u64::try_from(Duration::from(now).as_nanos())?)
}

#[tokio::test(flavor = "multi_thread")]
async fn b12_garbage_is_what_this_network_has_and_the_runtime_has_not() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("garbage").await?;
    for name in ["a", "b", "theirs"] {
        scene.netns(name)?;
    }
    let before = scene.stage.picture().await?;
    let kubelets = scene.stage.kubelet.run_pod("team", "kubelets", &[]).await?;
    let theirs = Call::new("theirs", "theirs").with("name", json!("other"));
    scene.add(&theirs)?;
    let (a, b) = (Call::new("a", "a"), Call::new("b", "b"));
    let extra = a.clone().interface("net1").with("network", json!("blue"));
    for call in [&a, &b, &extra] {
        scene.add(call)?;
    }
    let alive = || async {
        let mut alive = Vec::new();
        for id in ["a", "a:net1", "b", "theirs", kubelets.id.as_str()] {
            if !scene.listed(id).await?.is_empty() {
                alive.push(id.to_owned());
            }
        }
        Ok::<_, anyhow::Error>(alive)
    };
    let everything = alive().await?;
    assert_eq!(everything.len(), 5);
    // A request without a list of attachments removes nothing.
    scene.call("GC", &gc("kni"))?.assert_silent_success();
    assert_eq!(alive().await?, everything);
    // All keys are compared, including the interface name.
    for (key, keep, gone) in [(KEYS[0], valid("b", "eth0"), "b"), (KEYS[1], valid("a", "eth0"), "a")] {
        let all = json!([valid("a", "eth0"), valid("a", "net1"), valid("b", "eth0")]);
        scene.call("GC", &gc("kni").with(key, all))?.assert_silent_success();
        assert_eq!(alive().await?, everything);
        let rest: Vec<Value> = [valid("a", "eth0"), valid("a", "net1"), valid("b", "eth0")]
            .into_iter()
            .filter(|entry| *entry != keep)
            .collect();
        scene
            .call("GC", &gc("kni").with(key, json!(rest)))?
            .assert_silent_success();
        let now = alive().await?;
        assert!(!now.contains(&gone.to_owned()) && now.len() == 4, "{now:?}");
        scene.add(if gone == "a" { &a } else { &b })?;
    }
    assert_eq!(alive().await?, everything);
    // The plugin reads a clock with steps of 10 ms, rounded down: what was added in the same step stays.
    tokio::time::sleep(CLOCK_STEP).await;
    // Nothing is valid: all attachments of this network are removed, and none of other networks.
    scene
        .call("GC", &gc("kni").with(KEYS[0], json!([])))?
        .assert_silent_success();
    assert_eq!(alive().await?, ["theirs".to_owned(), kubelets.id.clone()]);
    scene
        .call("GC", &gc("other").with(KEYS[0], json!(null)))?
        .assert_silent_success();
    assert_eq!(alive().await?, std::slice::from_ref(&kubelets.id));
    scene.stage.kubelet.kill_pod(kubelets).await?;
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_add_beside_garbage_collection_stays() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("beside").await?;
    for index in 0..PODS {
        scene.netns(&format!("pod{index}"))?;
    }
    let before = scene.stage.picture().await?;
    for index in 0..PODS {
        let name = format!("pod{index}");
        let known = (0..index).map(|index| CniAttachment {
            container_id: format!("pod{index}"),
            ifname: "eth0".into(),
        });
        // The runtime creates its list before the pod is added, and the agent receives it at every moment of the ADD.
        let collect = CollectGarbageRequest {
            cni_network: "kni".into(),
            attachments: known.collect(),
            began_ns: since_boot_ns()?,
        };
        let mut collected = 0;
        let call = Call::new(&name, &name);
        std::thread::scope(|scope| -> Result<()> {
            let adding = scope.spawn(|| scene.call("ADD", &call));
            let runtime = tokio::runtime::Handle::current();
            tokio::task::block_in_place(|| {
                loop {
                    let last = adding.is_finished();
                    let answer = runtime
                        .block_on(scene.stage.kubelet.runtime().collect_garbage(collect.clone()))?
                        .into_inner();
                    assert!(answer.detached.is_empty() && answer.errors.is_empty(), "{answer:?}");
                    collected += 1;
                    if last {
                        return Ok::<_, anyhow::Error>(());
                    }
                }
            })?;
            adding.join().expect("no panic")?.result();
            Ok(())
        })?;
        assert!(collected > 1, "nothing was collected beside the ADD");
        assert_eq!(
            scene.listed(&name).await?.len(),
            1,
            "{name} was added beside a collection and is gone"
        );
    }
    for index in 0..PODS {
        let name = format!("pod{index}");
        scene.del(&Call::new(&name, &name))?;
    }
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b19_after_a_reboot_no_address_stays_leased() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    // The network has as many addresses as there are pods.
    let small = Manifest::default_network("small", &["10.50.0.0/29"]);
    let mut scene = Scene::with("reboot", vec![small]).await?;
    let before = scene.stage.picture().await?;
    let pods: Vec<Call> = (0..5)
        .map(|index| Call::new(&format!("old{index}"), &format!("pod{index}")))
        .collect();
    for (index, call) in pods.iter().enumerate() {
        scene.netns(&format!("pod{index}"))?;
        scene.add(call)?;
    }
    assert_eq!(scene.used("small").await?, 5);
    // The namespaces end with the node, the state of the agent does not.
    scene.stage.agent.kill9()?;
    for index in 0..5 {
        scene.remove_netns(&format!("pod{index}"))?;
    }
    scene.stage.restart().await?;
    // The runtime deletes some of them without a namespace, and has no record of the others.
    for call in &pods[..2] {
        scene.del(&Call {
            netns: String::new(),
            ..call.clone()
        })?;
    }
    scene
        .until("the end of what has no namespace", || async {
            Ok(scene.used("small").await? == 0)
        })
        .await?;
    for index in 0..5 {
        scene.netns(&format!("new{index}"))?;
        scene.add(&Call::new(&format!("new{index}"), &format!("new{index}")))?;
    }
    // Pods with a namespace remain, regardless of the time.
    assert_eq!(scene.used("small").await?, 5);
    for index in 0..5 {
        scene.del(&Call::new(&format!("new{index}"), &format!("new{index}")))?;
        scene.remove_netns(&format!("new{index}"))?;
    }
    scene.stage.assert_as(&before).await
}
