//! Attaches the programs of the tunnel device.

use super::{
    Dataplane, DataplaneError,
    hook::{self, AttachPoint, Target},
    lock, object,
};

impl Dataplane {
    /// Attaches `from_overlay` and `to_overlay` to the tunnel device, which must hand out the metadata of tunnels
    /// (`external`). From then on no packet of the device reaches the node's stack. The first call loads the program.
    /// Blocking: some ten milliseconds.
    pub fn attach_overlay(&self, ifname: &str) -> Result<(), DataplaneError> {
        let mut programs = lock(&self.programs);
        for point in AttachPoint::of_overlay(&self.pins, ifname) {
            let target = Target {
                program: point.direction.as_str(),
                ifname,
            };
            let classifier = object::classifier(&mut programs, target.program)?;
            if classifier.fd().is_err() {
                classifier.load().map_err(object::rejected(target.program))?;
            }
            hook::adopt(&mut programs, self.hook, &point)?;
            self.hold_link(self.hook, &point);
        }
        Ok(())
    }
}
