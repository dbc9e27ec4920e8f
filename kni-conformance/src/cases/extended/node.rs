//! Checks what a server reports about the node and its networks in addition to their names.

use kni_proto::kni::Network;

use crate::{
    error::{Failure, Result, require},
    session::Session,
};

/// The key in `extradata` of a network.
pub(super) const FEATURES_KEY: &str = "features";
const REASON_KEY: &str = "reason";

/// The features of the first network; none if the server lists none.
pub(super) async fn features_of_first(session: &Session) -> Result<Vec<String>> {
    let networks = session.client.networks().await?;
    Ok(networks.first().map(listed).unwrap_or_default())
}

fn listed(network: &Network) -> Vec<String> {
    let text = network.extradata.get(FEATURES_KEY).map(String::as_str);
    let names = text.unwrap_or_default().split(',').map(str::trim);
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

pub(super) async fn features(session: &Session) -> Result<()> {
    let networks = session.client.networks().await?;
    if networks.iter().all(|network| listed(network).is_empty()) {
        return Err(Failure::NotOffered(format!(
            "no network has extradata[{FEATURES_KEY:?}]"
        )));
    }
    for network in &networks {
        let name = &network.name;
        require!(
            !listed(network).is_empty(),
            "{name:?} has no extradata[{FEATURES_KEY:?}]"
        );
    }
    Ok(())
}

pub(super) async fn set_up(session: &Session) -> Result<()> {
    let pod = session.pod("set-up").await?;
    session.client.set_up().await?;
    session.client.set_up().await?;
    session.check_query(&pod).await?;
    session.check_pod(&pod).await
}

pub(super) async fn readiness_reason(session: &Session) -> Result<()> {
    let networks = session.client.networks().await?;
    let unready: Vec<&Network> = networks.iter().filter(|network| !network.ready).collect();
    if unready.is_empty() {
        return Err(Failure::NotOffered(
            "every network is ready, and no client can change that".to_owned(),
        ));
    }
    for network in unready {
        let reason = network.extradata.get(REASON_KEY).filter(|reason| !reason.is_empty());
        require!(
            reason.is_some(),
            "{:?} is not ready and has no extradata[{REASON_KEY:?}]",
            network.name
        );
    }
    Ok(())
}
