use anyhow::{Context as _, Result};
use kni_integration::{Namespaces, require};
use serde_json::Value;

use super::scene::{Call, Scene};

/// Damages something, and returns the text that the plugin's error must contain.
type Damage = fn(&Scene, &Namespaces, &Value) -> Result<&'static str>;

/// The host's end of the pod's interface.
fn host_end(result: &Value) -> Result<&str> {
    result["interfaces"][0]["name"].as_str().context("no host end")
}

const DAMAGES: [(&str, Damage); 6] = [
    ("down", |_, inside, _| {
        inside.ip(&["link set eth0 down"])?;
        Ok("down")
    }),
    ("address", |_, inside, result| {
        let address = result["ips"][0]["address"].as_str().context("no address")?;
        inside.ip(&[&format!("address del {address} dev eth0")])?;
        Ok("lost the address")
    }),
    ("program", |scene, _, result| {
        let host = host_end(result)?;
        let endpoint: String = host
            .chars()
            .skip_while(|c| !c.is_ascii_digit())
            .take_while(char::is_ascii_digit)
            .collect();
        let pin = format!("/sys/fs/bpf/kni/links/{endpoint}-from_pod");
        scene.stage.node.run("bpftool", &["link", "detach", "pinned", &pin])?;
        Ok("from_pod")
    }),
    ("map", |scene, _, result| {
        // The row of the pod's address; the key is network, address and padding as in the map.
        let address = result["ips"][0]["address"]
            .as_str()
            .and_then(|cidr| cidr.split('/').next())
            .context("no address")?;
        let octets: Vec<u64> = address.split('.').map(str::parse).collect::<Result<_, _>>()?;
        let pin = "/sys/fs/bpf/kni/v2/ADDRESSES";
        let pin = scene
            .stage
            .node
            .enter(|| std::path::Path::new(pin).exists())?
            .then_some(pin)
            .map_or_else(
                || -> Result<String> {
                    let found = scene
                        .stage
                        .node
                        .run("find", &["/sys/fs/bpf/kni", "-name", "ADDRESSES"])?;
                    Ok(found.trim().to_owned())
                },
                |pin| Ok(pin.to_owned()),
            )?;
        let rows: Value = serde_json::from_str(
            &scene
                .stage
                .node
                .run("bpftool", &["-j", "map", "dump", "pinned", &pin])?,
        )?;
        let bytes = |row: &Value| -> Vec<u64> {
            let texts = row["key"].as_array().into_iter().flatten();
            texts
                .filter_map(|b| u64::from_str_radix(b.as_str()?.trim_start_matches("0x"), 16).ok())
                .collect()
        };
        let rows = rows.as_array().context("no rows")?;
        let key = rows
            .iter()
            .map(bytes)
            .find(|key| key.windows(4).any(|window| window == octets))
            .context("no row")?;
        let key: Vec<String> = key.iter().map(u64::to_string).collect();
        let mut args = vec!["map", "delete", "pinned", &pin, "key"];
        args.extend(key.iter().map(String::as_str));
        scene.stage.node.run("bpftool", &args)?;
        Ok("map ADDRESSES has no row")
    }),
    ("route", |_, inside, _| {
        inside.ip(&["route del default"])?;
        Ok("lost the route to 0.0.0.0/0")
    }),
    ("host route", |scene, _, result| {
        let cidr = result["ips"][0]["address"].as_str().context("no address")?;
        scene.stage.node.ip(&[&format!("route del {cidr} table 19278")])?;
        Ok("the node has no route")
    }),
];

#[tokio::test(flavor = "multi_thread")]
async fn b09_check_detects_what_was_taken_away() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let scene = Scene::with_args("check", kni_integration::Manifest::overlapping(), &["--hook", "tcx"]).await?;
    for (index, (name, damage)) in DAMAGES.iter().enumerate() {
        let netns = format!("pod{index}");
        let inside = scene.netns(&netns)?;
        let call = Call::new(&netns, &netns);
        let result = scene.add(&call)?;
        // Links replace the initial filters of the interface.
        scene.stage.settled().await?;
        let check = call.clone().with("prevResult", result.clone());
        scene.call("CHECK", &check)?.assert_silent_success();
        let named = damage(&scene, &inside, &result).context(*name)?;
        let error = scene.call("CHECK", &check)?.error(103);
        assert!(error.to_string().contains(named), "{name}: {error}");
        scene.del(&call)?;
        // The interface is removed completely.
        scene.call("CHECK", &check)?.error(103);
    }
    // Differences from the result of ADD.
    let inside = scene.netns("said")?;
    let call = Call::new("said", "said");
    let mut result = scene.add(&call)?;
    result["ips"][0]["address"] = "10.244.99.99/32".into();
    let error = scene
        .call("CHECK", &call.clone().with("prevResult", result))?
        .error(103);
    assert!(
        error["msg"].as_str().is_some_and(|msg| msg.contains("10.244.99.99")),
        "{error}"
    );
    drop(inside);
    scene.del(&call)
}
