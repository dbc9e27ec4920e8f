//! Attaches the programs to the host interfaces of endpoints and reports the attached ones.

use aya::programs::TestRun as _;
use kni_model::{EndpointId, view::ProgramView};

use super::{
    Dataplane, DataplaneError, Hook,
    hook::{self, AttachPoint},
    lock, object, program,
    xdp::{self, NotAttached},
};

impl Dataplane {
    /// The hook in use.
    pub fn hook(&self) -> Hook {
        self.hook
    }

    /// Attaches both programs to a host interface, pinned where the hook has links. TCX: about 16 ms per direction
    /// under rtnl (an RCU grace period), so blocking; clsact: about 40 us.
    pub fn attach(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        self.attach_by(self.hook, ifname, endpoint)
    }

    /// As [`Self::attach`], but by the hook that is faster to attach: clsact filters instead of TCX links, unless the
    /// operator demands TCX. [`Self::upgrade`] replaces them later.
    pub fn attach_provisionally(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        if !self.may_be_provisional {
            return self.attach(ifname, endpoint);
        }
        self.attach_by(Hook::Clsact, ifname, endpoint)?;
        lock(&self.provisional).insert(endpoint);
        Ok(())
    }

    fn attach_by(&self, hook: Hook, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        for point in AttachPoint::of_endpoint(&self.pins, ifname, endpoint) {
            hook::attach(&mut programs, hook, &point)?;
            self.hold_link(hook, &point);
        }
        Ok(())
    }

    /// Holds the link of an attach point, where the hook has links.
    pub(super) fn hold_link(&self, hook: Hook, point: &AttachPoint<'_>) {
        match hook {
            Hook::Tcx => self.held.hold(&point.path),
            Hook::Clsact => self.held.release(&point.path),
        }
    }

    /// Whether the endpoint runs on clsact filters until [`Self::upgrade`].
    pub fn is_provisional(&self, endpoint: EndpointId) -> bool {
        lock(&self.provisional).contains(&endpoint)
    }

    /// How many endpoints run on clsact filters until [`Self::upgrade`].
    pub fn provisional_count(&self) -> usize {
        lock(&self.provisional).len()
    }

    /// Replaces clsact filters by TCX links. The links work before the filters are removed, so that each packet passes
    /// exactly one program. Blocking, as [`Self::attach`].
    pub fn upgrade(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        self.adopt(ifname, endpoint)?;
        lock(&self.provisional).remove(&endpoint);
        Ok(())
    }

    /// Moves a host interface that an earlier agent attached to this agent's programs (`bpf_link_update`, atomic, about
    /// 1 us); attaches missing ones.
    pub fn adopt(&self, ifname: &str, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        lock(&self.endpoints).hand_over(endpoint, true)?;
        let mut points = AttachPoint::of_endpoint(&self.pins, ifname, endpoint).into_iter();
        let adopted = points.try_for_each(|point| {
            hook::adopt(&mut programs, self.hook, &point)?;
            self.hold_link(self.hook, &point);
            Ok(())
        });
        lock(&self.endpoints).hand_over(endpoint, false)?;
        adopted
    }

    /// Attaches `xdp_pod` to a host interface, in the driver and before the other programs; a link of an earlier agent
    /// is taken over in place. The pod end must be prepared before: the packets it sends must have finished checksums,
    /// and it must accept frames that are no `sk_buff`s. About 20 us for a new link. Idempotent.
    pub fn attach_xdp(&self, ifname: &str, ifindex: u32, endpoint: EndpointId) -> Result<(), DataplaneError> {
        xdp::set_pod(&mut lock(&self.programs), &self.pins, ifname, ifindex, endpoint)?;
        self.held.hold(&self.pins.xdp_link(endpoint));
        Ok(())
    }

    /// Removes the pins of an endpoint. Call it after the interface is gone: while it exists, this detaches, which
    /// costs as much as attaching.
    pub fn unpin(&self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        lock(&self.provisional).remove(&endpoint);
        for path in self.pins.links(endpoint) {
            self.held.release(&path);
        }
        self.pins.remove_links(endpoint)
    }

    /// Removes pins of other layout versions. Call it once every interface has been adopted: until then their programs
    /// use those maps.
    pub fn remove_other_layouts(&self) -> Result<(), DataplaneError> {
        self.pins.remove_other_layouts()
    }

    /// Endpoints that have pinned links, of any agent.
    pub fn pinned_endpoints(&self) -> Result<Vec<EndpointId>, DataplaneError> {
        self.pins.linked_endpoints()
    }

    /// Runs a program on one packet without an interface (`BPF_PROG_TEST_RUN`), for tests and benchmarks.
    pub fn test_run(
        &self,
        program: &'static str,
        options: aya::TestRunOptions<'_>,
    ) -> Result<aya::TestRunResult, DataplaneError> {
        let mut programs = lock(&self.programs);
        let ran = if [program::XDP_POD, program::XDP_UPLINK].contains(&program) {
            object::xdp(&mut programs, program)?.test_run(options)
        } else {
            object::classifier(&mut programs, program)?.test_run(options)
        };
        ran.map_err(|error| DataplaneError::Load {
            program,
            reason: format!("test run: {error}"),
        })
    }

    /// The programs at a host interface, as the kernel reports them, and problems.
    pub fn programs(&self, ifname: &str, endpoint: EndpointId) -> (Vec<ProgramView>, Vec<String>) {
        let hook = if self.is_provisional(endpoint) {
            Hook::Clsact
        } else {
            self.hook
        };
        let points = AttachPoint::of_endpoint(&self.pins, ifname, endpoint);
        hook::inspect(&self.program_ids, hook, &points)
    }

    /// `xdp_pod` at a host interface that should have it.
    pub fn xdp_program(&self, ifname: &str, ifindex: u32, endpoint: EndpointId) -> Result<ProgramView, NotAttached> {
        xdp::inspect_pod(&self.program_ids, &self.pins, ifname, ifindex, endpoint)
    }
}
