//! Starts containerd in the node, and imports images into it.

use std::path::Path;

use anyhow::{Context as _, Result};

use super::{LocalNode, PATIENCE, Part, output};
use crate::{
    config::{CONTAINERD_SOCKET, FOLDER},
    cri::Cri,
    image,
};

impl LocalNode {
    /// Starts containerd, waits until it serves, and imports the images [`image::PAUSE`] and [`image::PROBE`].
    pub fn start_containerd(&mut self) -> Result<()> {
        self.start(Part::Containerd)?;
        self.wait_for_containerd()?;
        for (reference, program) in [
            (image::PAUSE, self.statics.pause()),
            (image::PROBE, self.statics.probe()),
        ] {
            self.import(reference, &program)?;
        }
        Ok(())
    }

    /// Waits until containerd answers, also after a restart.
    pub fn wait_for_containerd(&mut self) -> Result<()> {
        self.wait("containerd answers", PATIENCE, |node| {
            Ok(node
                .inside
                .enter(|| std::os::unix::net::UnixStream::connect(CONTAINERD_SOCKET))?
                .is_ok())
        })
    }

    /// Imports an image that consists of a static program.
    pub fn import(&self, reference: &str, program: &Path) -> Result<()> {
        let archive = Path::new(FOLDER).join("image.tar");
        let program = self.inside.install(program)?;
        self.inside.enter(|| image::write(&archive, reference, &program))??;
        self.import_archive(&archive)
            .with_context(|| format!("import image {reference}"))
    }

    /// Imports the images of an archive, whose path is one inside the node.
    pub fn import_archive(&self, archive: &Path) -> Result<()> {
        self.ctr(&["images", "import", &archive.display().to_string()])
            .map(drop)
    }

    /// Runs containerd's client in the namespace of the kubelet's containers.
    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        let mut ctr = self.command(self.programs.path("ctr"));
        ctr.args(["--address", CONTAINERD_SOCKET, "--namespace", "k8s.io"])
            .args(args);
        output(&mut ctr)
    }

    /// Waits for containerd's container runtime interface and returns a client.
    pub async fn cri(&self) -> Result<Cri> {
        Cri::connect(&self.inside, CONTAINERD_SOCKET, self.group.name()).await
    }
}
