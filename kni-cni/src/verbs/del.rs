//! DEL: calls `DetachInterface`, or records the delete for a later agent.

use kni_proto::{
    cni::{self, PendingDelete},
    kni::{DetachInterfaceRequest, Isolation, kni_client::KniClient},
};
use tonic::Code;

use crate::{
    client::{Client, Failure, Patience},
    config::Config,
    environment::Environment,
    error::{CniError, ErrorCode},
    journal,
};

/// Detaches. Without an agent, the delete is recorded for the next one; if that fails too, the runtime has to retry.
pub(super) async fn run(client: Client<'_>, environment: &Environment, config: &Config) -> Result<(), CniError> {
    detach(client, environment, config, None).await
}

/// Undoes one ADD, which may have succeeded, and nothing else.
pub(super) async fn undo(
    client: Client<'_>,
    environment: &Environment,
    config: &Config,
    invocation: &str,
) -> Result<(), CniError> {
    detach(client, environment, config, Some(invocation)).await
}

async fn detach(
    client: Client<'_>,
    environment: &Environment,
    config: &Config,
    invocation: Option<&str>,
) -> Result<(), CniError> {
    let wanted = request(environment, config, invocation);
    let patience = Patience {
        connect: config.timeouts.del_connect(),
        total: config.timeouts.del_connect() + config.timeouts.del(),
    };
    let call = |channel| {
        let request = client.request(wanted.clone());
        async move { KniClient::new(channel).detach_interface(request).await }
    };
    let failure = match client.call(patience, call).await {
        Ok(_done) => return Ok(()),
        // It is about to stop; the next agent reads the recorded delete.
        Err(Failure::Refused(status)) if status.code() != Code::Unavailable => {
            return Err(CniError::refused("DetachInterface", &status));
        }
        Err(failure) => failure,
    };
    let pending = PendingDelete {
        version: PendingDelete::VERSION,
        container: environment.container.clone(),
        ifname: environment.ifname.clone(),
        network: config.name.clone(),
        invocation: invocation.map(str::to_owned),
    };
    journal::write(&config.state_dir, &pending).map_err(|error| {
        let msg = format!("the delete can neither be done nor be kept: {}", failure.reason());
        CniError::new(ErrorCode::TryAgainLater, msg).details(format!("{}: {error}", config.state_dir.display()))
    })
}

fn request(environment: &Environment, config: &Config, invocation: Option<&str>) -> DetachInterfaceRequest {
    let entries = [
        (cni::IFNAME, environment.ifname.as_str()),
        (cni::NETWORK, config.name.as_str()),
        (cni::CONTAINER, environment.container.as_str()),
        (cni::INVOCATION, invocation.unwrap_or_default()),
    ];
    let said = entries.into_iter().filter(|(_, value)| !value.is_empty());
    DetachInterfaceRequest {
        name: environment.args.name.clone(),
        id: cni::sandbox_id(&environment.container, &environment.ifname),
        namespace: environment.args.namespace.clone(),
        isolation: (!environment.netns.is_empty()).then(|| Isolation {
            path: environment.netns.clone(),
            r#type: "namespace".to_owned(),
            ..Isolation::default()
        }),
        extradata: said.map(|(key, value)| (key.to_owned(), value.to_owned())).collect(),
        ..DetachInterfaceRequest::default()
    }
}
