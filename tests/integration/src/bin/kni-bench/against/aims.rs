//! Lists what is compared, with the aims.

use super::{WORKLOADS, timed::CASES};
use crate::comparison::{Aim, Comparison};

/// Everything that is compared.
pub(super) fn comparisons() -> Vec<Comparison> {
    let mut all = Vec::new();
    for (key, title) in CASES {
        all.push(Comparison::new(
            format!("ns, {title}: new / old"),
            format!("new {key}"),
            format!("old {key}"),
            Some(Aim::AtMost(0.6)),
        ));
    }
    for (suffix, family) in [("", ""), ("_v6", ", IPv6")] {
        for (measure, _) in WORKLOADS {
            let of = |who: &str, path: &str| format!("{who} {path}{suffix} {measure}");
            all.push(Comparison::new(
                format!("{measure}{family}: new / old"),
                of("new", "kni"),
                of("old", "kni"),
                None,
            ));
            let aim = match (suffix, measure) {
                ("", "tcp_rr") => 0.98,
                ("", _) => 0.97,
                _ => 0.95,
            };
            all.push(Comparison::new(
                format!("{measure}{family}: policies / bare redirect_peer"),
                of("new", "kni_policy"),
                of("bare", "redirect_peer"),
                Some(Aim::AtLeast(aim)),
            ));
        }
    }
    for (title, first, second, aim) in [
        ("1 000 services / one", "kni_1000_services", "kni_one_service", 0.95),
        (
            "flow events followed / off",
            "kni_events_followed",
            "kni_events_off",
            0.97,
        ),
    ] {
        all.push(Comparison::new(
            format!("connections: {title}"),
            format!("new {first} connections"),
            format!("new {second} connections"),
            Some(Aim::AtLeast(aim)),
        ));
    }
    all
}
