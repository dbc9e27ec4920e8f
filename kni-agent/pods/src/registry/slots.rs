//! Allocates endpoint numbers. Each is also a row of the dataplane's arrays and determines an interface index.

use std::collections::BTreeSet;

use kni_model::EndpointId;

/// Numbers 1 to capacity. A freed number is reused last, so that stale observations of it expire.
#[derive(Debug)]
pub(crate) struct Slots {
    capacity: u32,
    used: BTreeSet<u32>,
    next: u32,
}

impl Slots {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            capacity,
            used: BTreeSet::new(),
            next: 1,
        }
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// How many numbers are free.
    pub(crate) fn free_count(&self) -> usize {
        usize::try_from(self.capacity)
            .unwrap_or(usize::MAX)
            .saturating_sub(self.used.len())
    }

    pub(crate) fn take(&mut self) -> Option<EndpointId> {
        let candidate = (self.next..=self.capacity)
            .chain(1..self.next)
            .find(|id| !self.used.contains(id))?;
        self.used.insert(candidate);
        self.next = if candidate >= self.capacity { 1 } else { candidate + 1 };
        Some(EndpointId(candidate))
    }

    /// Marks a number as used that a record already has.
    pub(crate) fn adopt(&mut self, endpoint: EndpointId) {
        self.used.insert(endpoint.0);
    }

    pub(crate) fn free(&mut self, endpoint: EndpointId) {
        self.used.remove(&endpoint.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_freed_ones_come_back_last() {
        let mut slots = Slots::new(3);
        let first = slots.take().unwrap();
        slots.take().unwrap();
        slots.free(first);
        assert_eq!(slots.take().unwrap(), EndpointId(3));
        assert_eq!(slots.take().unwrap(), first);
        assert_eq!(slots.take(), None);
    }
}
