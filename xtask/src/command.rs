//! Runs other programs, and converts every kind of failure to one error that names the command.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{cargo_output, progress::say};

/// Lines of a log that an error quotes.
const QUOTED_LINES: usize = 25;

/// Runs `command` on the current terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs a cargo `command` that builds: its progress becomes the state of the running step, and only its warnings and
/// errors are shown.
pub(crate) fn build(command: &mut Command) -> Result<()> {
    build_with(command, |_| true)
}

/// As [`build`], but shows only the lines for which `is_shown` is true.
pub(crate) fn build_with(command: &mut Command, is_shown: impl Fn(&str) -> bool) -> Result<()> {
    let mut child = command
        .envs(cargo_output::ENVIRONMENT)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if let Some(stderr) = child.stderr.take() {
        cargo_output::follow(stderr, |line| {
            if is_shown(line) {
                say(line);
            }
        });
    }
    let status = child.wait().with_context(|| format!("cannot run {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs `command` and shows each line of its standard output immediately.
pub(crate) fn relay(command: &mut Command) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            say(&line.with_context(|| format!("output of {}", shown(command)))?);
        }
    }
    let status = child.wait().with_context(|| format!("cannot run {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs `command` and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{} failed ({}): {}", shown(command), output.status, stderr.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `command` with both of its outputs appended to the file `log`; an error quotes the end of that file.
pub(crate) fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let file = open_log(log)?;
    let errors = file.try_clone().context("cannot share the log")?;
    let status = command
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(errors)
        .status()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if !status.success() {
        bail!(
            "{} failed ({status}); the end of {}:\n{}",
            shown(command),
            log.display(),
            tail(log)
        );
    }
    Ok(())
}

/// The path of the program `name` in `PATH`, if there is one.
pub(crate) fn find(name: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

fn open_log(log: &Path) -> Result<File> {
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot open {}", log.display()))
}

/// The last lines of a text file, or the error of reading it.
fn tail(log: &Path) -> String {
    match fs::read(log) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().collect();
            let skipped = lines.len().saturating_sub(QUOTED_LINES);
            lines.into_iter().skip(skipped).collect::<Vec<_>>().join("\n")
        }
        Err(error) => format!("(unreadable: {error})"),
    }
}

fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|word| word.to_string_lossy()));
    format!("`{}`", words.join(" "))
}
