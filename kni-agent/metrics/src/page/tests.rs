use std::sync::atomic::{AtomicUsize, Ordering};

use kni_common::{Direction, Verdict};
use kni_model::durations::Durations;

use super::*;
use crate::{
    ControlPlane, MapUse, PolicyState, PortUse, ProgramUse, RequestUse, Snapshot, StateUse, TaskUse, Traffic, WatchUse,
};

/// Returns the values of the test, and counts its calls.
struct Fake {
    answer: Mutex<Snapshot>,
    reads: AtomicUsize,
}

impl Source for Fake {
    fn snapshot(&self) -> Snapshot {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.answer.lock().unwrap().clone()
    }
}

fn traffic(owner: &str, verdict: Verdict, packets: u64) -> Traffic {
    Traffic {
        owner: owner.to_owned(),
        network: "blue".to_owned(),
        direction: Direction::FromPod,
        verdict,
        packets,
        bytes: packets * 100,
    }
}

fn full() -> Snapshot {
    let mut sync = Durations::default();
    sync.observe(Duration::from_micros(700));
    sync.observe(Duration::from_mins(1));
    Snapshot {
        traffic: Ok(Vec::new()),
        flows: Ok((12, 3)),
        lost_events: Ok(7),
        policy: Ok(PolicyState {
            rows: vec![("policy", 40), ("ports", 2)],
            sync,
            failures: 1,
        }),
        maps: Ok(vec![MapUse {
            name: "FLOWS4".to_owned(),
            entries: 12,
            max_entries: 131_072,
        }]),
        masquerade: Ok(vec![PortUse {
            family: "ipv4",
            protocol: "tcp",
            used: 5,
        }]),
        programs: Ok(vec![ProgramUse {
            name: "from_pod".to_owned(),
            runs: 4,
            run_ns: 1_500_000_000,
        }]),
        endpoints: Ok(vec![("blue".to_owned(), 2), ("red".to_owned(), 0)]),
        attach: Ok(vec![("all", sync)]),
        state: StateUse {
            problems: vec![("lost", 1)],
            repairs: vec![("pins", 2)],
            shared_ports: 0,
            early_attaches: 5,
            unknown_extradata: vec![("AttachInterface", 4)],
        },
        control_plane: ControlPlane {
            requests: vec![RequestUse {
                verb: "patch",
                resource: "podinterfaces/status".to_owned(),
                code: "409".to_owned(),
                count: 3,
            }],
            watches: vec![WatchUse {
                kind: "pods",
                last_event: Some(Duration::from_millis(1500)),
                restarts: 2,
            }],
            objects: vec![("pods", 30)],
            tasks: vec![TaskUse {
                task: "removals",
                last_run: Duration::from_millis(250),
            }],
        },
    }
}

fn page() -> (Arc<Fake>, Page) {
    let source = Arc::new(Fake {
        answer: Mutex::new(full()),
        reads: AtomicUsize::new(0),
    });
    (Arc::clone(&source), Page::new(source))
}

const EXPECTED: &str = r#"# HELP kni_build The agent and its maps' layout
# TYPE kni_build info
kni_build_info{version="VERSION",layout="LAYOUT"} 1
# HELP kni_scrape_error Whether a part of this page could not be read and is left out
# TYPE kni_scrape_error gauge
kni_scrape_error{part="traffic"} 0
kni_scrape_error{part="flows"} 0
kni_scrape_error{part="lost_events"} 0
kni_scrape_error{part="policy"} 0
kni_scrape_error{part="maps"} 0
kni_scrape_error{part="masquerade"} 0
kni_scrape_error{part="programs"} 0
kni_scrape_error{part="endpoints"} 0
kni_scrape_error{part="attach"} 0
# HELP kni_packets Packets by what was decided about them
# TYPE kni_packets counter
kni_packets_total{network="blue",direction="from_pod",verdict="redirected"} 9
kni_packets_total{network="blue",direction="from_pod",verdict="no_route"} 2
# HELP kni_bytes Bytes of these packets, from the Ethernet header on
# TYPE kni_bytes counter
kni_bytes_total{network="blue",direction="from_pod",verdict="redirected"} 900
kni_bytes_total{network="blue",direction="from_pod",verdict="no_route"} 200
# HELP kni_drops Dropped packets
# TYPE kni_drops counter
kni_drops_total{network="blue",direction="from_pod",reason="no_route"} 2
# HELP kni_flow_events_lost Flow and drop events that were not sent to the agent: too many, or no room
# TYPE kni_flow_events_lost counter
kni_flow_events_lost_total 7
# HELP kni_flows Rows of the flow tables; a connection has two
# TYPE kni_flows gauge
kni_flows{family="ipv4"} 12
kni_flows{family="ipv6"} 3
# HELP kni_policy_rows Rows of the policy tables
# TYPE kni_policy_rows gauge
kni_policy_rows{table="policy"} 40
kni_policy_rows{table="ports"} 2
"#;

const REST: &str = r#"# HELP kni_policy_sync_failures Changes of policies, pods or services that could not be applied at once
# TYPE kni_policy_sync_failures counter
kni_policy_sync_failures_total 1
# HELP kni_map_entries Rows in use
# TYPE kni_map_entries gauge
kni_map_entries{map="FLOWS4"} 12
# HELP kni_map_max_entries Rows that fit
# TYPE kni_map_max_entries gauge
kni_map_max_entries{map="FLOWS4"} 131072
# HELP kni_program_runs Runs that the kernel measured
# TYPE kni_program_runs counter
kni_program_runs_total{program="from_pod"} 4
# HELP kni_program_run_seconds Time in the runs that the kernel measured
# TYPE kni_program_run_seconds counter
# UNIT kni_program_run_seconds seconds
kni_program_run_seconds_total{program="from_pod"} 1.5
# HELP kni_masquerade_ports Ports in use for masquerading
# TYPE kni_masquerade_ports gauge
kni_masquerade_ports{family="ipv4",protocol="tcp"} 5
# HELP kni_endpoints Pod interfaces
# TYPE kni_endpoints gauge
kni_endpoints{network="blue"} 2
kni_endpoints{network="red"} 0
# HELP kni_masquerade_ports_shared Ports for masquerading that the kernel gives to sockets of the node, too
# TYPE kni_masquerade_ports_shared gauge
kni_masquerade_ports_shared 0
# HELP kni_state_problems Problems of the agent's own state
# TYPE kni_state_problems gauge
kni_state_problems{problem="lost"} 1
# HELP kni_repairs Objects that other processes took away
# TYPE kni_repairs counter
kni_repairs_total{object="pins"} 2
# HELP kni_attach_early Pods that were attached before the node knew what other nodes have in their networks
# TYPE kni_attach_early counter
kni_attach_early_total 5
# HELP kni_unknown_extradata Entries of extradata with a key that the agent does not know
# TYPE kni_unknown_extradata counter
kni_unknown_extradata_total{method="AttachInterface"} 4
"#;

#[test]
fn the_page_letter_by_letter() {
    let (source, page) = page();
    let rows = vec![
        traffic("a", Verdict::Redirected, 4),
        traffic("b", Verdict::Redirected, 5),
        traffic("a", Verdict::NoRoute, 2),
    ];
    source.answer.lock().unwrap().traffic = Ok(rows);
    let text = page.render().unwrap();
    let expected = EXPECTED
        .replace("VERSION", env!("CARGO_PKG_VERSION"))
        .replace("LAYOUT", &kni_common::layout::LAYOUT_VERSION.to_string());
    assert!(text.starts_with(&expected), "{text}");
    assert!(text.contains(REST), "{text}");
    for line in [
        "# TYPE kni_policy_sync_seconds histogram",
        "kni_policy_sync_seconds_sum 60.0007",
        "kni_policy_sync_seconds_count 2",
        "kni_policy_sync_seconds_bucket{le=\"0.0005\"} 0",
        "kni_policy_sync_seconds_bucket{le=\"0.001\"} 1",
        "kni_policy_sync_seconds_bucket{le=\"10.0\"} 1",
        "kni_policy_sync_seconds_bucket{le=\"+Inf\"} 2",
        "kni_attach_seconds_count{step=\"all\"} 2",
        "kni_attach_seconds_bucket{le=\"0.001\",step=\"all\"} 1",
        "kni_task_last_run_seconds{task=\"removals\"} 0.25",
        "kni_api_requests_total{verb=\"patch\",kind=\"podinterfaces/status\",code=\"409\"} 3",
        "kni_api_conflicts_total{kind=\"podinterfaces/status\"} 3",
        "kni_watch_last_event_seconds{kind=\"pods\"} 1.5",
        "kni_watch_restarts_total{kind=\"pods\"} 2",
        "kni_objects{kind=\"pods\"} 30",
        "# EOF",
    ] {
        assert!(text.lines().any(|have| have == line), "{line}\n{text}");
    }
}

#[test]
fn a_part_that_fails_is_left_out_and_said_so() {
    type Break = fn(&mut Snapshot);
    let cases: [(&str, &[&str], Break); 9] = [
        ("traffic", &["kni_packets", "kni_bytes", "kni_drops"], |s| {
            s.traffic = Err("x".to_owned());
        }),
        ("flows", &["kni_flows"], |s| s.flows = Err("x".to_owned())),
        ("lost_events", &["kni_flow_events_lost"], |s| {
            s.lost_events = Err("x".to_owned());
        }),
        ("policy", &["kni_policy_rows", "kni_policy_sync_seconds"], |s| {
            s.policy = Err("x".to_owned());
        }),
        ("maps", &["kni_map_entries", "kni_map_max_entries"], |s| {
            s.maps = Err("x".to_owned());
        }),
        ("masquerade", &["kni_masquerade_ports"], |s| {
            s.masquerade = Err("x".to_owned());
        }),
        ("programs", &["kni_program_runs", "kni_program_run_seconds"], |s| {
            s.programs = Err("x".to_owned());
        }),
        ("endpoints", &["kni_endpoints"], |s| s.endpoints = Err("x".to_owned())),
        ("attach", &["kni_attach_seconds"], |s| s.attach = Err("x".to_owned())),
    ];
    for (part, missing, break_it) in cases {
        let (source, page) = page();
        break_it(&mut source.answer.lock().unwrap());
        let text = page.render().unwrap();
        let has = |name: &str| text.lines().any(|line| line.starts_with(&format!("# TYPE {name} ")));
        for other in cases.iter().filter(|case| case.0 != part).flat_map(|case| case.1) {
            assert!(has(other), "{part}: {other}\n{text}");
        }
        for name in missing {
            assert!(!has(name), "{part}: {name}\n{text}");
        }
        let errors: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("kni_scrape_error{") && line.ends_with(" 1"))
            .collect();
        assert_eq!(errors, [format!("kni_scrape_error{{part=\"{part}\"}} 1")]);
        assert!(text.ends_with("# EOF\n"));
    }
}

#[test]
fn counters_survive_a_part_that_fails_for_a_while() {
    let (source, page) = page();
    let set = |rows: Result<Vec<Traffic>, String>| source.answer.lock().unwrap().traffic = rows;
    let packets = || {
        let text = page.fresh(&mut page.state.lock().unwrap()).unwrap();
        let line = text.lines().find(|line| line.starts_with("kni_packets_total{"));
        line.map(|line| line.rsplit(' ').next().unwrap().to_owned())
    };
    set(Ok(vec![traffic("a", Verdict::Redirected, 4)]));
    assert_eq!(packets().as_deref(), Some("4"));
    set(Err("no".to_owned()));
    assert_eq!(packets(), None);
    set(Ok(vec![traffic("a", Verdict::Redirected, 6)]));
    assert_eq!(packets().as_deref(), Some("6"));
}

#[test]
fn readers_in_a_hurry_get_the_same_page() {
    let (source, page) = page();
    let first = page.render().unwrap();
    let begun = Instant::now();
    let reads = source.reads.load(Ordering::Relaxed);
    assert_eq!(reads, 2, "once at the beginning, once for the page");
    let second = page.render().unwrap();
    // A machine that was suspended in between may render a new page.
    if begun.elapsed() < FRESH / 2 {
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(source.reads.load(Ordering::Relaxed), 2);
    }
    std::thread::sleep(FRESH);
    page.render().unwrap();
    assert!(source.reads.load(Ordering::Relaxed) > reads);
}

#[test]
fn labels_cannot_leave_their_quotes() {
    let (source, page) = page();
    source.answer.lock().unwrap().endpoints = Ok(vec![("a\"} 1\nkni_evil 2".to_owned(), 1)]);
    let text = page.render().unwrap();
    assert!(!text.lines().any(|line| line.starts_with("kni_evil")), "{text}");
}
