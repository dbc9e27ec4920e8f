//! Renders the metrics page: reads the source, keeps counters monotonic, and limits the rate of reads.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{
    Source,
    text::{self, Facts},
    totals::{Total, Totals},
};

/// A page younger than this is reused: reading walks through maps, and every process of the node may request the page.
const FRESH: Duration = Duration::from_millis(200);

/// The metrics page of one agent.
pub struct Page {
    source: Arc<dyn Source>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    traffic: Totals,
    lost_events: Total,
    shown: Option<(Instant, Arc<str>)>,
}

impl Page {
    /// A page over a source. Packets are counted from here on: the source is read once, so this may block for some
    /// milliseconds.
    pub fn new(source: Arc<dyn Source>) -> Self {
        let mut state = State::default();
        // Without initial values the first page counts from its own.
        if let Ok(rows) = source.snapshot().traffic {
            state.traffic.take(&rows);
        }
        Self {
            source,
            state: Mutex::new(state),
        }
    }

    /// The page in the `OpenMetrics` text format, at most 200 ms old. May block for some milliseconds, and for as long
    /// as another reader's page takes.
    pub fn render(&self) -> Result<Arc<str>, fmt::Error> {
        // A panic of the source in another thread leaves the sums unchanged.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, page)) = state.shown.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
            return Ok(Arc::clone(page));
        }
        let page: Arc<str> = self.fresh(&mut state)?.into();
        state.shown = Some((Instant::now(), Arc::clone(&page)));
        Ok(page)
    }

    fn fresh(&self, state: &mut State) -> Result<String, fmt::Error> {
        let snapshot = self.source.snapshot();
        if let Ok(rows) = &snapshot.traffic {
            state.traffic.take(rows);
        }
        let lost_events = snapshot
            .lost_events
            .as_ref()
            .ok()
            .map(|lost| state.lost_events.take(*lost));
        text::page(Facts {
            traffic: state.traffic.sums().clone(),
            lost_events,
            snapshot,
        })
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
