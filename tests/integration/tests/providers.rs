//! Networks whose interfaces are no veth pairs of ours: macvlan, devices of the node, taps, and what CNI plugins make.
//! About 90 s of wall clock on two CPUs, most of it kills.

#[expect(dead_code, reason = "what other programs of tests need of it")]
mod watched;

mod providers {
    mod devices;
    mod kills;
    mod plugins;
    mod policy;
    mod scene;
}
