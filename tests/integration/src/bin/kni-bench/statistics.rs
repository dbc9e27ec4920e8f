//! Computes medians and percentiles.

/// The median; 0 without values.
pub(crate) fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

/// The smallest value that at least the share `share` of all values does not exceed (nearest rank); 0 without values.
pub(crate) fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank among at most some thousand values"
    )]
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// The smallest value; 0 without values.
pub(crate) fn least(values: &[f64]) -> f64 {
    values.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0)
}

/// The median of the ratios of values of the same round, which removes disturbances that affect both values of a round.
pub(crate) fn paired_ratio(ours: &[f64], others: &[f64]) -> f64 {
    let ratios: Vec<f64> = ours.iter().zip(others).map(|(ours, other)| ours / other).collect();
    median(&ratios)
}

/// The values between which the median of the distribution lies with a probability of 95 %: order statistics, whose
/// ranks follow from the binomial distribution. With fewer than 6 values the smallest and the largest one.
pub(crate) fn median_interval(values: &[f64]) -> [f64; 2] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (mut rank, mut beyond) = (0, 0.0);
    #[expect(clippy::cast_precision_loss, reason = "a number of rounds")]
    let count = sorted.len() as f64;
    // Probability that exactly `rank` of the values are below the median.
    let mut exactly = 0.5_f64.powf(count);
    let mut below = 0.0;
    loop {
        beyond += exactly;
        if 2.0 * beyond > 0.05 {
            break;
        }
        exactly *= (count - below) / (below + 1.0);
        below += 1.0;
        rank += 1;
    }
    let rank = std::cmp::max(rank, 1);
    let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
    [at(rank - 1), at(sorted.len().saturating_sub(rank))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert!((median(&values) - 3.0).abs() < f64::EPSILON);
        assert!((percentile(&values, 0.99) - 5.0).abs() < f64::EPSILON);
        assert!((least(&values) - 1.0).abs() < f64::EPSILON);
        assert!(median(&[]).abs() < f64::EPSILON);
    }

    #[test]
    fn the_interval_of_the_median_has_the_ranks_of_the_tables() {
        let values = |count: u8| (1..=count).map(f64::from).collect::<Vec<_>>();
        let near = |interval: [f64; 2], low: u8, high: u8| {
            (interval[0] - f64::from(low)).abs() < f64::EPSILON && (interval[1] - f64::from(high)).abs() < f64::EPSILON
        };
        for (count, low, high) in [(5, 1, 5), (6, 1, 6), (10, 2, 9), (20, 6, 15), (30, 10, 21)] {
            assert!(near(median_interval(&values(count)), low, high), "{count}");
        }
        assert!(near(median_interval(&[]), 0, 0));
    }

    #[test]
    fn a_slow_round_does_not_change_the_ratio() {
        assert!((paired_ratio(&[10.0, 5.0, 10.0], &[20.0, 10.0, 20.0]) - 0.5).abs() < f64::EPSILON);
    }
}
