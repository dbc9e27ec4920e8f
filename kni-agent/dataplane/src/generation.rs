//! Hands out generations, which wrap after 2^32 steps, and keeps those in use close enough to be compared.

use kni_common::endpoint::{EndpointRow, is_older};

/// Steps after which an incarnation moves forward: well below the 2^31 up to which two generations can be compared. A
/// flow that has been idle since then is treated as one of an earlier owner.
const REACH: u32 = 1 << 30;

/// The last generation of any row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Generations(u32);

impl Generations {
    /// Continues after the newest generation and epoch in the rows.
    pub(super) fn after(rows: &[(u32, EndpointRow)]) -> Self {
        let used = rows.iter().flat_map(|(_, row)| [row.generation, row.epoch]);
        let newest = used.filter(|generation| *generation != 0).reduce(|newest, generation| {
            if is_older(newest, generation) {
                generation
            } else {
                newest
            }
        });
        Self(newest.unwrap_or(0))
    }

    /// A generation that no row has or had. All rows share one counter: an address may be reused in another row.
    pub(super) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(1).max(1);
        self.0
    }

    /// The row with a new generation and epoch where these are too far back to be compared, and with its former
    /// generation as incarnation where that is; `None` where all are near enough. Free rows too: their generations
    /// count at the start of an agent.
    pub(super) fn brought_near(&mut self, row: &EndpointRow) -> Option<EndpointRow> {
        let newest = self.0;
        let is_far = |generation: u32| generation != 0 && newest.wrapping_sub(generation) > REACH;
        if !is_far(row.incarnation) && !is_far(row.generation) && !is_far(row.epoch) {
            return None;
        }
        let mut moved = *row;
        if is_far(row.incarnation) {
            // Flows of the present owner that were used since carry this generation or a later one.
            moved.incarnation = row.generation;
        }
        if is_far(row.generation) {
            moved.generation = self.next();
        }
        if is_far(row.epoch) {
            moved.epoch = self.next();
        }
        Some(moved)
    }

    /// A number that changes every 2^20 steps, when rows may have to be [brought near](Self::brought_near).
    pub(super) const fn period(self) -> u32 {
        self.0 >> 20
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(generation: u32, incarnation: u32) -> EndpointRow {
        EndpointRow {
            network: 1,
            generation,
            incarnation,
            epoch: generation,
            ..EndpointRow::default()
        }
    }

    #[test]
    fn counting_continues_across_the_wrap_and_after_a_restart() {
        let mut generations = Generations::after(&[(1, row(u32::MAX - 1, 5)), (2, row(7, 7))]);
        assert_eq!(generations.next(), 8, "7 was handed out after the wrap");
        let mut generations = Generations::after(&[(1, row(u32::MAX, u32::MAX))]);
        assert_eq!(generations.next(), 1, "zero is no generation");
        assert_eq!(Generations::after(&[]).next(), 1);
    }

    #[test]
    fn rows_that_are_left_behind_are_brought_near() {
        let mut generations = Generations(5);
        assert_eq!(generations.brought_near(&row(5, u32::MAX - 100)), None);
        let far = 5_u32.wrapping_sub(REACH + 1);
        let near = generations.brought_near(&row(5, far)).unwrap();
        assert_eq!((near.generation, near.incarnation), (5, 5), "the owner's flows stay");
        // An endpoint that did not change for that long.
        let near = generations.brought_near(&row(far, far)).unwrap();
        assert_eq!((near.incarnation, near.generation, near.epoch), (far, 6, 7));
        assert!(!is_older(far, near.incarnation), "its flows stay");
        let near = generations.brought_near(&near).unwrap();
        assert_eq!((near.incarnation, near.generation), (6, 6));
        assert_eq!(generations.brought_near(&near), None);
        assert_eq!(generations.brought_near(&EndpointRow::default()), None);
    }
}
