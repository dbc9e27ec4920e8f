//! Saves the data of the API server and puts it back, as an administrator restores etcd from a backup.

use anyhow::Result;
use kni_local_node::Part;

use super::Cluster;

const DATA: &str = "/var/lib/etcd";
const SAVED: &str = "/var/lib/etcd.saved";

impl Cluster {
    /// Saves the data. The API server is away meanwhile.
    pub fn save_data(&mut self) -> Result<()> {
        self.without_store(&[&["rm", "-rf", SAVED], &["cp", "-a", DATA, SAVED]])
    }

    /// Puts the saved data back: every change since is lost.
    pub fn restore_data(&mut self) -> Result<()> {
        self.without_store(&[&["rm", "-rf", DATA], &["cp", "-a", SAVED, DATA]])
    }

    fn without_store(&mut self, commands: &[&[&str]]) -> Result<()> {
        self.control.local().kill(Part::ApiServer)?;
        self.control.local().kill(Part::Etcd)?;
        for command in commands {
            if let [program, args @ ..] = command {
                self.control.node().run(program, args)?;
            }
        }
        self.control.local().start(Part::Etcd)?;
        self.control.start_api_server()
    }
}
