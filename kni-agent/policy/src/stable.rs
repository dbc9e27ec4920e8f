//! Assigns numbers that are the same after every restart: hashes of content, with tables that resolve collisions.

use std::{
    collections::{HashMap, VecDeque},
    hash::{Hash, Hasher},
    sync::Arc,
};

use fnv::FnvHasher;

/// Maximum number of retired entries, so that late events can still be resolved to names.
const MAX_RETIRED: usize = 1024;

/// A hash of content that is stable between runs of one build. Another build may hash differently: then the first plan
/// moves everything to new numbers, which takes time but drops no packet.
pub(super) fn hash(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = FnvHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The number of content: at least `first`, and the next one that is free after a collision.
pub(super) fn number(value: &(impl Hash + ?Sized), first: u32, taken: impl Fn(u32) -> bool) -> u32 {
    let hash = hash(value);
    let folded = (hash ^ (hash >> 32)) & u64::from(u32::MAX);
    let mut number = u32::try_from(folded).unwrap_or(first).max(first);
    while taken(number) {
        number = number.checked_add(1).unwrap_or(first);
    }
    number
}

/// Content by number. Equal content has one number; different contents never share one.
#[derive(Debug)]
pub(super) struct Interner<K> {
    first: u32,
    numbers: HashMap<Arc<K>, u32>,
    contents: HashMap<u32, Arc<K>>,
    retired: VecDeque<(u32, Arc<K>)>,
}

impl<K: Hash + Eq> Interner<K> {
    /// An empty table with numbers from `first`.
    pub(super) fn new(first: u32) -> Self {
        Self {
            first,
            numbers: HashMap::new(),
            contents: HashMap::new(),
            retired: VecDeque::new(),
        }
    }

    /// The number of the content; assigned on first use.
    pub(super) fn intern(&mut self, content: K) -> u32 {
        if let Some(number) = self.numbers.get(&content) {
            return *number;
        }
        let number = number(&content, self.first, |number| self.contents.contains_key(&number));
        let content = Arc::new(content);
        self.numbers.insert(Arc::clone(&content), number);
        self.contents.insert(number, content);
        number
    }

    /// The content of a number, also if it was retired recently.
    pub(super) fn get(&self, number: u32) -> Option<&Arc<K>> {
        let mut retired = self.retired.iter().rev();
        self.contents
            .get(&number)
            .or_else(|| retired.find(|(gone, _)| *gone == number).map(|(_, content)| content))
    }

    /// Records content under a temporary number.
    pub(super) fn also(&mut self, number: u32, content: Arc<K>) {
        if self.retired.len() >= MAX_RETIRED {
            self.retired.pop_front();
        }
        self.retired.push_back((number, content));
    }

    /// Retires unused entries.
    pub(super) fn retain(&mut self, used: impl Fn(u32) -> bool) {
        let gone: Vec<u32> = self.contents.keys().copied().filter(|number| !used(*number)).collect();
        for number in gone {
            if let Some(content) = self.contents.remove(&number) {
                self.numbers.remove(&content);
                self.also(number, content);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Content whose hash always collides.
    #[derive(Debug, PartialEq, Eq)]
    struct Colliding(&'static str);

    impl Hash for Colliding {
        fn hash<H: Hasher>(&self, state: &mut H) {
            0_u8.hash(state);
        }
    }

    #[test]
    fn contents_that_collide_get_numbers_of_their_own() {
        let mut interner = Interner::new(2);
        let a = interner.intern(Colliding("a"));
        let b = interner.intern(Colliding("b"));
        assert_ne!(a, b);
        assert_eq!(interner.intern(Colliding("a")), a);
        assert_eq!(interner.get(b).unwrap().0, "b");
    }

    #[test]
    fn retired_contents_are_remembered_for_a_while() {
        let mut interner = Interner::new(1);
        let first = interner.intern(0_usize);
        interner.retain(|_| false);
        assert_eq!(**interner.get(first).unwrap(), 0);
        for content in 1..=MAX_RETIRED {
            interner.intern(content);
        }
        interner.retain(|_| false);
        assert!(interner.get(first).is_none());
        assert_eq!(interner.intern(0), first, "the same content gets the same number again");
    }

    #[test]
    fn numbers_do_not_depend_on_the_run() {
        // A changed value here means that an upgrade moves every set to a new number.
        assert_eq!(hash(&0_u8), 0xaf63_bd4c_8601_b7df);
        assert!(number(&"x", 2, |_| false) >= 2);
        assert_ne!(number(&"x", 2, |_| false), number(&"y", 2, |_| false));
    }
}
