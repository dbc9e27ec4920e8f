//! Finds the programs of an API server: in a folder that the environment names, or built.

use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};

use super::Programs;

/// Variable with the folder of the programs of [`NAMES`]; tests of controllers commonly use it.
const VARIABLE: &str = "KUBEBUILDER_ASSETS";
const NAMES: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

/// `etcd`, `kube-apiserver` and `kubectl`, all in one folder.
#[derive(Debug, Clone)]
pub struct ApiServerPrograms {
    folder: PathBuf,
}

impl ApiServerPrograms {
    /// The programs in the folder of `KUBEBUILDER_ASSETS`, which must contain all of them; if the variable is unset or
    /// empty, those that `build` builds.
    pub fn find(build: impl FnOnce() -> Result<Programs>) -> Result<Self> {
        Self::given(env::var_os(VARIABLE).as_deref(), build)
    }

    fn given(folder: Option<&OsStr>, build: impl FnOnce() -> Result<Programs>) -> Result<Self> {
        let Some(folder) = folder.filter(|folder| !folder.is_empty()) else {
            return Ok(Self {
                folder: build()?.folder().to_owned(),
            });
        };
        let given = Self { folder: folder.into() };
        let missing: Vec<&str> = NAMES.into_iter().filter(|name| !given.path(name).is_file()).collect();
        ensure!(
            missing.is_empty(),
            "{VARIABLE} names {}, where there is no {}",
            given.folder.display(),
            missing.join(", ")
        );
        Ok(given)
    }

    /// The folder of the programs.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of a program.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use anyhow::bail;

    use super::*;

    #[test]
    fn a_named_folder_takes_precedence_over_building() {
        let folder = tempfile::tempdir().unwrap();
        let given = || ApiServerPrograms::given(Some(folder.path().as_os_str()), || bail!("built"));
        for name in ["etcd", "kubectl"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert!(given().unwrap_err().to_string().ends_with("there is no kube-apiserver"));
        fs::write(folder.path().join("kube-apiserver"), "").unwrap();
        assert_eq!(given().unwrap().path("etcd"), folder.path().join("etcd"));
    }

    #[test]
    fn without_a_name_they_are_built() {
        for name in [None, Some(OsStr::new(""))] {
            let error = ApiServerPrograms::given(name, || bail!("built")).unwrap_err();
            assert_eq!(error.to_string(), "built");
        }
    }
}
