//! Crafted frames through the programs, with the verdict each must get: written down here, said by the model, and
//! counted by the kernel.

mod frames {
    mod delivery;
    mod extensions;
    mod fragments;
    mod icmp;
    mod lengths;
    mod lifecycle;
    mod link;
    mod options;
    mod spoofing;
    mod stack;
    mod table;
    mod truncated;
}
