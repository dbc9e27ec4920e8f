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
    fn a_slow_round_does_not_change_the_ratio() {
        assert!((paired_ratio(&[10.0, 5.0, 10.0], &[20.0, 10.0, 20.0]) - 0.5).abs() < f64::EPSILON);
    }
}
