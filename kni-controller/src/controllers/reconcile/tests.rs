//! Tests the loop of a controller against an API server that takes its time, while objects change and plans are long.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use http::{Request, Response};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api,
    api::{Patch, PatchParams},
    client::Body,
};
use serde_json::json;

use super::*;

/// How long the API server takes to answer.
const LATENCY: Duration = Duration::from_millis(10);
/// How long a comparison takes.
const PLAN: Duration = Duration::from_millis(50);
/// Number of objects that need a write.
const OBJECTS: usize = 1000;

/// Names the namespaces that the tables do not have.
struct Slow {
    plans: Arc<AtomicUsize>,
}

fn name(number: usize) -> String {
    format!("n{number:04}")
}

impl Reconciler for Slow {
    const NAME: &'static str = "slow";
    const NEEDS_NETWORKS: bool = false;
    type Write = ();

    fn version(tables: &Tables) -> u64 {
        tables.namespaces.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, ())> {
        std::thread::sleep(PLAN);
        self.plans.fetch_add(1, Ordering::Relaxed);
        let names = (0..OBJECTS).map(name);
        let missing = names.filter(|name| tables.namespaces.get("", name).is_none());
        missing.map(|name| (Key::new("", &name), ())).collect()
    }

    async fn write(context: Context, key: Key, _write: ()) -> kube::Result<()> {
        let api: Api<Namespace> = Api::all(context.client.clone());
        let patch = Patch::Merge(json!({}));
        api.patch(&key.name, &PatchParams::default(), &patch).await.map(drop)
    }
}

/// An API server that answers each request after a while, and reports each written object like a watch.
fn api_server(cache: &ClusterCache, writes: &Arc<AtomicUsize>) -> Client {
    let (cache, writes) = (cache.clone(), Arc::clone(writes));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (cache, writes) = (cache.clone(), Arc::clone(&writes));
        async move {
            tokio::time::sleep(LATENCY).await;
            let name = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            writes.fetch_add(1, Ordering::Relaxed);
            cache.change(|tables| {
                tables.namespaces.put(Key::new("", &name), Some(BTreeMap::new()));
            });
            let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            Ok::<_, std::convert::Infallible>(Response::new(Body::from(object.to_string().into_bytes())))
        }
    });
    Client::new(service, "default")
}

/// Changes an object each millisecond.
async fn change(cache: ClusterCache) {
    for number in 0_u64.. {
        let labels = BTreeMap::from([("number".to_owned(), number.to_string())]);
        cache.change(|tables| tables.namespaces.put(Key::new("", "other"), Some(labels)));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Time is counted in plans, so that a machine that is slow changes nothing: 40 plans take 2 s at least.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writes_go_on_while_objects_change_and_plans_take_long() {
    let (plans, writes) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let cache = ClusterCache::new();
    let client = api_server(&cache, &writes);
    let context = Context::for_tests(client, cache.clone());
    let changing = tokio::spawn(change(cache));
    let running = tokio::spawn(rounds(
        context,
        Slow {
            plans: Arc::clone(&plans),
        },
    ));
    while plans.load(Ordering::Relaxed) < 40 && writes.load(Ordering::Relaxed) < OBJECTS {
        assert!(!running.is_finished());
        tokio::time::sleep(LATENCY).await;
    }
    let (plans, writes) = (plans.load(Ordering::Relaxed), writes.load(Ordering::Relaxed));
    changing.abort();
    running.abort();
    println!("{writes} writes in {plans} plans");
    assert!(writes >= 100, "{writes} writes in {plans} plans");
    assert!(writes <= OBJECTS, "{writes} writes of {OBJECTS} objects");
}
