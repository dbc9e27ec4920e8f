//! Tests the programs of the dataplane: crafted and random frames through `BPF_PROG_TEST_RUN`, pins, XDP.

mod frames;
mod fuzz_frames;
mod pins;
mod policy_random;
mod xdp_pod;
