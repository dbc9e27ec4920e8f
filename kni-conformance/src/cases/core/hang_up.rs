//! Checks that a client which disappears during an attach leaves nothing.

use std::{path::Path, time::Duration};

use prost::Message as _;
use tokio::time::sleep;

use crate::{
    client,
    error::{During as _, Result, require},
    limits::scaled,
    sandbox::Sandbox,
    session::Session,
    wire::Call,
};

/// When the client disappears after the server has read the request: during several of its steps.
const AFTER: [u64; 6] = [0, 1, 4, 12, 30, 80];
/// When it disappears if the server noticed all of these before it began: at the latest after its answer.
const LATER: [u64; 4] = [300, 1_000, 4_000, 15_000];
/// Time in which a delayed attach would change something.
const QUIET: Duration = Duration::from_millis(300);

pub(super) async fn check(session: &Session) -> Result<()> {
    let before = session.host_pairs().await?;
    let mut removed_by_id = 0;
    for (number, after) in AFTER.into_iter().chain(LATER).enumerate() {
        if number >= AFTER.len() && removed_by_id > 0 {
            break;
        }
        let removed = hang_up(session, Duration::from_millis(after)).await;
        let removed = removed.map_err(|failure| failure.about(&format!("hung up after {after} ms")))?;
        removed_by_id += usize::from(removed);
    }
    require!(
        removed_by_id > 0,
        "after a client has hung up, teardown by the id of the sandbox never removes the namespace"
    );
    session.check_host_pairs(&before).await
}

/// Returns whether teardown by id removed the namespace. A server may notice the hang-up before it begins, and then
/// knows nothing of the id: the namespace is one that was never attached.
async fn hang_up(session: &Session, after: Duration) -> Result<bool> {
    let sandbox = session.sandbox("hung-up").await?;
    let request = sandbox.attach_request().encode_to_vec();
    let call = Call::send(&session.socket, "AttachInterface", "localhost", &request).await;
    let mut call = call.during("AttachInterface")?;
    call.wait_until_read(client::ATTACH).await.during("AttachInterface")?;
    sleep(after).await;
    drop(call);
    session.remove(&sandbox).await?;
    sleep(scaled(QUIET)).await;
    // The kubelet repeats the teardown of every earlier sandbox of a pod; the attach may have begun after the first
    // one.
    session.remove(&sandbox).await?;
    let removed = !Path::new(&sandbox.path).exists();
    if !removed {
        session.client.delete_path(&sandbox.path).await?;
    }
    check_gone(session, &sandbox).await?;
    sleep(scaled(QUIET)).await;
    check_gone(session, &sandbox).await?;
    Ok(removed)
}

async fn check_gone(session: &Session, sandbox: &Sandbox) -> Result<()> {
    session.check_unknown(&sandbox.id).await?;
    session.check_path_gone(&sandbox.path).await?;
    session.check_bare(&sandbox.netns).await
}
