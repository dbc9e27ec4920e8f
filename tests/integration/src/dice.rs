//! Makes pseudo-random numbers that are the same in each run, for tests with random moments.

/// A sequence of numbers from a seed.
#[derive(Debug, Clone, Copy)]
pub struct Dice(pub u64);

impl Dice {
    /// The next number, less than `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // Knuth's multiplier; the upper half is sufficiently random here.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
