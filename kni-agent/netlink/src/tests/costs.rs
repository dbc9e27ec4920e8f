//! Measures the operations on this machine, with bounds far above the costs; `--nocapture` prints the numbers.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{Pod, netns_path, on_node, spec};
use crate::{Netlink, netns, prepare_host_interface, prepare_pod_interface};

const ROUNDS: u16 = 20;
const BOUND: Duration = Duration::from_millis(300);

#[derive(Default)]
struct Costs(Vec<Duration>);

impl Costs {
    async fn measure<T>(&mut self, work: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let result = work.await;
        self.0.push(start.elapsed());
        result
    }

    /// The limit is met on a busy machine; a step that waits for a second exceeds it.
    fn check(mut self, what: &str) {
        self.0.sort();
        let at = |share: usize| self.0[(self.0.len() - 1) * share / 100];
        println!("{what:<28} p50 {:>9.1?}  p99 {:>9.1?}", at(50), at(99));
        assert!(at(50) < BOUND, "{what}: p50 {:?}", at(50));
    }
}

/// Costs by name of the step.
#[derive(Default)]
struct Ledger(BTreeMap<&'static str, Costs>);

impl Ledger {
    fn step(&mut self, what: &'static str) -> &mut Costs {
        self.0.entry(what).or_default()
    }
}

#[test]
fn of_everything() {
    on_node("of_everything", async || {
        let node = Netlink::new().unwrap();
        let mut costs = Ledger::default();
        for number in 0..ROUNDS {
            one_life(&node, number, &mut costs).await;
        }
        for (what, costs) in costs.0 {
            costs.check(what);
        }
    });
}

/// Makes a pod and removes it; the names sort in the order of the steps.
async fn one_life(node: &Netlink, number: u16, costs: &mut Ledger) {
    let path = netns_path(&format!("pod{number}"));
    costs
        .step("1a create namespace")
        .measure(netns::create(&path))
        .await
        .unwrap();
    let netns = netns::open(&path).unwrap();
    let inside = costs
        .step("1b connect in namespace")
        .measure(Netlink::in_namespace(&netns))
        .await
        .unwrap();
    let spec = spec(number);
    let indexes = costs
        .step("2a create veth")
        .measure(node.create_veth(&spec, &netns))
        .await
        .unwrap();
    costs
        .step("2b prepare pod interface")
        .measure(prepare_pod_interface(&netns, &spec.pod_name))
        .await
        .unwrap();
    costs
        .step("2c prepare host interface")
        .measure(prepare_host_interface(&spec.host_name))
        .await
        .unwrap();
    costs
        .step("2d set up")
        .measure(node.set_up(indexes.host))
        .await
        .unwrap();
    let (ipv4, ipv6) = ([10, 1, 0, 9].into(), "fd01::9".parse().unwrap());
    let pod = Pod {
        netns,
        inside,
        spec,
        indexes,
        ipv4,
        ipv6,
    };
    what_follows(node, &pod, costs).await;
    costs
        .step("5c remove namespace")
        .measure(netns::remove(&path))
        .await
        .unwrap();
}

async fn what_follows(node: &Netlink, pod: &Pod, costs: &mut Ledger) {
    let indexes = pod.indexes;
    costs
        .step("3a configure pod")
        .measure(pod.inside.configure_pod(&pod.config()))
        .await
        .unwrap();
    costs
        .step("3b configure pod again")
        .measure(pod.inside.configure_pod(&pod.config()))
        .await
        .unwrap();
    costs
        .step("3c add pod route")
        .measure(node.add_pod_route(pod.ipv4.into(), indexes.host))
        .await
        .unwrap();
    costs
        .step("4a get link")
        .measure(node.get_link(indexes.host))
        .await
        .unwrap();
    costs
        .step("4b list our links (1)")
        .measure(node.list_our_links())
        .await
        .unwrap();
    costs
        .step("4c pod interfaces")
        .measure(pod.inside.pod_interfaces())
        .await
        .unwrap();
    let name = pod.spec.host_name.as_str();
    costs
        .step("5 delete link")
        .measure(node.delete_link(indexes.host, name))
        .await
        .unwrap();
}

#[test]
fn of_deleting_many() {
    on_node("of_deleting_many", async || {
        let node = Netlink::new().unwrap();
        for count in [2_u16, 10, 50] {
            let mut took = Vec::new();
            for batch in [false, true] {
                let mut pods = Vec::new();
                for number in 0..count {
                    let pod = Pod::new(&node, number).await;
                    node.set_up(pod.indexes.host).await.unwrap();
                    pod.inside.configure_pod(&pod.config()).await.unwrap();
                    pods.push(pod);
                }
                let links: Vec<_> = pods
                    .iter()
                    .map(|p| (p.indexes.host, p.spec.host_name.as_str()))
                    .collect();
                let start = Instant::now();
                if batch {
                    node.delete_links(&links).await.unwrap();
                } else {
                    for (index, name) in &links {
                        node.delete_link(*index, name).await.unwrap();
                    }
                }
                took.push(start.elapsed());
                for number in 0..count {
                    netns::remove(&netns_path(&format!("pod{number}"))).await.unwrap();
                }
            }
            println!("{count} links, one by one and as a group: {took:?}");
            // This difference is the reason for using groups.
            assert!(count < 50 || took[1] < took[0], "{count} links: {took:?}");
        }
    });
}

/// Measures how long an attach waits for concurrent deletions.
#[test]
fn of_creating_during_deletions() {
    on_node("of_creating_during_deletions", async || {
        let node = Netlink::new().unwrap();
        for (which, teardown) in [("same", node.clone()), ("own", Netlink::for_teardown().unwrap())] {
            let mut victims = Vec::new();
            for number in 0..20 {
                victims.push(Pod::new(&node, number).await);
            }
            let deletions = async {
                for pod in &victims {
                    teardown
                        .delete_link(pod.indexes.host, pod.spec.host_name.as_str())
                        .await
                        .unwrap();
                }
            };
            let mut costs = Costs::default();
            let creations = async {
                for number in 100..140 {
                    costs.measure(Pod::new(&node, number)).await;
                }
            };
            tokio::join!(deletions, creations);
            costs.check(&format!("create pod, {which} connection"));
            for pod in node.list_our_links().await.unwrap() {
                node.delete_link(pod.ifindex, &pod.name).await.unwrap();
            }
            for number in (0..20).chain(100..140) {
                netns::remove(&netns_path(&format!("pod{number}"))).await.unwrap();
            }
        }
    });
}
