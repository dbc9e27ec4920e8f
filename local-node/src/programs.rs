//! Builds the programs of a node, Helm and upstream's tests from Go modules, once, into a folder of the caller's
//! choice. What the cache of this user has is not built.

mod assets;
mod go;
mod overlay;
mod table;

use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
pub use assets::ApiServerPrograms;
pub use table::{PROGRAMS, Program};

use crate::cache::{self, Cache};

/// Folder of the programs below the caller's.
const BIN: &str = "bin";
/// Folder of programs that are not complete yet, below [`BIN`], so that renaming them is atomic.
const UNFINISHED: &str = ".new";
/// The kind of the programs in the cache.
const KIND: &str = "go";

/// The built programs, all in one folder.
#[derive(Debug, Clone)]
pub struct Programs {
    bin: PathBuf,
    module: &'static go::Module,
    table: &'static [Program],
}

impl Programs {
    /// Builds missing or outdated programs below `folder`, which is absolute, and passes lines about the progress to
    /// `report`.
    ///
    /// Concurrent processes build once: one builds and the others wait. A second call returns immediately. Fails with
    /// advice if no suitable Go is installed.
    pub fn build(folder: &Path, report: &mut dyn FnMut(&str)) -> Result<Self> {
        Self::of_runc(folder).complete(folder, report)?;
        Self::of_node(folder).complete(folder, report)
    }

    /// [`Self::build`] for the programs that speak KNI, `kubelet` and `containerd`.
    pub fn build_kni(folder: &Path, report: &mut dyn FnMut(&str)) -> Result<Self> {
        let programs = Self {
            bin: folder.join(BIN),
            module: &go::KNI,
            table: table::KNI,
        };
        programs.complete(folder, report)
    }

    /// A command that executes the Go tests of packages of [`Self::build_kni`], for the same folder. Flags of `go test`
    /// are before the packages.
    pub fn kni_tests(folder: &Path, arguments: &[&str]) -> Result<Command> {
        go::tests(&go::KNI, arguments, folder)
    }

    /// [`Self::build`] for Helm, the program `helm`.
    pub fn build_helm(folder: &Path, report: &mut dyn FnMut(&str)) -> Result<Self> {
        let programs = Self {
            bin: folder.join(BIN),
            module: &go::HELM,
            table: table::HELM,
        };
        programs.complete(folder, report)
    }

    /// [`Self::build`] for upstream's end-to-end tests, `e2e.test`, and the programs of their images, among them
    /// `agnhost`.
    pub fn build_e2e(folder: &Path, report: &mut dyn FnMut(&str)) -> Result<Self> {
        let images = Self {
            bin: folder.join(BIN),
            module: &go::TEST_IMAGES,
            table: table::TEST_IMAGES,
        };
        images.complete(folder, report)?;
        let tests = Self {
            bin: folder.join(BIN),
            module: &go::E2E,
            table: table::E2E,
        };
        tests.complete(folder, report)
    }

    fn of_node(folder: &Path) -> Self {
        Self {
            bin: folder.join(BIN),
            module: &go::NODE,
            table: PROGRAMS,
        }
    }

    fn of_runc(folder: &Path) -> Self {
        Self {
            bin: folder.join(BIN),
            module: &go::RUNC,
            table: table::RUNC,
        }
    }

    fn complete(self, folder: &Path, report: &mut dyn FnMut(&str)) -> Result<Self> {
        if self.missing().is_empty() {
            return Ok(self);
        }
        fs::create_dir_all(&self.bin).with_context(|| format!("create {}", self.bin.display()))?;
        let path = folder.join("lock");
        let lock = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        // Locked until the file is closed, at the latest when the process ends.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            report("waiting for another process that builds the node's programs");
            lock.lock().with_context(|| format!("lock {}", path.display()))?;
        }
        let missing = self.missing();
        if !missing.is_empty() {
            self.make(&missing, &folder.join("build.log"), report)?;
        }
        Ok(self)
    }

    /// Programs that are missing or were built from other sources.
    pub fn missing(&self) -> Vec<&'static Program> {
        let current = go::fingerprint(self.module);
        let is_current = |program: &Program| {
            let built = fs::read_to_string(self.stamp(program)).unwrap_or_default();
            built == current && self.path(program.name).is_file()
        };
        self.table.iter().filter(|program| !is_current(program)).collect()
    }

    /// Programs of `folder` that [`Self::build`] would build.
    pub fn missing_in(folder: &Path) -> Vec<&'static Program> {
        let mut missing = Self::of_runc(folder).missing();
        missing.extend(Self::of_node(folder).missing());
        missing
    }

    /// Identifies the sources of the programs and the compiler.
    pub fn version(&self) -> String {
        go::fingerprint(self.module)
    }

    /// The folder of the programs.
    pub fn folder(&self) -> &Path {
        &self.bin
    }

    /// The path of a program.
    pub fn path(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    fn stamp(&self, program: &Program) -> PathBuf {
        self.bin.join(format!(".{}.built", program.name))
    }

    /// Puts `missing` into the empty folder `unfinished`: those that the cache has, and the others built.
    fn fill(
        &self,
        missing: &[&'static Program],
        unfinished: &Path,
        log: &Path,
        report: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let Some(version) = go::version_of_result(self.module)? else {
            return go::build(self.module, missing, unfinished, log, report);
        };
        let cache = Cache::open(false);
        let mut others = Vec::new();
        for program in missing {
            let key = cache::key(format!("{version} {}", program.package).as_bytes())?;
            if cache.fetch(KIND, &key, &unfinished.join(program.built_name()), report) {
                report(&format!("{} (kept by an earlier clone)", program.name));
            } else {
                others.push((*program, key));
            }
        }
        if others.is_empty() {
            return Ok(());
        }
        let programs: Vec<&Program> = others.iter().map(|(program, _)| *program).collect();
        go::build(self.module, &programs, unfinished, log, report)?;
        for (program, key) in others {
            cache.keep(KIND, &key, &unfinished.join(program.built_name()), report);
        }
        Ok(())
    }

    fn make(&self, missing: &[&'static Program], log: &Path, report: &mut dyn FnMut(&str)) -> Result<()> {
        go::check()?;
        let unfinished = self.bin.join(UNFINISHED);
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished).with_context(|| format!("remove {}", unfinished.display()))?;
        }
        fs::create_dir(&unfinished).with_context(|| format!("create {}", unfinished.display()))?;
        self.fill(missing, &unfinished, log, report)?;
        for program in missing {
            // The stamp is removed first and written last, so that an interrupted replacement is repeated.
            let stamp = self.stamp(program);
            if stamp.exists() {
                fs::remove_file(&stamp).with_context(|| format!("remove {}", stamp.display()))?;
            }
            let (from, to) = (unfinished.join(program.built_name()), self.path(program.name));
            fs::rename(&from, to).with_context(|| format!("rename {}", from.display()))?;
            fs::write(&stamp, go::fingerprint(self.module)).with_context(|| format!("write {}", stamp.display()))?;
        }
        fs::remove_dir(&unfinished).with_context(|| format!("remove {}", unfinished.display()))
    }
}
