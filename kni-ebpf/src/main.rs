//! Defines the entry point of each program, the licence and the panic handler of the ELF.

#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod entry {
    use aya_ebpf::{
        macros::{cgroup_sock_addr, classifier, xdp},
        programs::{SockAddrContext, TcContext, XdpContext},
    };
    use kni_ebpf::programs::{self, node_socket};

    /// Run by the agent alone.
    #[classifier]
    pub(crate) fn clock(ctx: TcContext) -> i32 {
        programs::clock::run(&ctx)
    }

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

    /// `connect` of IPv4 sockets.
    #[cgroup_sock_addr(connect4)]
    pub(crate) fn node_connect4(ctx: SockAddrContext) -> i32 {
        node_socket::redirect4(&ctx);
        node_socket::CONTINUE
    }

    /// `connect` of IPv6 sockets.
    #[cgroup_sock_addr(connect6)]
    pub(crate) fn node_connect6(ctx: SockAddrContext) -> i32 {
        node_socket::redirect6(&ctx);
        node_socket::CONTINUE
    }

    /// `sendmsg` of IPv4 sockets, UDP only.
    #[cgroup_sock_addr(sendmsg4)]
    pub(crate) fn node_sendmsg4(ctx: SockAddrContext) -> i32 {
        node_socket::redirect4(&ctx);
        node_socket::CONTINUE
    }

    /// `sendmsg` of IPv6 sockets, UDP only.
    #[cgroup_sock_addr(sendmsg6)]
    pub(crate) fn node_sendmsg6(ctx: SockAddrContext) -> i32 {
        node_socket::redirect6(&ctx);
        node_socket::CONTINUE
    }

    /// `recvmsg` of IPv4 sockets, UDP only.
    #[cgroup_sock_addr(recvmsg4)]
    pub(crate) fn node_recvmsg4(ctx: SockAddrContext) -> i32 {
        node_socket::restore4(&ctx);
        node_socket::CONTINUE
    }

    /// `recvmsg` of IPv6 sockets, UDP only.
    #[cgroup_sock_addr(recvmsg6)]
    pub(crate) fn node_recvmsg6(ctx: SockAddrContext) -> i32 {
        node_socket::restore6(&ctx);
        node_socket::CONTINUE
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
