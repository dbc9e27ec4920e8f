//! Encodes the decision on a packet as one word.
//!
//! VERIFIER: an enum with a payload would be clearer, but LLVM fills its unused halves from any register, also from
//! pointers, and the verifier refuses arithmetic on those. One integer leaves nothing unused.

use kni_common::Verdict;

/// A decision: drop for a reason, or a destination. The upper four bits hold its kind.
#[derive(Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Decision(u32);

const LOCAL: u32 = 0x1000_0000;
const KIND: u32 = 0xf000_0000;
const DROP: u32 = 0x8000_0000;

impl Decision {
    /// No decision yet.
    pub const NONE: Self = Self(0);
    /// To the node's stack.
    pub const STACK: Self = Self(0x2000_0000);
    /// Back to the pod, rewritten into a reply.
    pub const ANSWER: Self = Self(0x3000_0000);
    /// The flow was re-evaluated: treat the packet as one of a current flow.
    pub const RENEWED: Self = Self(0x4000_0000);
    /// From the stack to the pod.
    pub const DELIVER: Self = Self(0x5000_0000);
    /// Out of the node through the uplink.
    pub const UPLINK: Self = Self(0x6000_0000);
    /// The same, once an address and a port have been allocated.
    pub const MASQUERADE: Self = Self(0x7000_0000);
    /// Link control that ends here. Not among the kinds below `0x8000_0000`, whose comparison takes one instruction.
    pub const ABSORB: Self = Self(0x9000_0000);

    /// To a local endpoint.
    #[inline(always)]
    pub const fn local(endpoint: u32) -> Self {
        Self(LOCAL | (endpoint & !KIND))
    }

    /// Drop.
    #[inline(always)]
    pub const fn drop(reason: Verdict) -> Self {
        Self(DROP | reason as u32)
    }

    /// As a plain number, for functions with the C calling convention.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        self.0
    }

    /// The inverse of [`Self::word`].
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

    /// The code of the reason, if it is a drop.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the code")]
    pub const fn reason(self) -> Option<u16> {
        if self.0 & KIND == DROP {
            Some(self.0 as u16)
        } else {
            None
        }
    }

    /// The verdict in counters and events, if it is not a drop.
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

    /// A drop where nothing was decided.
    #[inline(always)]
    pub const fn or_drop(self, reason: Verdict) -> Self {
        if self.is_none() { Self::drop(reason) } else { self }
    }

    /// Whether nothing was decided.
    #[inline(always)]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// Evaluates to the value, or returns from the function with the drop.
macro_rules! attempt {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(reason) => return $crate::decision::Decision::drop(reason),
        }
    };
}
pub(crate) use attempt;
