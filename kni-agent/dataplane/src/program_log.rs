//! Forwards log records of the programs to the agent's log; only objects built with `build-ebpf --trace` have any.

use aya::Ebpf;
use aya_log::EbpfLogger;
use tokio::io::{Interest, unix::AsyncFd};

/// Reads records until the agent ends. A failure here never stops the dataplane.
pub(super) fn forward(ebpf: &mut Ebpf) {
    if ebpf.map("AYA_LOGS").is_none() {
        return;
    }
    let logger = match EbpfLogger::init(ebpf) {
        Ok(logger) => logger,
        Err(error) => {
            tracing::warn!(%error, "cannot read the log records of the programs");
            return;
        }
    };
    // SAFETY: the logger owns its ring's descriptor, always the same one, and closes it only when it is dropped, which
    // `AsyncFd` does after it has deregistered the descriptor.
    match unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) } {
        Ok(mut ring) => {
            tokio::spawn(async move {
                while let Ok(mut guard) = ring.readable_mut().await {
                    guard.get_inner_mut().flush();
                    guard.clear_ready();
                }
            });
        }
        Err(error) => {
            let error = std::io::Error::from(error);
            tracing::warn!(%error, "cannot watch the log records of the programs");
        }
    }
}
