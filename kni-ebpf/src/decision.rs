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
const OWNER: u32 = 0xa000_0000;
// The highest two, so that one comparison finds both.
const REMOTE: u32 = 0xe000_0000;
const ROUTED: u32 = 0xf000_0000;
const KIND: u32 = 0xf000_0000;
const DROP: u32 = 0x8000_0000;

impl Decision {
    /// No decision yet.
    pub const NONE: Self = Self(0);
    /// To the node's stack.
    pub const STACK: Self = Self(0x2000_0000);
    /// Back to the pod, rewritten into a reply.
    pub const REPLY: Self = Self(0x3000_0000);
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
    /// To a pod of another node, by a function of its own. Like a drop, it ends other evaluation; no reason has the
    /// code 0.
    pub const OTHER_NODE: Self = Self(DROP);

    /// To a local endpoint.
    #[inline(always)]
    pub const fn local(endpoint: u32) -> Self {
        Self(LOCAL | (endpoint & !KIND))
    }

    /// To or from a pod of another node, by its number: with `overlay` through the tunnel.
    #[inline(always)]
    pub const fn node(number: u32, overlay: bool) -> Self {
        let kind = if overlay { REMOTE } else { ROUTED };
        Self(kind | (number & !KIND))
    }

    /// The number of the node of [`Self::node`].
    #[inline(always)]
    pub const fn number(self) -> Option<u32> {
        if self.0 >= REMOTE { Some(self.0 & !KIND) } else { None }
    }

    /// Out of the cluster by another node, by its number, which is responsible for the packet's source after
    /// translation.
    #[inline(always)]
    pub const fn owner(number: u32) -> Self {
        Self(OWNER | (number & !KIND))
    }

    /// The number of the node of [`Self::owner`].
    #[inline(always)]
    pub const fn answering(self) -> Option<u32> {
        if self.0 & KIND == OWNER {
            Some(self.0 & !KIND)
        } else {
            None
        }
    }

    /// Whether the way to the node is the tunnel.
    #[inline(always)]
    #[must_use]
    pub const fn is_overlay(self) -> bool {
        self.0 & KIND == REMOTE
    }

    /// Drop.
    #[inline(always)]
    pub const fn drop(reason: Verdict) -> Self {
        Self(DROP | reason as u32)
    }

    /// Drop for a reason that may come from a global function.
    #[inline(always)]
    pub fn refused(reason: impl Into<Reason>) -> Self {
        let Reason(code) = reason.into();
        Self(DROP | code)
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
            Self::REPLY => Verdict::Answered,
            Self::DELIVER => Verdict::Delivered,
            Self::UPLINK => Verdict::Masqueraded,
            _ if self.answering().is_some() => Verdict::Tunnelled,
            _ if self.number().is_some() && self.is_overlay() => Verdict::Tunnelled,
            _ if self.number().is_some() => Verdict::Routed,
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

/// The code of a [`Verdict`], as a global function returns it.
#[derive(Clone, Copy)]
pub struct Reason(u32);

impl Reason {
    /// From what a global function returns: 0 is success.
    #[inline(always)]
    pub const fn check(code: u32) -> Result<(), Self> {
        if code == 0 { Ok(()) } else { Err(Self(code & 0xffff)) }
    }

    /// From what a global function returns that has a value in the lower half, or [`Self::refusal`].
    #[inline(always)]
    pub const fn value(word: u32) -> Result<u32, Self> {
        if word >> 16 == 0 {
            Ok(word)
        } else {
            Err(Self(word & 0xffff))
        }
    }

    /// What [`Self::value`] takes for this reason.
    #[inline(always)]
    #[must_use]
    pub const fn refusal(self) -> u32 {
        self.0 | DROP
    }

    /// What a global function returns.
    #[inline(always)]
    pub const fn code(result: Result<(), Verdict>) -> u32 {
        match result {
            Ok(()) => 0,
            Err(reason) => reason as u32,
        }
    }

    /// The code.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        self.0
    }
}

impl From<Verdict> for Reason {
    #[inline(always)]
    fn from(reason: Verdict) -> Self {
        Self(reason as u32)
    }
}

/// Evaluates to the value, or returns from the function with the drop.
macro_rules! attempt {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(reason) => return $crate::decision::Decision::refused(reason),
        }
    };
}
pub(crate) use attempt;
