//! Declares the key and value types of maps, with a compile-time proof that they have no padding.

/// Declares key and value types of maps. With feature `user` it derives zerocopy's traits, which compile only for types
/// without padding and without invalid bit patterns; this makes the `aya::Pod` implementation sound. A size assertion
/// alone would not detect padding that replaces a removed field.
macro_rules! map_types {
    ($($(#[$meta:meta])* pub struct $name:ident { $($body:tt)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(
            feature = "user",
            derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
        )]
        pub struct $name { $($body)* }

        #[cfg(feature = "user")]
        // SAFETY: `repr(C)`, `Copy`, and zerocopy's derives above compile only for types in which every byte is
        // initialised and every bit pattern is valid.
        unsafe impl aya::Pod for $name {}
    )*};
}
pub(crate) use map_types;
