//! The kinds of `kni.dev` at a real API server: what it takes, what it refuses and with which advice, what it shows.

mod accepted;
mod changes;
mod explained;
mod invalid;
mod refused;
mod scene;
mod shown;
