//! Checks the traffic between pods.

use crate::{
    error::{Result, require},
    session::Session,
    traffic,
};

pub(super) async fn pod_to_pod(session: &Session) -> Result<()> {
    let one = session.pod("one").await?;
    let other = session.pod("other").await?;
    let families = traffic::check_both_ways(&one, &other).await?;
    require!(
        families > 0,
        "the pods have no family in common: {:?} and {:?}",
        one.addresses,
        other.addresses
    );
    Ok(())
}
