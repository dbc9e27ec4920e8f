//! Finds programs that another process detached, and pins again what lost its pin.

use kni_model::EndpointId;

use super::{
    Dataplane, DataplaneError, Hook,
    hook::{self, AttachPoint},
    lock,
    pin::Pins,
    program::XDP_POD,
};

impl Dataplane {
    /// Whether the programs of this agent are attached at a host interface, with TCX: two or three system calls. With
    /// clsact the kernel has no link to ask; see `kni-netlink`.
    pub fn is_attached(&self, ifname: &str, ifindex: u32, endpoint: EndpointId, xdp: bool) -> bool {
        if self.hook == Hook::Tcx && !self.is_provisional(endpoint) {
            let points = AttachPoint::of_endpoint(&self.pins, ifname, endpoint);
            if !self.are_attached(&points, ifindex) {
                return false;
            }
        }
        !xdp || self.xdp_is_attached(ifname, ifindex, endpoint)
    }

    /// Attaches the programs of an endpoint again, whichever of them another process has detached. Where the operator
    /// does not demand TCX, filters come first: they are attached within microseconds. Blocking, as [`Self::attach`].
    pub fn attach_again(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        if self.may_be_provisional {
            // For a moment there may be two copies of a program.
            lock(&self.endpoints).hand_over(endpoint, true)?;
            if let Err(error) = self.attach_provisionally(ifname, endpoint) {
                tracing::debug!(ifname, %error, "no filter can be attached; links are");
            }
        }
        self.upgrade(ifname, endpoint)
    }

    /// Whether the endpoint's programs are filters of the clsact qdisc.
    pub fn is_on_clsact(&self, endpoint: EndpointId) -> bool {
        self.hook == Hook::Clsact || self.is_provisional(endpoint)
    }

    /// Whether the TC programs are attached at the uplink; always true without TCX.
    pub fn uplink_is_attached(&self, ifname: &str, ifindex: u32) -> bool {
        self.hook != Hook::Tcx || self.are_attached(&AttachPoint::of_uplink(&self.pins, ifname), ifindex)
    }

    fn are_attached(&self, points: &[AttachPoint<'_>], ifindex: u32) -> bool {
        let attached = |point: &AttachPoint<'_>| {
            let link = self.held.link(&point.path)?;
            let program = self.program_ids.get(point.direction.as_str())?;
            Some(link.runs(*program, ifindex))
        };
        let known: Option<Vec<bool>> = points.iter().map(attached).collect();
        match known {
            Some(attached) => attached.into_iter().all(|attached| attached),
            // Without a descriptor the pins and the interface are compared.
            None => hook::inspect(&self.program_ids, self.hook, points).1.is_empty(),
        }
    }

    fn xdp_is_attached(&self, ifname: &str, ifindex: u32, endpoint: EndpointId) -> bool {
        let held = self.held.link(&self.pins.xdp_link(endpoint));
        match held.zip(self.program_ids.get(XDP_POD)) {
            Some((link, program)) => link.runs(*program, ifindex),
            None => self.xdp_program(ifname, ifindex, endpoint).is_ok(),
        }
    }

    /// Pins maps and links again whose pins were removed or whose file system was unmounted; returns how many. While
    /// every pin exists, this costs one system call for each.
    pub fn restore_pins(&self) -> Result<usize, DataplaneError> {
        if self.held.missing().is_empty() {
            return Ok(0);
        }
        Pins::prepare(&self.root)?;
        let pinned = self.held.pin_again();
        pinned.map_err(DataplaneError::pin(&self.root, "pinning again"))
    }
}
