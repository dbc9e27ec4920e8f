//! Makes background tasks fail as tests request it. Does nothing without the hidden option `--test-task-faults`.

use std::{io, path::PathBuf, time::Duration};

use kni_tasks::{Fault, Tasks};

/// Interval of the reads.
const PAUSE: Duration = Duration::from_millis(20);

/// Reads requests from `file` until the agent stops: lines with a fault and the name of a task, `panic removals` for
/// example. The file is removed when it was read.
pub(super) async fn follow(file: PathBuf, tasks: Tasks) {
    loop {
        kni_tasks::waiting(tokio::time::sleep(PAUSE)).await;
        let text = match tokio::fs::read_to_string(&file).await {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "cannot read the requested faults");
                continue;
            }
        };
        if let Err(error) = tokio::fs::remove_file(&file).await {
            tracing::warn!(file = %file.display(), %error, "cannot remove the requested faults");
        }
        for line in text.lines() {
            inject(line, &tasks);
        }
    }
}

fn inject(line: &str, tasks: &Tasks) {
    let Some((fault, task)) = line.split_once(' ') else {
        tracing::warn!(line, "no fault and task");
        return;
    };
    match fault.parse::<Fault>() {
        Ok(fault) => {
            let found = tasks.inject(task, fault);
            tracing::warn!(task, ?fault, found, "a fault for tests");
        }
        Err(error) => tracing::warn!(%error, "no fault"),
    }
}
