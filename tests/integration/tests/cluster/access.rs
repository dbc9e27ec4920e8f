//! Tests who may join a network: by every way in, at admission and at the agent, and while pods run.

mod changes;
mod rows;
mod scene;
mod table;
