use anyhow::Result;
use kni_integration::require;
use serde_json::json;

use super::scene::{Call, Scene};

#[tokio::test(flavor = "multi_thread")]
async fn b01_add_twice_is_an_error_without_a_second_address() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("twice").await?;
    let inside = scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0");
    let first = scene.add(&call)?;
    let shown = inside.run("ip", &["-o", "address"])?;
    let error = scene.call("ADD", &call)?.error(101);
    assert!(
        error["msg"]
            .as_str()
            .is_some_and(|msg| msg.contains("attached already")),
        "{error}"
    );
    assert_eq!(scene.used("default").await?, 2, "one address of each family");
    assert_eq!(inside.run("ip", &["-o", "address"])?, shown, "the pod was touched");
    // The first interface is unchanged.
    let check = call.clone().with("prevResult", first);
    scene.call("CHECK", &check)?.assert_silent_success();
    scene.del(&call)?;
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b02_add_of_an_interface_that_is_there_is_an_error() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("there").await?;
    let inside = scene.netns("web-0")?;
    inside.ip(&[
        "link add eth0 type veth peer name other",
        "address add 192.0.2.7/24 dev eth0",
    ])?;
    let before = scene.stage.picture().await?;
    let theirs = inside.run("ip", &["-o", "address"])?;
    let error = scene.call("ADD", &Call::new("abc", "web-0"))?.error(101);
    assert!(
        error["msg"].as_str().is_some_and(|msg| msg.contains("interface eth0")),
        "{error}"
    );
    assert_eq!(inside.run("ip", &["-o", "address"])?, theirs);
    scene.stage.assert_as(&before).await
}

#[tokio::test(flavor = "multi_thread")]
async fn b03_add_that_fails_half_way_leaves_nothing() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("halfway").await?;
    let inside = scene.netns("web-0")?;
    // The interface index of the second host end is taken, which shows when the first interface is complete.
    let taken = kni_common::IFINDEX_BASE + 2;
    scene
        .stage
        .node
        .ip(&[&format!("link add blocker index {taken} type veth peer name blocked")])?;
    let before = scene.stage.picture().await?;
    let call = Call::new("abc", "web-0").annotated(&json!({"kni.io/multi-network": "blue"}));
    let error = scene.call("ADD", &call)?.error(100);
    assert!(
        error["msg"]
            .as_str()
            .is_some_and(|msg| msg.contains(&taken.to_string())),
        "{error}"
    );
    assert_eq!((scene.used("default").await?, scene.used("blue").await?), (0, 0));
    scene.stage.assert_as(&before).await?;
    assert_eq!(
        inside.run("ip", &["-o", "link"])?.lines().count(),
        1,
        "something is left in the pod"
    );
    // Without the obstacle the same call succeeds.
    scene.stage.node.ip(&["link del blocker"])?;
    let result = scene.add(&call)?;
    assert_eq!(result["ips"].as_array().map(Vec::len), Some(4), "{result}");
    scene.del(&call)
}

#[tokio::test(flavor = "multi_thread")]
async fn b14_what_is_unknown_in_the_configuration_passes() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("unknown").await?;
    scene.netns("web-0")?;
    let call = Call::new("abc", "web-0")
        .with("ipam", json!({"type": "host-local"}))
        .with("capabilities", json!({"portMappings": true}))
        .with(
            "runtimeConfig",
            json!({"aliases": ["a"], "ipRanges": [[{"subnet": "10.0.0.0/8"}]]}),
        )
        .with("vendor/key", json!([1, {"deep": null}]));
    let result = scene.add(&call)?;
    let check = call.clone().with("prevResult", result);
    scene.call("CHECK", &check)?.assert_silent_success();
    scene.call("STATUS", &call)?.assert_silent_success();
    scene.del(&check)
}

#[tokio::test(flavor = "multi_thread")]
async fn b15_the_order_of_cni_args_does_not_matter() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("order").await?;
    let pairs = [
        "K8S_POD_UID=uid-7",
        "K8S_POD_NAMESPACE=shop",
        "IgnoreUnknown=1",
        "K8S_POD_NAME=web-7",
        "K8S_POD_INFRA_CONTAINER_ID=abc",
    ];
    for first in 0..pairs.len() {
        let mut order = pairs;
        order.rotate_left(first);
        let name = format!("pod{first}");
        scene.netns(&name)?;
        let call = Call {
            args: order.join(";"),
            ..Call::new(&name, &name)
        };
        scene.add(&call)?;
        let listed = scene.listed(&name).await?;
        let of = |i: &kni_proto::runtime::Interface| (i.pod_namespace.clone(), i.pod_name.clone(), i.pod_uid.clone());
        assert_eq!(
            listed.iter().map(of).collect::<Vec<_>>(),
            [("shop".into(), "web-7".into(), "uid-7".into())]
        );
        scene.del(&call)?;
    }
    // Addresses as CRI-O passes them.
    scene.netns("fixed")?;
    let call = Call::new("fixed", "fixed");
    let call = Call {
        args: format!("MAC=02:00:00:00:77:01;{};IP=10.244.7.7", call.args),
        ..call
    };
    let result = scene.add(&call)?;
    assert_eq!(result["ips"][0]["address"], "10.244.7.7/32", "{result}");
    assert_eq!(result["interfaces"][1]["mac"], "02:00:00:00:77:01", "{result}");
    scene.del(&call)
}

#[tokio::test(flavor = "multi_thread")]
async fn b16_the_runtimes_trace_reaches_the_agents_log() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("trace").await?;
    scene.netns("web-0")?;
    let call = |digit: &str| {
        let trace = format!("00-{}-b7ad6b7169203331-01", digit.repeat(32));
        let env = vec![
            ("TRACEPARENT".to_owned(), trace.clone()),
            ("TRACESTATE".to_owned(), "a=b".to_owned()),
        ];
        (
            Call {
                env,
                ..Call::new("abc", "web-0")
            },
            trace,
        )
    };
    for (verb, digit, method) in [("ADD", "a", "AttachInterface"), ("DEL", "d", "DetachInterface")] {
        let (call, trace) = call(digit);
        assert!(scene.call(verb, &call)?.success);
        assert!(
            scene.stage.agent.wait_for_log(&trace, super::scene::patience()),
            "{}",
            scene.stage.agent.log()
        );
        let log = scene.stage.agent.log();
        let line = log.lines().find(|line| line.contains(&trace)).unwrap_or_default();
        assert!(line.contains(method) && line.contains("traceparent"), "{line}");
    }
    // An invalid trace belongs to no pod.
    let (mut odd, _) = call("b");
    odd.env[0].1 = "let me in".to_owned();
    scene.add(&odd)?;
    assert!(!scene.stage.agent.log().contains("let me in"));
    scene.del(&odd)
}

/// Runtimes need an address at `eth0`, which such a pod does not have.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_a_primary_interface_is_added_with_the_dummy_address() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::new("none").await?;
    let inside = scene.netns("web-0")?;
    let before = scene.stage.picture().await?;
    for annotations in [
        json!({"kni.dev/network": "none"}),
        json!({"kni.dev/network": "none", "kni.io/multi-network": "blue"}),
    ] {
        let call = Call::new("abc", "web-0").annotated(&annotations);
        let result = scene.add(&call)?;
        let without_interface: Vec<_> = result["ips"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|ip| ip.get("interface").is_none())
            .collect();
        assert_eq!(without_interface, [&json!({"address": "192.0.0.8/32"})], "{result}");
        assert!(!inside.run("ip", &["-o", "link"])?.contains("eth0"), "{result}");
        let check = call.clone().with("prevResult", result);
        scene.call("CHECK", &check)?.assert_silent_success();
        scene.del(&call)?;
    }
    scene.stage.assert_as(&before).await
}
