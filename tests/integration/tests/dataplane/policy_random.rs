//! Tests random policies, pods and questions: the engine, the programs and their explanations agree with the oracle.
//!
//! `KNI_WORLDS` sets the number of worlds (default 10 000), `KNI_SEED` repeats a run, `KNI_WORLD` runs a single world
//! of it.

mod case;
mod coverage;
mod engine;
mod generate;
mod objects;
mod programs;
mod run;
mod trail;
