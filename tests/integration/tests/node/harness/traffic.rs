use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use kni_integration::{
    eventually_sync, patience, require,
    traffic::{Matrix, NoAnswer, Probe, Servers, Stream, new_token, ping, tcp_get, udp_ask},
};

use super::{V4, V6, pair};

const PORT: u16 = 8080;
const SHORT: Duration = Duration::from_millis(300);
/// Requests that are made while there is no path.
const LOST: u64 = 30;

#[test]
fn the_same_address_answers_as_whom_it_belongs_to() -> Result<()> {
    require!(root, netns, ip);
    // Two pairs with equal addresses: reachability is the same in both, the identities differ.
    let [blue, red] = [pair(["blue-1", "blue-2"])?, pair(["red-1", "red-2"])?];
    let servers = [
        Servers::start(&blue[1], "blue-2", PORT)?,
        Servers::start(&red[1], "red-2", PORT)?,
    ];
    let mut probes = Vec::new();
    for address in [V4[1], V6[1]] {
        let to = address.parse()?;
        probes.push(Probe {
            from: &blue[0],
            to,
            expected: Some("blue-2"),
        });
        probes.push(Probe {
            from: &red[0],
            to,
            expected: Some("red-2"),
        });
    }
    for nobody in ["192.0.2.77", "2001:db8::77"] {
        probes.push(Probe {
            from: &blue[0],
            to: nobody.parse()?,
            expected: None,
        });
    }
    let matrix = Matrix::run(&probes, &[&servers[0], &servers[1]], PORT, SHORT);
    assert_eq!(matrix.rows.len(), 18);
    matrix.assert_expected();

    let wrong = Probe {
        from: &red[0],
        to: V4[1].parse()?,
        expected: Some("blue-2"),
    };
    let matrix = Matrix::run(&[wrong], &[&servers[0], &servers[1]], PORT, SHORT);
    assert_eq!(
        matrix.failures().len(),
        3,
        "another server's answers passed for blue-2's:\n{matrix}"
    );
    let silence = Probe {
        from: &red[0],
        to: V4[1].parse()?,
        expected: None,
    };
    let matrix = Matrix::run(&[silence], &[&servers[0], &servers[1]], PORT, SHORT);
    assert_eq!(matrix.failures().len(), 3, "answers passed for silence:\n{matrix}");
    Ok(())
}

#[test]
fn a_question_that_arrives_without_an_answer_is_no_silence() -> Result<()> {
    require!(root, netns, ip, nft);
    let [from, to] = pair(["mute-1", "mute-2"])?;
    let servers = Servers::start(&to, "mute-2", PORT)?;
    // Requests pass, answers do not.
    to.nft("table inet t {\n chain out {\n type filter hook output priority 0; policy drop;\n }\n }\n")?;
    let probes = [Probe {
        from: &from,
        to: V4[1].parse()?,
        expected: None,
    }];
    let matrix = Matrix::run(&probes, &[&servers], PORT, SHORT);
    let failed: Vec<_> = matrix.failures().iter().map(|row| row.protocol).collect();
    // The TCP request is sent only after a successful handshake.
    assert_eq!(failed, ["UDP", "ping"], "{matrix}");
    Ok(())
}

#[test]
fn probes_tell_why_there_is_no_answer() -> Result<()> {
    require!(root, netns, ip, nft);
    let [from, to] = pair(["why-1", "why-2"])?;
    let (v4, v6) = (V4[1].parse()?, V6[1].parse()?);
    for address in [v4, v6] {
        assert_eq!(tcp_get(&from, address, PORT, SHORT), Err(NoAnswer::Refused));
        assert_eq!(udp_ask(&from, address, PORT, SHORT), Err(NoAnswer::Refused));
        assert_eq!(ping(&from, address, &new_token(), SHORT), Ok(()));
    }
    for beyond in ["203.0.113.1", "2001:db8:ffff::1"] {
        assert_eq!(tcp_get(&from, beyond.parse()?, PORT, SHORT), Err(NoAnswer::Unreachable));
        assert_eq!(
            ping(&from, beyond.parse()?, &new_token(), SHORT),
            Err(NoAnswer::Unreachable)
        );
    }
    to.nft("table inet t {\n chain in {\n type filter hook input priority 0; policy drop;\n }\n }\n")?;
    for address in [v4, v6] {
        assert_eq!(tcp_get(&from, address, PORT, SHORT), Err(NoAnswer::Timeout));
        assert_eq!(udp_ask(&from, address, PORT, SHORT), Err(NoAnswer::Timeout));
        assert_eq!(ping(&from, address, &new_token(), SHORT), Err(NoAnswer::Timeout));
    }
    Ok(())
}

#[test]
fn a_stream_counts_what_was_lost() -> Result<()> {
    require!(root, netns, ip);
    let [from, to] = pair(["stream-1", "stream-2"])?;
    let _servers = Servers::start(&to, "stream-2", PORT)?;
    let at = |address: &str| -> Result<_> { Ok(SocketAddr::new(address.parse()?, PORT)) };
    let whole = [Stream::udp(&from, at(V4[1])?)?, Stream::tcp(&from, at(V6[1])?)?];
    for stream in whole {
        let begun = Instant::now();
        stream.wait_for_answers(100)?;
        let report = stream.stop();
        report.assert_whole("stream-2");
        assert!(
            report.answered >= 100 && report.longest_silence > Duration::ZERO,
            "{report:?}"
        );
        assert!(
            begun.elapsed() > Duration::from_millis(50),
            "faster than one each millisecond"
        );
    }

    let broken = Stream::udp(&from, at(V4[1])?)?;
    broken.wait_for_answers(50)?;
    to.ip(&["link set eth0 down"])?;
    let asked = broken.asked();
    until_asked(&broken, asked + LOST)?;
    to.ip(&["link set eth0 up"])?;
    broken.wait_for_answers(50)?;
    let report = broken.stop();
    // The last of these may have been sent when the link was up again.
    assert!(report.lost() >= LOST - 1 && report.answered >= 100, "{report:?}");
    assert!(report.broken.is_none(), "{report:?}");
    // Answers of at most a window came after the link was down; the requests after the next window are ten milliseconds
    // apart.
    assert!(report.longest_silence > Duration::from_millis(100), "{report:?}");
    Ok(())
}

/// A stream that is dropped waits for no answer.
#[test]
fn a_stream_to_nobody_ends_at_once() -> Result<()> {
    require!(root, netns, ip);
    let [from, to] = pair(["nobody-1", "nobody-2"])?;
    to.ip(&["link set eth0 down"])?;
    let stream = Stream::unanswered(&from, SocketAddr::new(V4[1].parse()?, PORT))?;
    until_asked(&stream, LOST)?;
    let begun = Instant::now();
    drop(stream);
    assert!(begun.elapsed() < patience() / 2, "it waited for its end mark");
    Ok(())
}

fn until_asked(stream: &Stream, requests: u64) -> Result<()> {
    eventually_sync(patience(), || {
        ensure!(stream.asked() >= requests, "{} of {requests} requests", stream.asked());
        Ok(())
    })
}
