//! Tests of the engine as a whole: against a direct reading of the policies, and of every moment between two states.

mod cases;
mod egress;
mod life;
mod oracle;
mod random;
mod scale;
mod steps;
pub(super) mod world;
