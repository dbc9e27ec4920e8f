//! Limits of calls and waits, and the factor by which a run multiplies all of them.

use std::time::Duration;

tokio::task_local! {
    static FACTOR: f64;
}

/// Runs `cases`, in which all limits are `factor` times as long.
pub(crate) async fn multiplied<F: Future>(factor: f64, cases: F) -> F::Output {
    FACTOR.scope(factor, cases).await
}

/// A limit, multiplied by the factor of the run.
pub(crate) fn scaled(limit: Duration) -> Duration {
    FACTOR.try_with(|factor| limit.mul_f64(*factor)).unwrap_or(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_limit_is_multiplied_inside_a_run_only() {
        let limit = Duration::from_secs(2);
        let inside = multiplied(3.0, async { scaled(limit) }).await;
        assert_eq!((inside, scaled(limit)), (limit * 3, limit));
    }
}
