//! Formats numbers for people.

/// Bytes in binary units with one decimal, `512B`, `1.4KiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut text = format!("{count}B");
    for (power, unit) in (1_u32..).zip(UNITS) {
        let scale = 1_u64 << (10 * power);
        if count < scale {
            break;
        }
        let tenths = u128::from(count) * 10 / u128::from(scale);
        text = format!("{}.{}{unit}", tenths / 10, tenths % 10);
    }
    text
}

/// Seconds as the two largest units, `59s`, `3m12s`, `4d3h`.
pub(crate) fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    if days > 0 {
        format!("{days}d{}h", hours % 24)
    } else if hours > 0 {
        format!("{hours}h{}m", minutes % 60)
    } else if minutes > 0 {
        format!("{minutes}m{}s", seconds % 60)
    } else {
        format!("{seconds}s")
    }
}

/// A decimal number of any size; over twelve digits its magnitude, `1.8e19`.
pub(crate) fn amount(decimal: &str) -> String {
    let mut digits = decimal.chars();
    match (digits.next(), digits.next()) {
        (Some(first), Some(second)) if decimal.len() > 12 && decimal.bytes().all(|b| b.is_ascii_digit()) => {
            format!("{first}.{second}e{}", decimal.len() - 1)
        }
        _ => decimal.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_change_unit_at_powers_of_1024() {
        let text = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, u64::MAX].map(bytes);
        assert_eq!(
            text,
            ["0B", "1023B", "1.0KiB", "1.5KiB", "1023.9KiB", "1.0MiB", "15.9EiB"]
        );
    }

    #[test]
    fn durations_show_two_units() {
        let text = [0, 59, 60, 3599, 3600, 86_399, 86_400, 356_400].map(duration);
        assert_eq!(text, ["0s", "59s", "1m0s", "59m59s", "1h0m", "23h59m", "1d0h", "4d3h"]);
    }

    #[test]
    fn only_huge_amounts_are_rounded() {
        let text = [
            "",
            "254",
            "999999999999",
            "1000000000000",
            "18446744073709551870",
            "many more addresses",
        ]
        .map(amount);
        assert_eq!(
            text,
            ["", "254", "999999999999", "1.0e12", "1.8e19", "many more addresses"]
        );
    }
}
