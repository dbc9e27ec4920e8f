//! Implements the verbs that need the agent, each in its own file.

mod add;
mod check;
mod del;
mod gc;
mod status;

use crate::{client::Client, config::Config, environment::Environment, error::CniError, version::Version};

/// Performs the verb of a checked environment. Returns the text to print, if any.
pub(crate) async fn run(environment: &Environment, config: &Config) -> Result<Option<String>, CniError> {
    let version = config.version()?;
    let client = Client::new(&config.socket, environment);
    match environment.command.as_str() {
        "ADD" => add::run(client, environment, config).await.map(Some),
        "DEL" => del::run(client, environment, config).await.map(|()| None),
        "CHECK" => {
            version.require(Version::V0_4_0, "CHECK")?;
            check::run(client, environment, config).await.map(|()| None)
        }
        "STATUS" => {
            version.require(Version::V1_1_0, "STATUS")?;
            status::run(client, config).await.map(|()| None)
        }
        "GC" => {
            version.require(Version::V1_1_0, "GC")?;
            gc::run(client, config).await.map(|()| None)
        }
        // The environment was checked.
        _ => Ok(None),
    }
}
