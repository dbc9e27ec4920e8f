//! Sets up logging to standard error.
//! Layer: root.

use std::io::IsTerminal as _;

use tracing_subscriber::{EnvFilter, filter::ParseError};

/// Logs the events that `filter` selects. Only the first call takes effect.
pub fn init(filter: &str) -> Result<(), ParseError> {
    let filter = EnvFilter::try_new(filter)?;
    // Only a test harness may have set a subscriber before.
    let _first_wins = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // No escape sequences in log files.
        .with_ansi(std::io::stderr().is_terminal())
        .try_init()
        .is_ok();
    Ok(())
}
