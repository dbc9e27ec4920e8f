//! Reads what a simulation costs: the audit log and the metrics of the API server, and the processes' times and memory.

use std::{collections::BTreeMap, fs, time::Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::fleet::Fleet;
use crate::{cluster::Cluster, cpu_times::CpuTimes};

/// Ticks of the kernel's process times in a second.
const TICKS: f64 = 100.0;

/// The state of all counters at one moment.
#[derive(Debug, Clone)]
pub struct Meters {
    at: Instant,
    /// Seconds of CPU time by program.
    cpu: BTreeMap<String, f64>,
    /// Resident bytes by program.
    pub memory: BTreeMap<String, f64>,
    /// Seconds of CPU time that all programs of the machine have used.
    machine: f64,
    /// Requests by who, verb and resource; from the audit log.
    requests: BTreeMap<Request, f64>,
    /// Bytes of answers by verb and resource, without watches; from the metrics.
    answers: BTreeMap<String, f64>,
    /// Sent watch events by resource.
    events: BTreeMap<String, f64>,
    /// Bytes of these.
    event_bytes: BTreeMap<String, f64>,
    /// Changes of objects that the API server's watch caches received, by resource.
    stored: BTreeMap<String, f64>,
    /// Open watches by resource.
    pub watches: BTreeMap<String, f64>,
}

/// A kind of request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// `agents`, `kni-controller`, `load` (who makes pods, and the kubelets), or `kubernetes`.
    pub who: &'static str,
    /// The verb.
    pub verb: String,
    /// Resource and subresource.
    pub resource: String,
}

impl Request {
    /// Whether it may change an object.
    pub fn is_write(&self) -> bool {
        !matches!(self.verb.as_str(), "get" | "list" | "watch")
    }

    /// Whether it is written on a timer, and not caused by a change: figures of networks follow earlier changes, at
    /// most once in 30 s for each network, and kni-controller renews its lease.
    pub fn is_on_a_timer(&self) -> bool {
        self.resource == "podnetworks/status" || (self.who == "kni-controller" && self.resource == "leases")
    }

    /// Whether KNI sent it.
    pub fn is_ours(&self) -> bool {
        matches!(self.who, "agents" | "kni-controller")
    }
}

/// The difference between two moments.
#[derive(Debug, Clone)]
pub struct Cost {
    /// Seconds between them.
    pub seconds: f64,
    /// CPU time by program, in cores.
    pub cpu: BTreeMap<String, f64>,
    /// What other programs of the machine used, in cores.
    pub others: f64,
    /// Requests.
    pub requests: BTreeMap<Request, f64>,
    /// Bytes of answers by verb and resource.
    pub answers: BTreeMap<String, f64>,
    /// Watch events by resource: each counts once for every watcher that it was sent to.
    pub events: BTreeMap<String, f64>,
    /// Bytes of these.
    pub event_bytes: BTreeMap<String, f64>,
    /// Changes of objects by resource, whether they were sent to a watch or not.
    pub stored: BTreeMap<String, f64>,
}

impl Cost {
    /// Writes of the agents and kni-controller.
    pub fn writes(&self) -> f64 {
        let ours = self
            .requests
            .iter()
            .filter(|(request, _)| request.is_ours() && request.is_write());
        ours.map(|(_, count)| count).sum()
    }

    /// Requests other than watches of the agents and kni-controller.
    pub fn reads(&self) -> f64 {
        let ours = self
            .requests
            .iter()
            .filter(|(request, _)| request.is_ours() && !request.is_write());
        ours.map(|(_, count)| count).sum()
    }

    /// All watch events.
    pub fn all_events(&self) -> f64 {
        self.events.values().sum()
    }

    /// How many watches received each change of an object, by resource: 0 where none did. Bookmarks of watches count as
    /// events, so it is exact only for a short time.
    pub fn watchers(&self) -> BTreeMap<String, f64> {
        let sent = |resource: &String| self.events.get(resource).copied().unwrap_or_default();
        let changes = self.stored.iter();
        changes
            .map(|(resource, stored)| (resource.clone(), sent(resource) / stored))
            .collect()
    }

    /// Bytes of watch events.
    pub fn all_event_bytes(&self) -> f64 {
        self.event_bytes.values().sum()
    }

    /// Bytes of answers other than watches.
    pub fn all_answers(&self) -> f64 {
        self.answers.values().sum()
    }
}

/// Reads the counters, from where the last reading ended.
#[derive(Debug, Default)]
pub struct Reader {
    offset: u64,
    rest: String,
    requests: BTreeMap<Request, f64>,
}

impl Reader {
    /// The counters now.
    pub async fn read(&mut self, cluster: &Cluster, fleet: &Fleet) -> Result<Meters> {
        self.read_audit(cluster)?;
        let request = http::Request::get("/metrics").body(Vec::new())?;
        let metrics = cluster.client.request_text(request).await?;
        let mut processes: Vec<(String, u32)> = cluster
            .control
            .processes()
            .map(|(name, pid)| (name.to_owned(), pid))
            .collect();
        processes.extend(
            cluster
                .controllers
                .iter()
                .map(|one| ("kni-controller".to_owned(), one.pid())),
        );
        processes.push(("agents".to_owned(), fleet.pid()));
        processes.push(("load".to_owned(), std::process::id()));
        let (mut cpu, mut memory) = (BTreeMap::new(), BTreeMap::new());
        for (name, pid) in processes {
            let (seconds, bytes) = process(pid).with_context(|| name.clone())?;
            *cpu.entry(name.clone()).or_default() += seconds;
            *memory.entry(name).or_default() += bytes;
        }
        Ok(Meters {
            at: Instant::now(),
            cpu,
            memory,
            machine: CpuTimes::read()?.busy().as_secs_f64(),
            requests: self.requests.clone(),
            answers: sums(
                &metrics,
                "apiserver_response_sizes_sum",
                &["verb", "resource", "subresource"],
                "WATCH",
            ),
            events: sums(&metrics, "apiserver_watch_events_total", &["resource"], ""),
            event_bytes: sums(&metrics, "apiserver_watch_events_sizes_sum", &["resource"], ""),
            stored: sums(
                &metrics,
                "apiserver_watch_cache_events_received_total",
                &["resource"],
                "",
            ),
            watches: sums(&metrics, "apiserver_registered_watchers", &["resource"], "")
                .into_iter()
                .chain(sums(&metrics, "apiserver_longrunning_requests", &["resource"], ""))
                .collect(),
        })
    }

    /// The writes of the agents and kni-controller until now that are not on a timer.
    pub(super) fn own_writes(&mut self, cluster: &Cluster) -> Result<f64> {
        self.read_audit(cluster)?;
        let own = self
            .requests
            .iter()
            .filter(|(request, _)| request.is_ours() && request.is_write() && !request.is_on_a_timer());
        Ok(own.map(|(_, count)| count).sum())
    }

    fn read_audit(&mut self, cluster: &Cluster) -> Result<()> {
        let (text, offset) = cluster.control.audit_log_from(self.offset)?;
        self.offset = offset;
        let text = std::mem::take(&mut self.rest) + &text;
        let complete = text.rfind('\n').map_or(0, |end| end + 1);
        text[complete..].clone_into(&mut self.rest);
        for line in text[..complete].lines() {
            let Ok(event) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            // A watch is recorded again at its end.
            if event["verb"] == "watch" && event["stage"] == "ResponseComplete" {
                continue;
            }
            let field = |name: &str| event["objectRef"][name].as_str().unwrap_or_default();
            let resource = match field("subresource") {
                "" => field("resource").to_owned(),
                sub => format!("{}/{sub}", field("resource")),
            };
            let request = Request {
                who: who(event["user"]["username"].as_str().unwrap_or_default()),
                verb: event["verb"].as_str().unwrap_or_default().to_owned(),
                resource,
            };
            *self.requests.entry(request).or_default() += 1.0;
        }
        Ok(())
    }
}

fn who(user: &str) -> &'static str {
    match user {
        "system:serviceaccount:kni-system:kni-agent" => "agents",
        "system:serviceaccount:kni-system:kni-controller" => "kni-controller",
        "test" | "simulated-kubelet" => "load",
        _ => "kubernetes",
    }
}

impl Meters {
    /// The cost since an earlier moment.
    pub fn since(&self, earlier: &Self) -> Cost {
        let seconds = (self.at - earlier.at).as_secs_f64();
        let cpu: BTreeMap<String, f64> = difference(&self.cpu, &earlier.cpu)
            .into_iter()
            .map(|(name, used)| (name, used / seconds))
            .collect();
        Cost {
            seconds,
            others: (self.machine - earlier.machine) / seconds - cpu.values().sum::<f64>(),
            cpu,
            requests: difference(&self.requests, &earlier.requests),
            answers: difference(&self.answers, &earlier.answers),
            events: difference(&self.events, &earlier.events),
            event_bytes: difference(&self.event_bytes, &earlier.event_bytes),
            stored: difference(&self.stored, &earlier.stored),
        }
    }
}

fn difference<K: Ord + Clone>(now: &BTreeMap<K, f64>, before: &BTreeMap<K, f64>) -> BTreeMap<K, f64> {
    let changes = now
        .iter()
        .map(|(key, value)| (key.clone(), value - before.get(key).unwrap_or(&0.0)));
    changes.filter(|(_, change)| *change > 0.0).collect()
}

/// Seconds of CPU time and resident bytes of a process.
fn process(pid: u32) -> Result<(f64, f64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().context("stat")?.split_whitespace().collect();
    // utime and stime are the 14th and 15th field; the first of these is the third.
    let ticks = |index: usize| {
        fields
            .get(index)
            .and_then(|field| field.parse::<f64>().ok())
            .unwrap_or_default()
    };
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = resident.and_then(|text| text.trim().trim_end_matches(" kB").parse::<f64>().ok());
    Ok(((ticks(11) + ticks(12)) / TICKS, kilobytes.unwrap_or_default() * 1024.0))
}

/// The values of a metric, summed by these labels. Rows that contain `without` are left out, unless it is empty.
fn sums(metrics: &str, name: &str, labels: &[&str], without: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for line in metrics.lines() {
        let Some(rest) = line.strip_prefix(name).and_then(|rest| rest.strip_prefix('{')) else {
            continue;
        };
        let Some((row, value)) = rest.rsplit_once("} ") else {
            continue;
        };
        if !without.is_empty() && row.contains(without) {
            continue;
        }
        let of = |label: &str| {
            let start = format!("{label}=\"");
            let mut fields = row
                .split(',')
                .filter_map(|field| field.trim().strip_prefix(start.as_str()));
            fields.next().unwrap_or_default().trim_end_matches('"')
        };
        let key: Vec<&str> = labels
            .iter()
            .map(|label| of(label))
            .filter(|text| !text.is_empty())
            .collect();
        *sums.entry(key.join(" ")).or_default() += value.parse::<f64>().unwrap_or_default();
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchers_are_the_events_of_each_change() {
        let rows = |rows: &[(&str, f64)]| rows.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let cost = Cost {
            seconds: 1.0,
            cpu: BTreeMap::new(),
            others: 0.0,
            requests: BTreeMap::new(),
            answers: BTreeMap::new(),
            // Bookmarks alone are of no change.
            events: rows(&[("pods", 6.0), ("nodes", 2.0)]),
            event_bytes: BTreeMap::new(),
            stored: rows(&[("pods", 2.0), ("leases", 4.0)]),
        };
        assert_eq!(cost.watchers(), rows(&[("pods", 3.0), ("leases", 0.0)]));
    }

    #[test]
    fn metrics_are_summed_by_label() {
        let text = "# TYPE m counter\nm{group=\"\",resource=\"pods\",verb=\"WATCH\"} 3\n\
                    m{group=\"a\",resource=\"pods\",verb=\"GET\"} 4e+00\nm{resource=\"nodes\"} 1\nmore{resource=\"x\"} 9\n";
        let all = sums(text, "m", &["resource"], "");
        assert_eq!(all, [("nodes".to_owned(), 1.0), ("pods".to_owned(), 7.0)].into());
        let reads = sums(text, "m", &["verb", "resource"], "WATCH");
        assert_eq!(reads, [("GET pods".to_owned(), 4.0), ("nodes".to_owned(), 1.0)].into());
    }
}
