//! Checks pods with addresses of both families.

use crate::{
    error::{Failure, Result, require},
    session::Session,
    traffic,
};

pub(super) async fn dual_stack(session: &Session) -> Result<()> {
    let one = session.pod("dual-one").await?;
    for (v4, family) in [(true, "IPv4"), (false, "IPv6")] {
        if one.address(v4).is_none() {
            return Err(Failure::NotOffered(format!("pods have no {family} address")));
        }
    }
    let other = session.pod("dual-other").await?;
    let families = traffic::check_both_ways(&one, &other).await?;
    require!(
        families == 2,
        "only one of two pods has both families: {:?} and {:?}",
        one.addresses,
        other.addresses
    );
    Ok(())
}
