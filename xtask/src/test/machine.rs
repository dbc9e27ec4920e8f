//! The state of the machine in a few lines: load, pressure, and the processes that use its CPUs.

use std::{collections::BTreeMap, fs, path::Path, thread, time::Duration};

/// How long processes are observed.
const OBSERVED: Duration = Duration::from_millis(200);
/// How many processes are listed.
const LISTED: usize = 5;

/// A process with the CPU time that it has used.
#[derive(Debug, PartialEq, Eq)]
struct Process {
    name: String,
    /// Ticks of 10 ms.
    ticks: u64,
}

/// The state now, as lines; takes [`OBSERVED`].
pub(super) fn state() -> Vec<String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mut lines = vec![format!("load {}", read("/proc/loadavg").trim())];
    for what in ["cpu", "io", "memory"] {
        if let Some(line) = read(&format!("/proc/pressure/{what}")).lines().next() {
            lines.push(format!("pressure of {what}: {line}"));
        }
    }
    let before = processes();
    thread::sleep(OBSERVED);
    let used = busiest(&before, &processes());
    if !used.is_empty() {
        lines.push(format!("busiest processes: {}", used.join(", ")));
    }
    lines
}

/// The processes that used the most CPU time between two moments, each with its share of a CPU in percent.
fn busiest(before: &BTreeMap<u32, Process>, now: &BTreeMap<u32, Process>) -> Vec<String> {
    let mut used: Vec<(u64, &str, u32)> = now
        .iter()
        .map(|(id, process)| {
            let earlier = before.get(id).map_or(0, |process| process.ticks);
            (process.ticks.saturating_sub(earlier), process.name.as_str(), *id)
        })
        .filter(|(ticks, ..)| *ticks > 0)
        .collect();
    used.sort_by(|a, b| b.cmp(a));
    let percent = |ticks: u64| u128::from(ticks) * 10 * 100 / OBSERVED.as_millis();
    let listed = used.into_iter().take(LISTED);
    listed
        .map(|(ticks, name, id)| format!("{name} ({id}) {} %", percent(ticks)))
        .collect()
}

fn processes() -> BTreeMap<u32, Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return BTreeMap::new();
    };
    entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let id = path.file_name()?.to_str()?.parse().ok()?;
            Some((id, process(&path)?))
        })
        .collect()
}

fn process(folder: &Path) -> Option<Process> {
    parse(&fs::read_to_string(folder.join("stat")).ok()?)
}

/// Reads `7 (a name) S 1 ...`, where the 14th and 15th field are ticks of a user and of the system.
fn parse(stat: &str) -> Option<Process> {
    let (name, rest) = stat.split_once(" (")?.1.rsplit_once(") ")?;
    let mut fields = rest.split(' ').skip(11).map(str::parse::<u64>);
    let ticks = fields.next()?.ok()? + fields.next()?.ok()?;
    Some(Process {
        name: name.to_owned(),
        ticks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_a_process_are_read() {
        let stat = "7 (tmux: (x) y) S 1 7 7 0 -1 4194560 1 2 3 4 30 12 0 0 20 0 1 0 5 6 7";
        let expected = Process {
            name: "tmux: (x) y".to_owned(),
            ticks: 42,
        };
        assert_eq!(parse(stat), Some(expected));
        assert_eq!(parse(""), None);
    }

    #[test]
    fn the_busiest_comes_first() {
        let at = |ticks: [u64; 3]| -> BTreeMap<u32, Process> {
            let names = ["a", "b", "c"].map(str::to_owned);
            (1..)
                .zip(names.into_iter().zip(ticks))
                .map(|(id, (name, ticks))| (id, Process { name, ticks }))
                .collect()
        };
        assert_eq!(busiest(&at([5, 5, 5]), &at([7, 5, 25])), ["c (3) 100 %", "a (1) 10 %"]);
    }

    #[test]
    fn this_machine_has_a_load() {
        assert!(state().first().unwrap().starts_with("load "));
    }
}
