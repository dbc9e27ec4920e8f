//! Tests the programs of the dataplane: crafted and random frames through `BPF_PROG_TEST_RUN`, pins, XDP.

mod frames;
mod fuzz_frames;
mod instructions;
mod masquerade_claims;
mod pins;
mod policy_random;
mod remote;
mod xdp_pod;
