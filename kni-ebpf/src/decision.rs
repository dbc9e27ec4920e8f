//! What a program does with a packet, as one word.
//!
//! VERIFIER: an enum with a payload would be clearer, but LLVM builds its unused halves from whatever a register holds,
//! also from pointers, and the verifier refuses arithmetic on those. One integer leaves nothing unused.

use kni_common::Verdict;

/// A decision: drop for a reason, or where to go.
#[derive(Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Decision(u32);

const LOCAL: u32 = 0x1000_0000;
const KIND: u32 = 0xf000_0000;
const DROP: u32 = 0x8000_0000;

impl Decision {
    /// No decision: ask further.
    pub const NONE: Self = Self(0);
    /// To the node's stack.
    pub const STACK: Self = Self(0x2000_0000);
    /// Back to the pod, rewritten into an answer.
    pub const ANSWER: Self = Self(0x3000_0000);
    /// Link control that ends here.
    pub const ABSORB: Self = Self(0x4000_0000);
    /// From the stack to the pod.
    pub const DELIVER: Self = Self(0x5000_0000);

    /// Out of the node through the uplink.
    pub const UPLINK: Self = Self(0x6000_0000);
    /// The same, once an address and a port have been found.
    pub const MASQUERADE: Self = Self(0x7000_0000);

    /// To a local endpoint.
    #[inline(always)]
    pub const fn local(endpoint: u32) -> Self {
        Self(LOCAL | (endpoint & !KIND))
    }

    /// Nowhere.
    #[inline(always)]
    pub const fn drop(reason: Verdict) -> Self {
        Self(DROP | reason as u32)
    }

    /// The flow was judged again: treat the packet as one of a current flow.
    pub const AGAIN: Self = Self(0x7100_0000);

    /// As a plain number, for functions that are called as C calls them.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        self.0
    }

    /// What [`Self::word`] gave.
    #[inline(always)]
    pub const fn from_word(word: u32) -> Self {
        Self(word)
    }

    /// The endpoint of a local decision.
    #[inline(always)]
    pub const fn endpoint(self) -> Option<u32> {
        if self.0 & KIND == LOCAL {
            Some(self.0 & !KIND)
        } else {
            None
        }
    }

    /// The code of the reason, where it is a drop.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the code")]
    pub const fn reason(self) -> Option<u16> {
        if self.0 & KIND == DROP {
            Some(self.0 as u16)
        } else {
            None
        }
    }

    /// What counters and events call a decision that is no drop.
    #[inline(always)]
    pub const fn verdict(self) -> Verdict {
        if self.endpoint().is_some() {
            return Verdict::Redirected;
        }
        match self {
            Self::STACK => Verdict::PassedToStack,
            Self::ANSWER => Verdict::Answered,
            Self::DELIVER => Verdict::Delivered,
            Self::UPLINK => Verdict::Masqueraded,
            _ => Verdict::Absorbed,
        }
    }

    /// Whether nothing was decided.
    #[inline(always)]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// The value, or the end of the function with the drop.
macro_rules! attempt {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(reason) => return $crate::decision::Decision::drop(reason),
        }
    };
}
pub(crate) use attempt;
