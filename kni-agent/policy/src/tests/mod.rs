//! Checks the whole engine against a direct evaluation of the policies, including every state between two plans.

mod cases;
mod egress;
mod life;
mod oracle;
mod peers;
mod quota;
mod random;
mod scale;
mod steps;
pub(super) mod world;
