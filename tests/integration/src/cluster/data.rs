//! Saves the data of the API server and puts it back, as an administrator restores etcd from a backup.

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::ConfigMap;
use kni_local_node::Part;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;

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

    /// The newest resource version.
    pub async fn resource_version(&self) -> Result<u64> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), "default");
        let list = api.list(&ListParams::default().limit(1)).await?;
        let version = list.metadata.resource_version.context("a list without a version")?;
        version.parse().with_context(|| version.clone())
    }

    /// Writes until there is a newer resource version than `version` of the former data. A kubelet whose watch began at
    /// that version sees no pod before.
    pub async fn pass_resource_version(&self, version: u64) -> Result<()> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), "default");
        let params = PatchParams::apply("test").force();
        let mut written = 0_u64;
        while self.resource_version().await? <= version {
            written += 1;
            let object = json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "resource-version" },
                "data": { "written": written.to_string() },
            });
            api.patch("resource-version", &params, &Patch::Apply(object)).await?;
        }
        Ok(())
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
