//! Checks many pods at once, and the reuse of addresses.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
};

use futures::future::{join, join_all};

use crate::{
    error::{Failure, Result, require},
    sandbox::{Pod, new_id},
    session::Session,
    traffic,
};

const CROWD: usize = 30;
/// Pods that change while the server is queried.
const BUSY: usize = 10;
/// Pods that live at the same time during the reuse of addresses, and the pods that are attached in all.
const LIVE: usize = 3;
const ATTACHED: usize = 12;

pub(super) async fn concurrent(session: &Session) -> Result<()> {
    let names: Vec<String> = (0..CROWD).map(|number| format!("crowd-{number}")).collect();
    // To the end also if one fails: the cleanup must know all that were made.
    let pods = join_all(names.iter().map(|name| session.pod(name))).await;
    let pods: Vec<Pod> = pods.into_iter().collect::<Result<_>>()?;
    let mut used = InUse::default();
    for pod in &pods {
        used.add(pod)?;
        session.check_pod(pod).await?;
        session.check_query(pod).await?;
    }
    let Some((first, others)) = pods.split_first() else {
        return Ok(());
    };
    for pod in others {
        traffic::check_both_ways(first, pod).await?;
    }
    for removed in join_all(pods.iter().map(|pod| session.remove(&pod.sandbox))).await {
        removed?;
    }
    for pod in &pods {
        session.check_bare(&pod.sandbox.netns).await?;
    }
    Ok(())
}

pub(super) async fn addresses_in_use(session: &Session) -> Result<()> {
    let mut used = InUse::default();
    let mut live: VecDeque<Pod> = VecDeque::new();
    for number in 0..ATTACHED {
        if live.len() == LIVE {
            // The newest and the oldest one in turn.
            let leaving = if number % 2 == 0 {
                live.pop_front()
            } else {
                live.pop_back()
            };
            if let Some(pod) = leaving {
                session.remove(&pod.sandbox).await?;
                used.remove(&pod);
            }
        }
        let pod = session.pod(&format!("address-{number}")).await?;
        used.add(&pod)?;
        live.push_back(pod);
    }
    Ok(())
}

pub(super) async fn deadlines(session: &Session) -> Result<()> {
    let known = session.pod("known").await?;
    let changes = join_all((0..BUSY).map(async |number| {
        let pod = session.pod(&format!("busy-{number}")).await?;
        session.remove(&pod.sandbox).await
    }));
    let queries = async {
        // More queries than changes, so that some meet each of them.
        for _query in 0..BUSY * 5 {
            session.check_query(&known).await?;
            session.check_unknown(&new_id()).await?;
            session.client.networks().await?;
        }
        Ok::<_, Failure>(())
    };
    let (changes, queries) = join(changes, queries).await;
    changes.into_iter().collect::<Result<()>>()?;
    queries
}

/// The addresses of the pods that are attached.
#[derive(Default)]
struct InUse(BTreeMap<IpAddr, String>);

impl InUse {
    fn add(&mut self, pod: &Pod) -> Result<()> {
        for ip in &pod.addresses {
            let name = pod.sandbox.name.clone();
            if let Some(owner) = self.0.insert(*ip, name) {
                let name = &pod.sandbox.name;
                require!(false, "{name} receives {ip}, which {owner} has");
            }
        }
        Ok(())
    }

    fn remove(&mut self, pod: &Pod) {
        for ip in &pod.addresses {
            self.0.remove(ip);
        }
    }
}
