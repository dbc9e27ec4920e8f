//! Defines the entry point of each program, the licence and the panic handler of the ELF.

#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod entry {
    use aya_ebpf::{
        macros::{classifier, xdp},
        programs::{TcContext, XdpContext},
    };
    use kni_ebpf::programs;

    /// TC ingress of a pod's host interface.
    #[classifier]
    pub(crate) fn from_pod(ctx: TcContext) -> i32 {
        programs::from_pod::run(&ctx)
    }

    /// TC egress of a pod's host interface.
    #[classifier]
    pub(crate) fn to_pod(ctx: TcContext) -> i32 {
        programs::to_pod::run(&ctx)
    }

    /// TC ingress of the uplink.
    #[classifier]
    pub(crate) fn from_uplink(ctx: TcContext) -> i32 {
        programs::from_uplink::run(&ctx)
    }

    /// TC egress of the uplink.
    #[classifier]
    pub(crate) fn to_uplink(ctx: TcContext) -> i32 {
        programs::to_uplink::run(&ctx)
    }

    /// TC ingress of the tunnel device.
    #[classifier]
    pub(crate) fn from_overlay(ctx: TcContext) -> i32 {
        programs::from_overlay::run(&ctx)
    }

    /// TC egress of the tunnel device.
    #[classifier]
    pub(crate) fn to_overlay(ctx: TcContext) -> i32 {
        programs::to_overlay::run(&ctx)
    }

    /// XDP of the host interface of a pod whose network wants it.
    #[xdp(frags)]
    pub(crate) fn xdp_pod(ctx: XdpContext) -> u32 {
        programs::xdp_pod::run(&ctx)
    }

    /// XDP of the uplink.
    #[xdp]
    pub(crate) fn xdp_uplink(ctx: XdpContext) -> u32 {
        programs::xdp_uplink::run(&ctx)
    }

    #[panic_handler]
    fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
        loop {}
    }

    // SAFETY: the kernel's loaders look for this section and name; nothing else defines them.
    #[unsafe(link_section = "license")]
    // SAFETY: as above.
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
}

/// Nothing to run on other targets: this lets the workspace build and lint on stable.
#[cfg(not(target_arch = "bpf"))]
fn main() {}
