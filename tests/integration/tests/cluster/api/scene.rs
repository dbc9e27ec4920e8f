//! Provides an API server with KNI's definitions, which concurrent tests share.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use anyhow::Result;
use kni_integration::api_server::ApiServer;

/// The server; it stops with the last test that holds it.
pub(crate) fn server() -> Result<Arc<ApiServer>> {
    static SHARED: Mutex<Weak<ApiServer>> = Mutex::new(Weak::new());
    // If a test failed to start one, the next test tries again.
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = shared.upgrade() {
        return Ok(server);
    }
    let server = Arc::new(ApiServer::start("api")?);
    server.install(&repository().join("deploy/crds"))?;
    *shared = Arc::downgrade(&server);
    Ok(server)
}

/// The root of the repository.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// An object of `kind`; `spec` is a flow mapping of YAML.
pub(crate) fn manifest(kind: &str, name: &str, spec: &str) -> String {
    // JSON is valid YAML, so the name may contain any characters.
    let name = serde_json::Value::from(name);
    format!("apiVersion: kni.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}
