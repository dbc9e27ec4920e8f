//! Tests clusters of several real nodes on this machine, as `cargo xtask cluster` starts and ends them.

mod life;
mod machine;
mod scene;
mod traffic;
