//! Orders kernel modules so that each follows its dependencies, by the rules of modules.dep.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

/// Last part of the names of compressed modules.
pub(super) const COMPRESSED: &str = ".xz";

/// The files of `wanted` and of all their dependencies, in loading order.
///
/// `dependencies` is the text of modules.dep (`a.ko: b.ko c.ko`, paths), `builtin` the text of modules.builtin, whose
/// modules need no loading. An unknown module is an error.
pub(super) fn load_order(dependencies: &str, builtin: &str, wanted: &[&str]) -> Result<Vec<String>> {
    let lines: BTreeMap<&str, Vec<&str>> = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needs)| (path, needs.split_whitespace().collect()))
        .collect();
    let mut order = Vec::new();
    for name in wanted {
        if let Some(path) = lines.keys().find(|path| is_module(path, name)) {
            visit(path, &lines, &mut order, &mut Vec::new())?;
        } else if !builtin.lines().any(|path| is_module(path, name)) {
            bail!("the kernel has no module `{name}`");
        }
    }
    Ok(order)
}

fn visit<'a>(
    path: &'a str,
    lines: &BTreeMap<&'a str, Vec<&'a str>>,
    order: &mut Vec<String>,
    above: &mut Vec<&'a str>,
) -> Result<()> {
    if order.iter().any(|loaded| loaded == path) {
        return Ok(());
    }
    if above.contains(&path) {
        bail!("the modules {} need each other", above.join(", "));
    }
    let Some(needs) = lines.get(path) else {
        bail!("modules.dep names {path} but has no line for it")
    };
    above.push(path);
    for need in needs {
        visit(need, lines, order, above)?;
    }
    above.pop();
    order.push(path.to_owned());
    Ok(())
}

/// Whether the file `path` is the module `name`; the kernel treats `-` and `_` as equal.
fn is_module(path: &str, name: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.strip_suffix(COMPRESSED)
        .unwrap_or(file)
        .strip_suffix(".ko")
        .is_some_and(|stem| stem.replace('-', "_") == name.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "net/veth.ko:\n\
                                net/vxlan/vxlan.ko: net/ip6_udp_tunnel.ko net/udp_tunnel.ko\n\
                                net/ip6_udp_tunnel.ko:\n\
                                net/udp_tunnel.ko: lib/crc-base.ko\n\
                                lib/crc-base.ko:\n\
                                a.ko: b.ko\nb.ko: a.ko\n";

    #[test]
    fn dependencies_come_first_and_once() {
        let order = load_order(DEPENDENCIES, "", &["vxlan", "veth", "udp_tunnel"]).unwrap();
        assert_eq!(
            order,
            [
                "net/ip6_udp_tunnel.ko",
                "lib/crc-base.ko",
                "net/udp_tunnel.ko",
                "net/vxlan/vxlan.ko",
                "net/veth.ko"
            ]
        );
    }

    #[test]
    fn a_dash_in_a_file_name_is_an_underscore() {
        assert_eq!(
            load_order(DEPENDENCIES, "", &["crc_base"]).unwrap(),
            ["lib/crc-base.ko"]
        );
    }

    #[test]
    fn a_module_may_be_compressed() {
        let order = load_order("a.ko.xz: b.ko.xz\nb.ko.xz:\n", "", &["a"]).unwrap();
        assert_eq!(order, ["b.ko.xz", "a.ko.xz"]);
    }

    #[test]
    fn a_builtin_module_needs_no_loading() {
        assert_eq!(
            load_order("", "kernel/net/packet/af_packet.ko\n", &["af_packet"]).unwrap(),
            Vec::<String>::new()
        );
    }

    #[test]
    fn unknown_and_circular_modules_are_errors() {
        assert_eq!(
            load_order(DEPENDENCIES, "", &["eth"]).unwrap_err().to_string(),
            "the kernel has no module `eth`"
        );
        assert!(
            load_order(DEPENDENCIES, "", &["a"])
                .unwrap_err()
                .to_string()
                .contains("need each other")
        );
    }
}
