//! An agent takes over from one of an earlier release: it reads what that one recorded, and its pods notice nothing.
//!
//! `fixtures/upgrade.json` holds what the agent of the earlier release left behind when it was killed: the rows of its
//! state, its cached results of CNI plugins, a delete that a plugin wrote down, and its pinned maps. `KNI_OLD_AGENT`
//! names such an agent for a takeover under traffic; with `KNI_RECORD=1` that test also writes the fixture. Without
//! `KNI_OLD_AGENT` the agent takes over from itself.

mod earlier;
mod recorded;

use std::{env, path::PathBuf, thread, time::Duration};

use anyhow::Result;
use kni_integration::{NodeSnapshot, require};

use self::{earlier::EarlierNode, recorded::Recorded};

/// How long no agent runs between the two.
const GAP: Duration = Duration::from_secs(2);

#[test]
fn every_row_of_an_earlier_release_is_read_field_by_field() -> Result<()> {
    let recorded = Recorded::fixture()?;
    recorded.assert_complete()?;
    let folder = tempfile::tempdir()?;
    recorded.write_state(folder.path())?;
    let missing = recorded.missing_rows(&recorded::rows(folder.path())?);
    assert!(missing.is_empty(), "lost in reading:\n{}", missing.join("\n"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_takes_over_from_one_of_an_earlier_release() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let old = env::var_os("KNI_OLD_AGENT").map(PathBuf::from);
    if old.is_none() {
        println!("not tested with an agent of an earlier release: no KNI_OLD_AGENT");
    }
    let mut earlier = EarlierNode::build("upgrade", old).await?;
    let before = earlier.interfaces().await?;
    earlier.assert_reached("before")?;
    let streams = earlier.streams()?;
    thread::sleep(Duration::from_millis(200));
    let given = earlier.kill_agent().await?;

    let found = Recorded::take(earlier.node())?;
    if env::var_os("KNI_RECORD").is_some() {
        found.write_fixture()?;
    }
    // What this release records and pins has all that the earlier one reads: it can also take over from this one.
    let missing = Recorded::fixture()?.missing_in_shape_of(&found);
    assert!(missing.is_empty(), "no longer recorded:\n{}", missing.join("\n"));
    let (layout, maps) = (recorded::layout(earlier.node())?, recorded::maps(earlier.node())?);
    thread::sleep(GAP);
    earlier.take_over().await?;

    // The same maps, not others of the same names: flows and policies stayed. Those of another layout are converted.
    if recorded::layout(earlier.node())? == layout {
        assert_eq!(recorded::maps(earlier.node())?, maps);
    }
    assert_eq!(earlier.interfaces().await?, before);
    earlier.assert_answers_the_same().await?;
    earlier.assert_reached("after")?;
    for (server, stream) in streams {
        stream.stop().assert_whole(&server);
    }

    let mut stage = earlier.leave(given).await?;
    stage.agent.terminate()?;
    let done = stage.agent.cleanup()?;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let after = NodeSnapshot::take(&stage.node)?;
    for kind in ["bpffs", "program", "rule"] {
        assert_eq!(
            after.section(kind),
            stage.pristine.section(kind),
            "{kind} after cleanup"
        );
    }
    let links = after.section("link");
    assert!(!links.iter().any(|link| link.starts_with("kni")), "{links:#?}");
    Ok(())
}
