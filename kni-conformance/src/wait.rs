//! Waits for states that a server may reach after its answer, with deadlines.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{error::Result, limits::scaled};

/// How long a server may take to clean up after it has answered.
pub(crate) const CLEAN_UP_LIMIT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Repeats `check` until it succeeds; after [`CLEAN_UP_LIMIT`] its last failure is returned.
pub(crate) async fn eventually(mut check: impl AsyncFnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + scaled(CLEAN_UP_LIMIT);
    loop {
        match check().await {
            Err(_early) if Instant::now() < end => sleep(PAUSE).await,
            result => return result,
        }
    }
}
