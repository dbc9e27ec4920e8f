//! Reads `--config FILE`: options from a YAML file, inserted before those of the command line.
//! Layer: root.
//!
//! The file is a mapping of long option names to values. It becomes command-line arguments before clap parses any, so
//! that both have the same names, defaults and checks. Options of the command line replace those of the file.

use std::{
    ffi::{OsStr, OsString},
    fs, io, iter,
    path::{Path, PathBuf},
};

use clap::{Arg, ArgAction, Command, CommandFactory as _, Parser as _, error::ErrorKind};
use serde_json::{Map, Value};

use crate::cli::Cli;

const OPTION: &str = "config";

/// Why a file's options cannot be used.
#[derive(Debug, thiserror::Error)]
enum ConfigError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: not a mapping of options to values: {reason}", path.display())]
    Syntax { path: PathBuf, reason: String },
    #[error("{}: {key}: there is no such option", path.display())]
    Unknown { path: PathBuf, key: String },
    #[error("{}: {key}: {expected}", path.display())]
    Type {
        path: PathBuf,
        key: String,
        expected: &'static str,
    },
}

/// Reads the command line `args`, the program's name first, and the file that it names, if any.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let Some(path) = named_file(&args) else {
        return Cli::try_parse_from(args);
    };
    let command = Cli::command();
    let options = read(&path)
        .and_then(|options| arguments(&path, &options, &command, &args))
        .map_err(|error| clap::Error::raw(ErrorKind::InvalidValue, format!("{error}\n")))?;
    // After the name of the subcommand, which comes first.
    let split = 1 + usize::from(subcommand(&command, &args).is_some());
    let (head, tail) = args.split_at(split.min(args.len()));
    let with = |tail: &[OsString]| Cli::try_parse_from(head.iter().chain(&options).chain(tail).cloned());
    with(tail).map_err(|error| blame(error, &path, || with(&[]).err()))
}

/// Names the file in the error if the file's own values cause it.
fn blame(error: clap::Error, path: &Path, alone: impl FnOnce() -> Option<clap::Error>) -> clap::Error {
    let about_values = |error: &clap::Error| {
        matches!(
            error.kind(),
            ErrorKind::InvalidValue | ErrorKind::ValueValidation | ErrorKind::TooManyValues
        )
    };
    match alone().filter(|alone| about_values(&error) && about_values(alone)) {
        Some(alone) => clap::Error::raw(alone.kind(), format!("{}: {}", path.display(), alone.render())),
        None => error,
    }
}

/// The last file that `--config` names.
fn named_file(args: &[OsString]) -> Option<PathBuf> {
    let mut found = None;
    let mut rest = args.iter().skip(1).take_while(|arg| *arg != "--");
    while let Some(arg) = rest.next() {
        match option(arg) {
            Some((OPTION, None)) => found = rest.next().map(PathBuf::from),
            Some((OPTION, Some(path))) => found = Some(path.into()),
            _ => {}
        }
    }
    found
}

/// Name and value of `--name=value`; text only, as all names are.
fn option(arg: &OsStr) -> Option<(&str, Option<&str>)> {
    let text = arg.to_str()?.strip_prefix("--")?;
    Some(match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    })
}

fn read(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })?;
    let syntax = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::Error,
        // "off" is a value of some options.
        strict_booleans: true,
        with_snippet: false,
    };
    let options: Result<Option<Map<String, Value>>, _> = serde_saphyr::from_str_with_options(&text, syntax);
    let options = options.map_err(|error| ConfigError::Syntax {
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    Ok(options.unwrap_or_default())
}

/// The file's options as arguments for the subcommand in `args`: one file holds the options of the agent, and other
/// subcommands use those that they have.
fn arguments(
    path: &Path,
    options: &Map<String, Value>,
    command: &Command,
    args: &[OsString],
) -> Result<Vec<OsString>, ConfigError> {
    let task = subcommand(command, args);
    let mut found = Vec::new();
    for (key, value) in options {
        let own = find(command, key).filter(|_| key != OPTION);
        let own = own.ok_or_else(|| ConfigError::Unknown {
            path: path.to_owned(),
            key: key.clone(),
        })?;
        let words = words(own, key, value).map_err(|expected| ConfigError::Type {
            path: path.to_owned(),
            key: key.clone(),
            expected,
        })?;
        let takes = task.map_or(Some(own), |task| find(task, key));
        let fits = takes.is_some_and(|takes| is_list(takes) || words.len() <= 1);
        if fits && !is_given(args, key) {
            found.extend(words);
        }
    }
    Ok(found)
}

fn subcommand<'a>(command: &'a Command, args: &[OsString]) -> Option<&'a Command> {
    args.get(1).and_then(|name| command.find_subcommand(name))
}

/// The option with that long name or alias.
fn find<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(key) || aliases.contains(&key)
    })
}

fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

fn is_given(args: &[OsString], key: &str) -> bool {
    let mut before_end = args.iter().take_while(|arg| *arg != "--");
    before_end.any(|arg| option(arg).is_some_and(|(name, _)| name == key))
}

/// One argument for each value, or the expected type.
fn words(arg: &Arg, key: &str, value: &Value) -> Result<Vec<OsString>, &'static str> {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return match value {
            Value::Bool(given) => Ok(iter::once(format!("--{key}").into()).filter(|_| *given).collect()),
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
                Err("has no value: write true or false")
            }
        };
    }
    let word = |value: &Value| match value {
        Value::String(text) => Some(format!("--{key}={text}").into()),
        Value::Number(number) => Some(format!("--{key}={number}").into()),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    };
    match value {
        Value::Array(values) if is_list(arg) => {
            let words = values.iter().map(word).collect::<Option<_>>();
            words.ok_or("wants a list of texts or numbers")
        }
        Value::Array(_) => Err("wants one value, not a list"),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => {
            word(value).map(|word| vec![word]).ok_or("wants a text or a number")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Command as Task;

    fn with(file: &str, args: &[&str]) -> Result<Cli, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.yaml");
        fs::write(&path, file).unwrap();
        let mut words: Vec<OsString> = vec!["kni-agent".into()];
        words.extend(args.iter().map(OsString::from));
        words.extend(["--config".into(), path.clone().into()]);
        parse(words).map_err(|error| plain(&error).replace(&path.display().to_string(), "FILE"))
    }

    /// As clap prints it, without the first word.
    fn plain(error: &clap::Error) -> String {
        let text = error.to_string();
        text.strip_prefix("error: ").unwrap_or(&text).to_owned()
    }

    #[test]
    fn the_file_is_read_and_the_command_line_wins() {
        let file = "max-endpoints: 64\ndrop-bogons: true\nmeasure-programs: false\nmetrics-address: none\n\
                    socket: [/a.sock, /b.sock]\nuplink-xdp: off\nnode-name: file\nwarm-sandboxes: 3\n";
        let cli = with(file, &["--node-name", "line", "--warm-sandboxes=5"]).unwrap();
        let args = cli.serve;
        assert_eq!((args.max_endpoints, args.warm_sandboxes), (64, Some(5)));
        assert_eq!(args.node_name.as_deref(), Some("line"));
        assert!(args.uplink.drop_bogons && !args.measure_programs);
        assert_eq!(args.metrics_address.0, None);
        assert_eq!(args.paths.sockets, [PathBuf::from("/a.sock"), "/b.sock".into()]);
        let cli = with("socket: [/a.sock, /b.sock]", &["--socket", "/c.sock"]).unwrap();
        assert_eq!(cli.serve.paths.sockets, [PathBuf::from("/c.sock")]);
        with("", &[]).unwrap();
        with("# nothing\n", &[]).unwrap();
    }

    #[test]
    fn mistakes_name_the_file_and_the_key() {
        for (file, said) in [
            ("max-endpoint: 64", "FILE: max-endpoint: there is no such option"),
            ("config: x", "FILE: config: there is no such option"),
            ("drop-bogons: 1", "FILE: drop-bogons: has no value"),
            ("max-endpoints: true", "FILE: max-endpoints: wants a text or a number"),
            ("max-endpoints: [1, 2]", "FILE: max-endpoints: wants one value"),
            ("socket: [[x]]", "FILE: socket: wants a list of texts"),
            ("- a\n- b", "FILE: not a mapping"),
            ("log: a\nlog: b", "FILE: not a mapping"),
        ] {
            let error = with(file, &[]).unwrap_err();
            assert!(error.starts_with(said), "{file}: {error}");
        }
        let error = with("udp-timeout: 0", &[]).unwrap_err();
        assert!(
            error.starts_with("FILE: ") && error.contains("--udp-timeout"),
            "{error}"
        );
        let error = with("udp-timeout: 9", &["--tcp-timeout", "0"]).unwrap_err();
        assert!(!error.contains("FILE") && error.contains("--tcp-timeout"), "{error}");
        let missing = parse(["kni-agent", "--config=/no/such/file"].map(OsString::from)).unwrap_err();
        assert!(plain(&missing).starts_with("/no/such/file: "), "{missing}");
    }

    #[test]
    fn other_tasks_take_what_they_have() {
        let file = "state-dir: /elsewhere\nmax-endpoints: 64\nsocket: [/a.sock, /b.sock]\ninstall-cni: true\n\
                    install-cni-bin-dir: /plugins\n";
        let Some(Task::Cleanup(paths)) = with(file, &["cleanup"]).unwrap().command else {
            panic!("not cleanup")
        };
        assert_eq!((paths.state_dir, paths.sockets.len()), ("/elsewhere".into(), 2));
        let Some(Task::UninstallCni(cni)) = with(file, &["uninstall-cni"]).unwrap().command else {
            panic!("not uninstall-cni")
        };
        assert_eq!(cni.bin_dir, PathBuf::from("/plugins"));
    }
}
