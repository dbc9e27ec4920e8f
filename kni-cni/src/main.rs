//! The CNI plugin of KNI: reads the runtime's request, calls the node's agent and prints the CNI result.

#![forbid(unsafe_code)]

mod args;
mod client;
mod config;
mod environment;
mod error;
mod journal;
mod result;
mod verbs;
mod version;

use std::{io::Read as _, process::ExitCode};

use self::{config::Config, environment::Environment, error::CniError, version::Version};

/// Output for a person who runs the plugin by hand; `kni-agent install-cni` identifies the plugin by it.
const ABOUT: &str = "kni-cni: the CNI plugin of KNI, which hands each call to the node's kni-agent";

fn main() -> ExitCode {
    let environment = Environment::of_process();
    if environment.command.is_empty() {
        print_to(
            std::io::stderr(),
            &format!("{ABOUT}\nCNI versions: {}", Version::list()),
        );
        return ExitCode::SUCCESS;
    }
    let mut stdin = Vec::new();
    let read = std::io::stdin().read_to_end(&mut stdin);
    let answer = read
        .map_err(|error| CniError::io("reading the configuration from stdin", &error))
        .and_then(|_bytes| run(&environment, &stdin));
    match answer {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(text)) => {
            if print_to(std::io::stdout(), &text) {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            print_to(std::io::stdout(), &error.to_json(&version::said(&stdin)));
            ExitCode::FAILURE
        }
    }
}

/// Performs one verb. Returns the text to print, if any.
fn run(environment: &Environment, stdin: &[u8]) -> Result<Option<String>, CniError> {
    if environment.command == "VERSION" {
        return Ok(Some(version::answer()));
    }
    environment.check()?;
    let config = Config::parse(stdin)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CniError::io("starting", &error))?;
    let answer = runtime.block_on(verbs::run(environment, &config));
    // A blocking lookup must not delay the answer.
    runtime.shutdown_background();
    answer
}

/// Returns whether the text was written.
fn print_to(mut to: impl std::io::Write, text: &str) -> bool {
    writeln!(to, "{text}").and_then(|()| to.flush()).is_ok()
}
