//! What other tools see of the dataplane, and what it does with what it finds: pinned maps that bpftool can read,
//! programs beside other people's, pins of another layout.

mod drift;
mod dump;
mod neighbours;
