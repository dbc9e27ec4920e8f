//! Finds out which version of an optional kind the API server serves, and watches it for as long as it is served.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use kni_cluster::{ABSENCE_GRACE, ClusterCache, Table, Tables};
use kube::Client;

/// Interval of the questions, after an answer and after a failure.
const PAUSE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(1);

/// A kind that may be missing in a cluster.
pub(super) struct Optional {
    /// Its API group, and its plural name.
    group: &'static str,
    plural: &'static str,
    /// Notes that the kind is not served; returns how many objects stay.
    absent: Note<Instant, usize>,
    /// Notes that it is served.
    served: Box<dyn Fn(&mut Tables) + Send + Sync>,
    /// Notes why it is not known whether it is served, or how long its objects stay.
    problem: Note<String, ()>,
}

/// A change of the kind's table.
type Note<T, R> = Box<dyn Fn(&mut Tables, T) -> R + Send + Sync>;

/// A version of the kind: its name, and its watch, which ends when the version may no longer be served.
pub(super) type Version = (&'static str, Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>);

impl Optional {
    /// The kind whose objects are in `table`.
    pub(super) fn new<V: PartialEq + 'static>(
        group: &'static str,
        plural: &'static str,
        table: fn(&mut Tables) -> &mut Table<V>,
    ) -> Self {
        Self {
            group,
            plural,
            absent: Box::new(move |tables, now| table(tables).absent(now)),
            served: Box::new(move |tables| table(tables).served()),
            problem: Box::new(move |tables, text| table(tables).set_problem(Some(text))),
        }
    }

    /// Its name, and where objects of a version are read.
    pub(super) fn path(&self, version: &str) -> (&'static str, String) {
        (self.plural, format!("/apis/{}/{version}/{}", self.group, self.plural))
    }

    /// Watches the first of `versions` that the API server serves, for as long as the agent runs. Only an answer of the
    /// discovery API decides: while there is none, the table stays as it is, and incomplete if it was never read.
    pub(super) async fn reflect(self, client: Client, cache: ClusterCache, versions: Vec<Version>) {
        let mut last = String::new();
        loop {
            let pause = match self.served_version(&client, &versions).await {
                Ok(Some((name, watch))) => {
                    tracing::debug!(kind = self.plural, version = name, "the API server serves the kind");
                    last.clear();
                    cache.change(&self.served);
                    watch().await;
                    RETRY
                }
                Ok(None) => {
                    self.note_absence(&cache, &mut last);
                    PAUSE
                }
                Err(error) => {
                    let text = format!("it is not known whether the API server serves it: {error}");
                    if last != text {
                        tracing::warn!(kind = self.plural, %error, "cannot ask the API server for the served versions");
                        last.clone_from(&text);
                    }
                    if matches!(error, kube::Error::Api(_)) {
                        cache.change(|tables| (self.problem)(tables, text));
                    }
                    RETRY
                }
            };
            kni_tasks::waiting(tokio::time::sleep(pause)).await;
        }
    }

    fn note_absence(&self, cache: &ClusterCache, last: &mut String) {
        let mut left = 0;
        cache.change(|tables| {
            left = (self.absent)(tables, Instant::now());
            if left > 0 {
                let minutes = ABSENCE_GRACE.as_secs() / 60;
                let text = format!("the API server no longer serves it; its {left} objects stay for {minutes} minutes");
                if *last != text {
                    tracing::warn!(
                        kind = self.plural,
                        left,
                        minutes,
                        "the API server no longer serves the kind"
                    );
                    last.clone_from(&text);
                }
                (self.problem)(tables, text);
            }
        });
    }

    async fn served_version<'a>(
        &self,
        client: &Client,
        versions: &'a [Version],
    ) -> Result<Option<&'a Version>, kube::Error> {
        for version in versions {
            let group_version = format!("{}/{}", self.group, version.0);
            match client.list_api_group_resources(&group_version).await {
                Ok(list) if list.resources.iter().any(|resource| resource.name == self.plural) => {
                    return Ok(Some(version));
                }
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}
