//! The agent dies and comes back, in every way and at every moment: pods and their traffic go on, and nothing leaks.

mod chaos;
mod takeover;
mod under_policy;
mod xdp;
