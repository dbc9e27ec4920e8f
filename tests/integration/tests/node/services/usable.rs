//! 3: Tests that ready endpoints are used, or else terminating ones that serve; for Cluster and Local separately.

use anyhow::Result;
use kni_integration::{require, stage::address};
use serde_json::{Value, json};

use super::{
    objects::{State, elsewhere, endpoint, service, slice, with},
    scene::{Backend, FAMILIES, Scene, assert_answering, assert_refused, front},
};

const CLUSTER: u8 = 20;
const LOCAL: u8 = 21;

/// Both Services with the same endpoints: on this node or not, in a state.
fn objects(endpoints: &[(&Backend, bool, State)]) -> Vec<Value> {
    let local = with(service("local", LOCAL), json!({"internalTrafficPolicy": "Local"}));
    let mut objects = vec![service("cluster", CLUSTER), local];
    for name in ["cluster", "local"] {
        objects.extend(FAMILIES.map(|v4| {
            let of = |(backend, here, state): &(&Backend, bool, State)| {
                let endpoint = endpoint(address(&backend.pod, v4), *state);
                if *here { endpoint } else { elsewhere(endpoint) }
            };
            slice(name, "only", v4, endpoints.iter().map(of))
        }));
    }
    objects
}

#[tokio::test(flavor = "multi_thread")]
async fn ready_endpoints_are_used_and_else_those_that_still_serve() -> Result<()> {
    use State::{Draining, Gone, Ready, Unready};
    require!(steady, root, netns, bpf, ip);
    let mut scene = Scene::set("usable").await?;
    let (a, b, c) = (
        scene.backend("a").await?,
        scene.backend("b").await?,
        scene.backend("c").await?,
    );
    let client = scene.stage.pod("client").await?;
    // Endpoints, expected servers under Cluster, expected servers under Local.
    let cases: [(&[_], &[&str], &[&str]); 5] = [
        (
            &[(&a, true, Ready), (&b, true, Ready), (&c, true, Draining)],
            &["a", "b"],
            &["a", "b"],
        ),
        (
            &[(&a, true, Draining), (&b, true, Gone), (&c, true, Draining)],
            &["a", "c"],
            &["a", "c"],
        ),
        // Ready endpoints on other nodes do not count for Local, so terminating ones of this node are used.
        (&[(&a, false, Ready), (&b, true, Draining)], &["a"], &["b"]),
        (
            &[(&a, false, Draining), (&b, true, Draining), (&c, true, Unready)],
            &["a", "b"],
            &["b"],
        ),
        (&[(&a, true, Unready), (&b, true, Ready)], &["b"], &["b"]),
    ];
    for (endpoints, cluster, local) in cases {
        scene.apply(&objects(endpoints)).await?;
        for v4 in FAMILIES {
            assert_answering(&client.inside, front(v4, CLUSTER), cluster)?;
            assert_answering(&client.inside, front(v4, LOCAL), local)?;
        }
    }
    scene.apply(&objects(&[(&a, true, Unready), (&b, true, Gone)])).await?;
    for v4 in FAMILIES {
        assert_refused(&client.inside, front(v4, CLUSTER))?;
        assert_refused(&client.inside, front(v4, LOCAL))?;
    }
    Ok(())
}
