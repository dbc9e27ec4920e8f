//! Builds the programs of a node from their Go modules, once, into a folder of the caller's choice.

mod assets;
mod go;
mod table;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
pub use assets::ApiServerPrograms;
pub use table::{PROGRAMS, Program};

/// Folder names below the caller's.
const BIN: &str = "bin";
const SOURCE: &str = "src";

/// The built programs, all in one folder.
#[derive(Debug, Clone)]
pub struct Programs {
    bin: PathBuf,
}

impl Programs {
    /// Builds what is missing or of another version below `folder`, absolute; `report` is told a line before each build.
    ///
    /// Of several processes one builds, the others wait for it. A second call is instant. Fails, saying what to
    /// install, where no fitting Go is there.
    pub fn build(folder: &Path, report: &mut dyn FnMut(&str)) -> Result<Self> {
        let programs = Self { bin: folder.join(BIN) };
        if programs.missing().is_empty() {
            return Ok(programs);
        }
        fs::create_dir_all(&programs.bin).with_context(|| format!("create {}", programs.bin.display()))?;
        let path = folder.join("lock");
        let lock = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        report("waiting for the lock of other builds of the node's programs");
        // Held until it is closed, at the latest when the process ends.
        lock.lock().with_context(|| format!("lock {}", path.display()))?;
        let missing = programs.missing();
        if !missing.is_empty() {
            go::check()?;
        }
        let (mut position, total) = (0, missing.len());
        for program in missing {
            position += 1;
            report(&format!(
                "[{position}/{total}] {} {} ({} the first time)",
                program.name, program.version, program.effort
            ));
            programs.make(program, &folder.join(SOURCE))?;
        }
        Ok(programs)
    }

    /// Those that are not there in the version of the table.
    pub fn missing(&self) -> Vec<&'static Program> {
        PROGRAMS
            .iter()
            .filter(|program| {
                let stamp = fs::read_to_string(self.stamp(program)).unwrap_or_default();
                stamp != program.stamp() || !self.path(program.name).is_file()
            })
            .collect()
    }

    /// Those of `folder` that [`Self::build`] would build.
    pub fn missing_in(folder: &Path) -> Vec<&'static Program> {
        Self { bin: folder.join(BIN) }.missing()
    }

    /// The folder they are in.
    pub fn folder(&self) -> &Path {
        &self.bin
    }

    /// The path of one of them.
    pub fn path(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    fn stamp(&self, program: &Program) -> PathBuf {
        self.bin.join(format!(".{}.built", program.name))
    }

    fn make(&self, program: &Program, sources: &Path) -> Result<()> {
        let module = sources.join(program.module.replace('/', "_"));
        // The stamp goes first and comes last, so that a build that was cut short is done again.
        let stamp = self.stamp(program);
        if stamp.exists() {
            fs::remove_file(&stamp).with_context(|| format!("remove {}", stamp.display()))?;
        }
        go::prepare(program, &module)?;
        let unfinished = self.bin.join(format!(".{}.new", program.name));
        go::build(program, &module, &unfinished)?;
        fs::rename(&unfinished, self.path(program.name)).with_context(|| format!("rename {}", unfinished.display()))?;
        fs::write(&stamp, program.stamp()).with_context(|| format!("write {}", stamp.display()))
    }
}
