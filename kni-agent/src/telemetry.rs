//! Sets up logging to standard error.
//! Layer: root.

use std::io::IsTerminal as _;

use tracing_subscriber::{EnvFilter, filter::ParseError};

/// Logs what `filter` selects. The first call decides.
pub fn init(filter: &str) -> Result<(), ParseError> {
    let filter = EnvFilter::try_new(filter)?;
    // Only a test harness has set one already.
    let _first_wins = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Colours are for people, not for log files.
        .with_ansi(std::io::stderr().is_terminal())
        .try_init()
        .is_ok();
    Ok(())
}
