//! Tests the agent as a pod: `deploy/` on a real node, with the image that `cargo xtask image` builds.

pub(crate) mod image;
mod life;
mod scene;
mod watch;
