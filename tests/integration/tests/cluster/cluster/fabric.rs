//! Tests packets between pods of several nodes: who reaches whom, what is on the wire, and that policies apply.

mod authority;
mod bed;
mod content;
mod detours;
mod enemies;
mod explained;
mod faults;
mod firewall;
mod forgery;
mod fresh;
mod losses;
mod past_the_tunnel;
mod peers;
mod policies;
mod ports;
mod reach;
mod registered;
mod services;
