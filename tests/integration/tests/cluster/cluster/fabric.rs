//! Tests packets between pods of several nodes: who reaches whom, what is on the wire, and that policies apply.

mod bed;
mod enemies;
mod explained;
mod faults;
mod firewall;
mod reach;
mod services;
