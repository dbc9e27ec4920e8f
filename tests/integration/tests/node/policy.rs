//! Tests network policies in the nine-pod world: every case by address and by ClusterIP, on the default and on a named
//! network, and live connections during changes of policies.

mod attach;
mod churn;
mod explain;
mod flood;
mod live;
mod node;
mod overlap;
mod quota;
mod replies;
mod table;

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Result, ensure};
use kni_integration::{
    oracle::Protocol,
    patience,
    world::{Net, NinePods, PolicyText, Question, Setting, Via, index_of},
};

/// A port with servers in some tests only.
pub(crate) const PORT: u16 = 8080;
/// Timeout of an answer, and the time to wait before no answer counts as silence.
pub(crate) const PATIENCE: Duration = Duration::from_millis(500);

/// The address of a pod of the world on the default network.
pub(crate) fn at(world: &NinePods, pod: &str, v4: bool, port: u16) -> SocketAddr {
    SocketAddr::new(world.addresses().of(index_of(pod), Net::Default, v4), port)
}

/// Applies policies of the default network, as `namespace: spec`, and waits until they are enforced.
pub(crate) async fn enforce(world: &mut NinePods, policies: &[(&str, &str)]) -> Result<()> {
    let numbered = policies.iter().enumerate();
    let policies: Vec<_> = numbered
        .map(|(n, (namespace, spec))| PolicyText::new(namespace, &format!("p{n}"), spec))
        .collect();
    world.apply(Net::Default, &policies, &Setting::default()).await?;
    let mut questions = Question::all(Net::Default, Via::Address);
    questions.retain(|question| question.protocol != Protocol::Sctp && question.port == 80);
    let expected: BTreeMap<_, _> = world.expect(Net::Default, &policies, &questions);
    let differing = world.wait_for(&expected, patience())?;
    ensure!(differing.is_empty(), "not in force: {differing:?}");
    Ok(())
}
