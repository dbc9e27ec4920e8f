//! 8: Tests `internalTrafficPolicy: Local`, and hints of nodes and zones.

use anyhow::Result;
use kni_integration::{require, stage::address};
use serde_json::{Value, json};

use super::{
    objects::{HERE, State, ZONE, elsewhere, endpoint, service, slice, with},
    scene::{Backend, FAMILIES, Scene, assert_answering, front},
};

const WEB: u8 = 60;

fn objects(spec: &Value, endpoints: &[(&Backend, Value)]) -> Vec<Value> {
    let mut objects = vec![with(service("web", WEB), spec.clone())];
    objects.extend(FAMILIES.map(|v4| {
        let of = |(backend, fields): &(&Backend, Value)| {
            let mut endpoint = elsewhere(endpoint(address(&backend.pod, v4), State::Ready));
            for (name, value) in fields.as_object().expect("fields of an endpoint") {
                endpoint[name] = value.clone();
            }
            endpoint
        };
        slice("web", "only", v4, endpoints.iter().map(of))
    }));
    objects
}

fn zones(names: &[&str]) -> Value {
    let names: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
    json!({"hints": {"forZones": names}})
}

fn nodes_and_zones(node: &str, zone: &str) -> Value {
    json!({"hints": {"forNodes": [{"name": node}], "forZones": [{"name": zone}]}})
}

#[tokio::test(flavor = "multi_thread")]
async fn local_policy_keeps_to_the_node() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("local").await?;
    let (a, b) = (scene.backend("a").await?, scene.backend("b").await?);
    let client = scene.stage.pod("client").await?;
    let endpoints = [(&a, json!({"nodeName": HERE})), (&b, json!({}))];
    for (policy, who) in [("Local", &["a"][..]), ("Cluster", &["a", "b"])] {
        let spec = json!({"internalTrafficPolicy": policy});
        scene.apply(&objects(&spec, &endpoints)).await?;
        for v4 in FAMILIES {
            assert_answering(&client.inside, front(v4, WEB), who)?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_decide_if_all_endpoints_have_them_and_one_is_for_us() -> Result<()> {
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("hints").await?;
    let (a, b, c) = (
        scene.backend("a").await?,
        scene.backend("b").await?,
        scene.backend("c").await?,
    );
    let client = scene.stage.pod("client").await?;
    let (same_zone, same_node) = ("PreferSameZone", "PreferSameNode");
    let all: &[&str] = &["a", "b", "c"];
    // Distribution, hints of a, b and c, expected servers.
    let cases: [(Option<&str>, [Value; 3], &[&str]); 7] = [
        (
            Some(same_zone),
            [zones(&[ZONE]), zones(&["far", ZONE]), zones(&["far"])],
            &["a", "b"],
        ),
        (
            Some("PreferClose"),
            [zones(&[ZONE]), zones(&["far"]), zones(&["far"])],
            &["a"],
        ),
        (Some(same_zone), [zones(&[ZONE]), json!({}), zones(&["far"])], all),
        (
            Some(same_zone),
            [zones(&["far"]), zones(&["far"]), zones(&["far"])],
            all,
        ),
        // The node takes precedence over the zone; without an endpoint for the node, the zone applies.
        (
            Some(same_node),
            [
                nodes_and_zones(HERE, "far"),
                nodes_and_zones("there", ZONE),
                nodes_and_zones("there", ZONE),
            ],
            &["a"],
        ),
        (
            Some(same_node),
            [
                nodes_and_zones("there", "far"),
                nodes_and_zones("there", ZONE),
                nodes_and_zones("there", ZONE),
            ],
            &["b", "c"],
        ),
        // Hints without a distribution have no effect.
        (None, [zones(&[ZONE]), zones(&["far"]), zones(&["far"])], all),
    ];
    for (distribution, hints, who) in cases {
        let spec = distribution.map_or_else(|| json!({}), |name| json!({"trafficDistribution": name}));
        let [for_a, for_b, for_c] = hints;
        let endpoints = [(&a, for_a), (&b, for_b), (&c, for_c)];
        scene.apply(&objects(&spec, &endpoints)).await?;
        for v4 in FAMILIES {
            assert_answering(&client.inside, front(v4, WEB), who)?;
        }
    }
    Ok(())
}
