//! Finds the name of an interface by its index.

/// The name of the interface with an index, in the caller's network namespace; `None` where there is none, or the
/// kernel does not answer.
pub fn interface_name(ifindex: u32) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "an empty name is refused below")]
    let name = nix::net::if_::if_indextoname(ifindex);
    name.ok()?.into_string().ok().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::interface_name;

    #[test]
    fn only_an_interface_that_exists_has_a_name() {
        assert_eq!(interface_name(1).as_deref(), Some("lo"));
        assert_eq!(interface_name(0), None);
        assert_eq!(interface_name(i32::MAX.unsigned_abs()), None);
    }
}
