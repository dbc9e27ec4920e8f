//! Tests the output for people, character by character.

use std::{ffi::OsString, future::pending};

use kni_proto::runtime::GetStatusResponse;

use super::{Ran, answers, knictl};
use crate::{
    fake::{Agent, Answers},
    run,
    terminal::Terminal,
};

fn ok(out: &str) -> Ran {
    Ran {
        code: 0,
        out: out.to_owned(),
        err: String::new(),
    }
}

#[tokio::test]
async fn status_is_a_sheet() {
    let agent = Agent::serve(answers::full());
    let expected = "\
Ready:               true
Reasons:             <none>
Version:             0.1.0
PID:                 4711
Uptime:              1h2m
Kernel:              6.18.5
Hook:                tcx
Map layout:          1
Pins:                /sys/fs/bpf/kni/v1
Sockets:             /run/kni/kni.sock
                     /tmp/kni.sock
Sandboxes:           3
Attachments:         2
Endpoint capacity:   1024
Warm sandboxes:      8
Pending removals:    0
Pending links:       1
Uplink:              uplink0
Uplink sources:      192.0.2.2
                     2001:db8::2
Egress addresses:    <none>
Uplink programs:     from_uplink tcx/ingress
Host ports:          3
";
    assert_eq!(knictl(&agent, &["status"]).await, ok(expected));
}

#[tokio::test]
async fn status_of_an_agent_that_is_not_ready_fails() {
    let status = GetStatusResponse {
        ready: false,
        reasons: vec!["no default network".into()],
        ..answers::status()
    };
    let agent = Agent::serve(Answers {
        status,
        ..Answers::default()
    });
    for form in ["table", "wide", "json", "yaml"] {
        let ran = knictl(&agent, &["status", "-o", form]).await;
        assert_eq!(ran.code, 1, "{form}");
        assert!(ran.out.contains("no default network"), "{form}");
    }
}

#[tokio::test]
async fn networks_tell_refused_manifests_apart() {
    let agent = Agent::serve(answers::full());
    let ran = knictl(&agent, &["networks"]).await;
    let expected = "\
NAME   ID   DEFAULT   READY   SUBNETS                 MTU    ATTACHMENTS   USED/TOTAL   ORIGIN
blue   1    true      true    10.0.0.0/24,fd00::/64   1500   1             2/1.8e19     blue.yaml:1
red    2    false     false   10.0.0.0/24             1500   1             2/253        red.yaml:1
";
    assert_eq!(ran.out, expected);
    let expected = "\
Network red is not ready: no route table
Network red, number in the cluster: number 7 is that of networks red and green
Refused manifests:
  green.yaml:7: spec.mtu: below 1280
";
    assert_eq!(ran.err, expected);
    assert_eq!(ran.code, 0);
    assert!(
        knictl(&agent, &["networks", "-o", "wide"])
            .await
            .out
            .contains("red.yaml:1    no route table")
    );
    let wide = knictl(&agent, &["networks", "-o", "wide"]).await.out;
    assert!(
        wide.contains("   NUMBER\n") && wide.contains("   7340033\n") && wide.contains("   -\n"),
        "{wide}"
    );
}

#[tokio::test]
async fn interfaces_fit_a_terminal() {
    let agent = Agent::serve(answers::full());
    let expected = "\
NAMESPACE   POD                   NETWORK   IFNAME   ADDRESSES          HOST-IFNAME   READY
shop        web-0                 blue      eth0     10.0.0.5,fd00::5   kni0a1b       true
shop        db\\u{1b}[2J\\u{9b}0m   red       eth0     <none>             kni0a1b       false
";
    assert_eq!(knictl(&agent, &["interfaces"]).await, ok(expected));
}

#[tokio::test]
async fn wide_interfaces_tell_all() {
    let agent = Agent::serve(answers::full());
    let ran = knictl(&agent, &["interfaces", "--output", "wide"]).await;
    let rows: Vec<Vec<&str>> = ran
        .out
        .lines()
        .map(|line| {
            line.split("   ")
                .map(str::trim)
                .filter(|cell| !cell.is_empty())
                .collect()
        })
        .collect();
    let headers = "NAMESPACE POD NETWORK IFNAME ADDRESSES HOST-IFNAME READY KIND IFINDEX HOST-IFINDEX MAC MTU SANDBOX NETNS \
                   PROGRAMS FROM-POD TO-POD DROPPED POLICY PROBLEMS";
    assert_eq!(rows[0], headers.split(' ').collect::<Vec<_>>());
    let healthy = [
        "veth",
        "2",
        "40",
        "0a:58:0a:00:00:05",
        "1500",
        "5f2b",
        "/run/netns/a",
        "from_pod:70@tcx/ingress,to_pod:71@tcx/egress",
        "12/1.5KiB",
        "9/900B",
        "0/0B",
        "enforced",
        "<none>",
    ];
    assert_eq!(rows[1][7..], healthy);
    assert_eq!(
        rows[2][14..],
        [
            "<none>",
            "12/1.5KiB",
            "9/900B",
            "1/60B",
            "not enforced",
            "from_pod is not attached; to_pod is not attached"
        ]
    );
    assert_eq!((rows.len(), ran.code), (3, 0));
}

#[tokio::test]
async fn drops_explain_themselves() {
    let agent = Agent::serve(answers::full());
    let expected = "\
NETWORK   NAMESPACE   POD     IFNAME   DIRECTION   REASON       PACKETS   BYTES   EXPLANATION
blue      shop        web-0   eth0     from_pod    source_mac   4         4096    \
                    the source MAC address is not the pod's (spoofed)
";
    assert_eq!(knictl(&agent, &["drops"]).await, ok(expected));
}

#[tokio::test]
async fn maps_show_how_full_they_are() {
    let agent = Agent::serve(answers::full());
    let expected = "\
NAME        ID   KIND    KEY   VALUE   ENTRIES/MAX   PURPOSE
endpoints   33   Array   4B    64B     2/1024        one row per pod interface
";
    assert_eq!(knictl(&agent, &["maps"]).await, ok(expected));
    let wide = knictl(&agent, &["maps", "-o", "wide"]).await.out;
    assert!(
        wide.lines()
            .nth(1)
            .unwrap()
            .ends_with("   /sys/fs/bpf/kni/v1/maps/endpoints")
    );
}

#[tokio::test]
async fn empty_lists_have_no_table() {
    let agent = Agent::serve(Answers::default());
    for noun in ["networks", "interfaces", "drops", "flows", "services", "maps"] {
        let expected = Ran {
            code: 0,
            out: String::new(),
            err: format!("No {noun} found.\n"),
        };
        assert_eq!(knictl(&agent, &[noun]).await, expected);
    }
}

#[tokio::test]
async fn only_a_table_on_a_screen_is_cut() {
    let agent = Agent::serve(answers::full());
    for (args, is_cut) in [
        (&["drops"][..], true),
        (&["drops", "-o", "wide"], false),
        (&["drops", "-o", "json"], false),
    ] {
        let mut line: Vec<OsString> = vec!["knictl".into(), "--socket".into(), agent.socket().into()];
        line.extend(args.iter().map(OsString::from));
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut terminal = Terminal::new(&mut out, &mut err).on_screen(Some(90));
        run::run(line, &mut terminal, pending()).await;
        let out = String::from_utf8(out).unwrap();
        let whole = knictl(&agent, args).await.out;
        assert_eq!(out != whole, is_cut, "{args:?}: {out}");
        assert_eq!(out.contains('…'), is_cut, "{args:?}: {out}");
        let fits = out.lines().all(|line| line.chars().count() <= 90);
        assert!(fits || !is_cut, "{args:?}: {out}");
    }
}
