//! Tests the dataplane with existing state and other tools: maps that bpftool can read, programs of other owners, and
//! pins of another shape or layout.

mod drift;
mod dump;
mod hooks;
mod neighbours;
