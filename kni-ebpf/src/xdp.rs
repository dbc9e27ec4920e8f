//! Access to the frame of an XDP program.

use core::mem::size_of;

use aya_ebpf::{helpers::generated::bpf_xdp_get_buff_len, programs::XdpContext};

/// Index of the interface whose hook runs.
#[inline(always)]
pub fn ifindex(ctx: &XdpContext) -> u32 {
    // SAFETY: the context pointer that the kernel hands to the program is valid while it runs.
    unsafe { (*ctx.ctx).ingress_ifindex }
}

/// Bytes of the frame in all its buffers.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a frame is shorter than 4 GiB")]
pub fn length(ctx: &XdpContext) -> u32 {
    // SAFETY: a helper on the program's own context.
    unsafe { bpf_xdp_get_buff_len(ctx.ctx) as u32 }
}

/// A pointer to `T` at a constant offset, if all of it lies in the first buffer of the frame.
#[inline(always)]
pub fn at<T>(ctx: &XdpContext, offset: usize) -> Option<*mut T> {
    let start = ctx.data() + offset;
    // VERIFIER: this comparison gives the pointer its range; it must come right before the use.
    if start + size_of::<T>() > ctx.data_end() {
        return None;
    }
    Some(start as *mut T)
}

/// Copies `T` from a constant offset, if all of it lies in the first buffer of the frame.
#[inline(always)]
pub fn read<T: Copy>(ctx: &XdpContext, offset: usize) -> Option<T> {
    // SAFETY: `at` proved that all of `T` lies in the packet, and any bytes are a valid `T` here.
    at::<T>(ctx, offset).map(|start| unsafe { *start })
}
