//! Lists later what nothing waits for, so that agents that start together do not ask for everything at the same moment.

use std::time::Duration;

use futures::{FutureExt as _, future::BoxFuture};

/// The longest delay.
const LONGEST: Duration = Duration::from_millis(500);
/// The watches that neither an attach nor the traffic of a pod waits for: definitions of other tools, which only pods
/// wait for that name one, and the node's own report.
const LATER: [&str; 2] = ["watch-network-attachment-definitions", "watch-own-nodenetwork"];

fn delay() -> Duration {
    LONGEST.mul_f64(fastrand::f64())
}

/// The work of a task that watches, after a random delay if nothing waits for it.
pub(super) fn spread(task: &str, run: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
    if !LATER.contains(&task) {
        return run;
    }
    let later = async move {
        kni_tasks::waiting(tokio::time::sleep(delay())).await;
        run.await;
    };
    later.boxed()
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use kni_cluster::ClusterCache;
    use kube::{Client, Config};

    use super::*;
    use crate::{WatchState, reflect_node};

    #[test]
    fn delays_differ_and_are_short() {
        let delays: BTreeSet<Duration> = (0..100).map(|_start| delay()).collect();
        assert!(
            delays.len() > 90 && delays.iter().all(|delay| *delay < LONGEST),
            "{delays:?}"
        );
        assert!(delays.first().unwrap() < &(LONGEST / 4) && delays.last().unwrap() > &(LONGEST / 4 * 3));
    }

    #[tokio::test]
    async fn only_what_nothing_waits_for_is_delayed() {
        let of = |task| {
            let begun = Arc::new(AtomicBool::new(false));
            let seen = Arc::clone(&begun);
            let run = async move { begun.store(true, Ordering::Relaxed) }.boxed();
            (spread(task, run), seen)
        };
        let (now, begun) = of("watch-pods");
        assert!(now.now_or_never().is_some() && begun.load(Ordering::Relaxed));
        for task in LATER {
            let (mut later, begun) = of(task);
            assert!(
                (&mut later).now_or_never().is_none() && !begun.load(Ordering::Relaxed),
                "{task}"
            );
            tokio::time::timeout(LONGEST * 20, later).await.unwrap();
            assert!(begun.load(Ordering::Relaxed), "{task}");
        }
    }

    #[tokio::test]
    async fn the_delayed_watches_exist() {
        let client = Client::try_from(Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let all = reflect_node(&client, &ClusterCache::new(), &WatchState::default(), "n1");
        let names: BTreeSet<&str> = all.iter().map(|reflector| reflector.task).collect();
        assert!(LATER.iter().all(|task| names.contains(task)), "{names:?}");
    }
}
