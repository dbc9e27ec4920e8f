//! Runs work to its end although its caller goes away, at no cost while the caller stays.

use std::{
    fmt,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::runtime::{Handle, RuntimeFlavor};

/// The work panicked. The panic hook has logged the message and the location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the work panicked")]
pub struct Panicked;

/// Runs `work` on the caller's task. If the caller drops the future before its end, the rest of the work runs on a task
/// of its own; a dropped future that was never polled has not begun, and nothing runs.
///
/// A task for each such piece of work would do the same, but its changes of tasks may each wake another thread.
pub fn to_completion<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> ToCompletion<T> {
    ToCompletion {
        work: Some(Box::pin(work)),
        has_begun: false,
    }
}

/// The future of [`to_completion`].
pub struct ToCompletion<T: Send + 'static> {
    /// `None` once it has ended.
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    has_begun: bool,
}

impl<T: Send + 'static> fmt::Debug for ToCompletion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToCompletion").finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Future for ToCompletion<T> {
    type Output = Result<T, Panicked>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.has_begun = true;
        let Some(work) = &mut self.work else {
            return Poll::Ready(Err(Panicked));
        };
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx)));
        let ended = match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(output)) => Ok(output),
            Err(_payload) => Err(Panicked),
        };
        self.work = None;
        Poll::Ready(ended)
    }
}

impl<T: Send + 'static> Drop for ToCompletion<T> {
    fn drop(&mut self) {
        // Without a runtime the process ends.
        if self.has_begun
            && let Some(work) = self.work.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(work);
        }
    }
}

/// Runs work that may wait inside the kernel on the calling thread; the runtime gives the other tasks of the thread to
/// another one. Unlike with `spawn_blocking`, the caller waits for no other thread. In a runtime of one thread, as in
/// tests, the other tasks wait.
pub fn in_place<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    let work = || catch_unwind(AssertUnwindSafe(work)).map_err(|_payload| Panicked);
    if matches!(flavor, Ok(RuntimeFlavor::MultiThread)) {
        tokio::task::block_in_place(work)
    } else {
        work()
    }
}

/// As [`in_place`], for work that also waits for other tasks and threads: they wake the calling thread directly.
pub async fn in_place_until_done<T>(work: impl Future<Output = T>) -> T {
    let runtime = Handle::current();
    if matches!(runtime.runtime_flavor(), RuntimeFlavor::MultiThread) {
        tokio::task::block_in_place(|| runtime.block_on(work))
    } else {
        work.await
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        time::Duration,
    };

    use tokio::{sync::Notify, time::timeout};

    use super::*;

    #[tokio::test]
    async fn work_ends_although_its_caller_goes() {
        let (go, ended) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let work = {
            let (go, ended) = (Arc::clone(&go), Arc::clone(&ended));
            async move {
                go.notified().await;
                ended.notify_one();
            }
        };
        let gone = timeout(Duration::from_millis(10), to_completion(work)).await;
        assert!(gone.is_err());
        go.notify_one();
        timeout(Duration::from_secs(10), ended.notified()).await.unwrap();
    }

    #[tokio::test]
    async fn work_that_was_never_polled_does_not_begin() {
        let begun = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&begun);
        drop(to_completion(async move { count.fetch_add(1, Ordering::Relaxed) }));
        tokio::task::yield_now().await;
        assert_eq!(begun.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_the_caller() {
        let panics = async { panic!("this test panics on purpose") };
        assert_eq!(to_completion::<()>(panics).await, Err(Panicked));
        assert_eq!(to_completion(async { 7 }).await, Ok(7));
        assert_eq!(
            in_place(|| panic!("this test panics on purpose")),
            Err::<(), _>(Panicked)
        );
        assert_eq!(in_place(|| 7), Ok(7));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_run_beside_blocking_work() {
        let runs = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&runs);
        let blocked = tokio::spawn(async move {
            in_place(|| {
                let started = std::time::Instant::now();
                while count.load(Ordering::Relaxed) == 0 && started.elapsed() < Duration::from_secs(10) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                count.load(Ordering::Relaxed)
            })
        });
        tokio::spawn(async move { runs.fetch_add(1, Ordering::Relaxed) });
        assert_eq!(blocked.await.unwrap(), Ok(1));
        let answered = tokio::spawn(in_place_until_done(async { tokio::spawn(async { 7 }).await.unwrap() }));
        assert_eq!(answered.await.unwrap(), 7);
    }
}
