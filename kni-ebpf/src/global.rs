//! Defines global functions, which the verifier checks once.
//!
//! VERIFIER: it verifies an ordinary function anew for each state of its callers, a global one only once. In return it
//! knows only the types of the arguments: pointers must be compared with null, and the result is a number.

/// A global function `name` that calls `inner` with the same arguments and returns its decision's word.
macro_rules! global {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $pointer:ty as $access:ident),+ $(,)?) => $inner:ident) => {
        $(#[$doc])*
        // SAFETY: nothing else defines the name.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $name(skb: *mut aya_ebpf::bindings::__sk_buff, $($argument: $pointer),+) -> u32 {
            $(
                // SAFETY: the caller's own memory, or a row that stays mapped; nothing else touches it meanwhile.
                let Some($argument) = (unsafe { $argument.$access() }) else {
                    return Decision::drop(Verdict::NoEndpoint).word();
                };
            )+
            $inner(&TcContext::new(skb), $($argument),+).word()
        }
    };
}
pub(crate) use global;
