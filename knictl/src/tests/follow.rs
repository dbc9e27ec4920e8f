//! Tests `drops --follow`: the stream's events, and each way it can end.

use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;
use tonic::Status;

use super::{answers, knictl, knictl_on};
use crate::fake::{After, Agent, Answers};

const LINES: &str = "\
1970-01-01T00:00:01.000000Z blue shop/web-0 eth0 from_pod source_address \
TCP 10.0.0.9:1234 > 10.0.0.6:80 len 74 spoofed
1970-01-01T00:00:02.000000Z blue shop/web-0 eth0 from_pod source_address \
TCP 10.0.0.9:1234 > 10.0.0.6:80 len 74 spoofed (3 events lost before)
";

#[tokio::test]
async fn events_are_lines_until_the_agent_ends_the_stream() {
    let agent = Agent::serve(answers::full());
    let ran = knictl(&agent, &["drops", "--follow"]).await;
    assert_eq!(
        (ran.code, ran.out.as_str(), ran.err.as_str()),
        (0, LINES, "The agent ended the stream.\n")
    );
}

#[tokio::test]
async fn events_are_json_lines() {
    let agent = Agent::serve(answers::full());
    let ran = knictl(&agent, &["drops", "--follow", "--json"]).await;
    let events: Vec<Value> = ran
        .out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let expected = serde_json::json!({
        "time": "1970-01-01T00:00:02.000000Z", "timeNs": 2_000_000_000_u64, "network": "blue", "podNamespace": "shop",
        "podName": "web-0", "ifname": "eth0", "direction": "from_pod", "reason": "source_address",
        "source": "10.0.0.9", "destination": "10.0.0.6", "protocol": "TCP", "sourcePort": 1234,
        "destinationPort": 80, "length": 74, "lost": 3, "ethertype": 0x0800, "explanation": "spoofed",
    });
    assert_eq!((events.len(), &events[1]), (2, &expected));
}

#[tokio::test]
async fn events_are_yaml_documents() {
    let agent = Agent::serve(answers::full());
    let ran = knictl(&agent, &["drops", "--follow", "-o", "yaml"]).await;
    let events: Vec<Value> = serde_saphyr::from_multiple(&ran.out).unwrap();
    let losses: Vec<&Value> = events.iter().map(|event| &event["lost"]).collect();
    assert_eq!(losses, [0, 3]);
}

#[tokio::test]
async fn stream_that_fails_is_a_failure_after_its_events() {
    let after = After::Fails(Status::unavailable("the ring buffer is gone"));
    let agent = Agent::serve(Answers {
        after,
        ..answers::full()
    });
    let ran = knictl(&agent, &["drops", "-f"]).await;
    assert_eq!((ran.code, ran.out.as_str()), (1, LINES));
    assert_eq!(
        ran.err,
        "knictl: WatchDrops failed: the ring buffer is gone (Unavailable)\n"
    );
}

#[tokio::test]
async fn interrupt_ends_an_open_stream() {
    let agent = Agent::serve(Answers {
        after: After::Stays,
        ..answers::full()
    });
    let ran = knictl_on(&agent.socket(), &["drops", "-f"], sleep(Duration::from_millis(500))).await;
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, LINES, ""));
}
