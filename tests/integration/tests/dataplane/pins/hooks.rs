//! Tests that one hook takes the place of the other.

use anyhow::{Result, ensure};
use kni_dataplane::{Dataplane, DataplaneOptions, HookChoice};
use kni_integration::{
    Namespaces,
    programs::{Programs, options},
    require,
};
use nix::net::if_::if_nametoindex;

/// Of two programs at the egress of the uplink the second would drop what the first one lets through.
#[test]
fn links_take_the_place_of_filters_at_the_uplink() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("hooks", 4096, |programs| {
        drop(programs);
        let node = Namespaces::current("hooks")?;
        let index = if_nametoindex("uplink0")?;
        for (hook, filters) in [(HookChoice::Clsact, 1), (HookChoice::Tcx, 0)] {
            let (dataplane, _events) = Dataplane::open(&DataplaneOptions { hook, ..options(4096)? })?;
            dataplane.attach_uplink("uplink0", index)?;
            let (views, _, problems) = dataplane.uplink_programs("uplink0", index);
            ensure!(problems.is_empty() && views.len() == 2, "{hook:?}: {problems:?}");
            for side in ["ingress", "egress"] {
                let shown = node.run("tc", &["filter", "show", "dev", "uplink0", side])?;
                let found = shown.lines().filter(|line| line.contains("handle")).count();
                ensure!(found == filters, "{hook:?}, {side}: {shown}");
            }
        }
        Ok(())
    })
}
