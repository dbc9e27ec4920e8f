//! The program of the pods of tests and demonstrations: a server, a client and a monitor of connections.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "standard output is the container's log, and the answer to kubectl exec"
)]

mod ask;
mod options;
mod ping_loop;
mod serve;
mod udp_loop;

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
    thread,
    time::Duration,
};

use nix::sys::signal::{SigSet, Signal};
use options::Options;

const USAGE: &str = "usage:
  kni-probe serve [--tcp PORT]... [--udp PORT]... [--http PORT]... [--name NAME] [--fail-file FILE]
      answer each line and each datagram with `NAME PEER LINE`; HTTP: /healthz and /readyz answer 200, or 503 while
      FILE exists, everything else answers `NAME PEER`
  kni-probe ask ADDRESS PORT [--protocol tcp|udp] [--timeout-ms N] [--text TEXT]
      send a line, print the answer; ADDRESS may be a name
  kni-probe resolve NAME
      print the addresses of a name
  kni-probe ping-loop ADDRESS PORT
      keep one TCP connection, with a question each 10 ms; print what was seen each second and at SIGTERM
  kni-probe udp-loop ADDRESS PORT
      send a datagram each 10 ms; print each second how many were answered, and how many were not within 5 s
  kni-probe sleep [MS]
  kni-probe show PATH
      print a file, or the names in a folder
  kni-probe write FILE TEXT
      write to a file that exists
  kni-probe touch FILE
  kni-probe remove FILE";

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let task = words.next().unwrap_or_default();
    let result = Options::parse(words).and_then(|options| match task.as_str() {
        "serve" => ended_by_signal(move || serve::run(&options)),
        "ask" => ask::run(&options),
        "resolve" => ask::print_addresses(&options),
        "ping-loop" => ping_loop::run(&options),
        "udp-loop" => ended_by_signal(move || udp_loop::run(&options)),
        "sleep" => ended_by_signal(move || {
            let time = match options.word(0, "MS") {
                Ok(ms) => ms.parse().map_err(|e| format!("{ms}: {e}"))?,
                Err(_forever) => u64::MAX,
            };
            thread::sleep(Duration::from_millis(time));
            Ok(())
        }),
        "show" => show(options.word(0, "PATH")?.as_ref()).map_err(|e| e.to_string()),
        "write" => write(options.word(0, "FILE")?, options.word(1, "TEXT")?).map_err(|e| e.to_string()),
        "touch" => fs::write(options.word(0, "FILE")?, "").map_err(|e| e.to_string()),
        "remove" => fs::remove_file(options.word(0, "FILE")?).map_err(|e| e.to_string()),
        _ => Err(USAGE.into()),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn show(path: &Path) -> io::Result<()> {
    if !path.is_dir() {
        print!("{}", fs::read_to_string(path)?);
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        println!("{}", entry?.file_name().display());
    }
    Ok(())
}

/// Does not create the file: a setting that the kernel does not have is an error.
fn write(path: &str, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

/// Runs `work` on a thread of its own until it ends or SIGTERM comes, which the first process of a container has to
/// ask for.
fn ended_by_signal(work: impl FnOnce() -> Result<(), String> + Send + 'static) -> Result<(), String> {
    let awaited = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1]);
    awaited.thread_block().map_err(|e| e.to_string())?;
    let (done, result) = std::sync::mpsc::channel();
    let from_work = done.clone();
    thread::spawn(move || from_work.send(work()));
    thread::spawn(move || {
        while awaited.wait().is_err() {}
        done.send(Ok(()))
    });
    result.recv().map_err(|e| e.to_string())?
}
