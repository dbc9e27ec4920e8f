use std::{net::SocketAddr, thread, time::Duration};

use anyhow::Result;
use kni_integration::{
    require,
    traffic::{Matrix, NoAnswer, Probe, Servers, Stream, new_token, ping, tcp_get, udp_ask},
};

use super::{V4, V6, pair};

const PORT: u16 = 8080;
const SHORT: Duration = Duration::from_millis(300);

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
    thread::sleep(Duration::from_millis(200));
    for stream in whole {
        let report = stream.stop();
        report.assert_whole("stream-2");
        assert!(report.sent > 50, "{report:?}");
        assert!(report.longest_silence < Duration::from_millis(150), "{report:?}");
    }

    let broken = Stream::udp(&from, at(V4[1])?)?;
    thread::sleep(Duration::from_millis(100));
    to.ip(&["link set eth0 down"])?;
    thread::sleep(Duration::from_millis(200));
    to.ip(&["link set eth0 up"])?;
    thread::sleep(Duration::from_millis(200));
    let report = broken.stop();
    assert!(report.lost() > 50 && report.answered > 50, "{report:?}");
    assert!(report.longest_silence > Duration::from_millis(150), "{report:?}");
    Ok(())
}
