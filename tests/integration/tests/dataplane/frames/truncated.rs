//! Tests every prefix of valid frames: short ones are refused, none is misdelivered.

use anyhow::{Result, ensure};
use kni_common::{Direction, Verdict};
use kni_integration::{
    Namespaces, eventually_sync,
    frames::{Extension, PacketSocket, Payload, TcpFlags, arp_request, neighbour_solicitation, truncations},
    model::Seen,
    patience,
    programs::{Lockstep, counted, runnable},
    require,
};
use kni_model::EndpointId;

use super::table::{A4, A6, B4, B6, DEFAULT_A, FAMILIES, endpoint, from, ip, mac, table, tcp, to, udp};

fn whole_frames() -> Vec<(&'static str, Vec<u8>)> {
    let gateway6 = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    let mut frames = vec![
        ("ARP", arp_request(mac(DEFAULT_A), A4, [169, 254, 1, 1].into())),
        ("NS", neighbour_solicitation(mac(DEFAULT_A), A6, gateway6)),
    ];
    let link = from(DEFAULT_A);
    for (a, b) in FAMILIES {
        let quoted = [&[0; 4][..], &udp(b, a)].concat();
        let kind = if a.is_ipv4() { 3 } else { 1 };
        frames.extend([
            ("UDP", link.frame(&udp(a, b))),
            ("TCP", link.frame(&tcp(a, b, TcpFlags::SYN))),
            ("SCTP", link.frame(&ip(a, b).packet(&Payload::sctp_init(1, 2)))),
            (
                "echo",
                link.frame(&ip(a, b).packet(&Payload::echo_request(a.is_ipv4(), 7, 1, b"data"))),
            ),
            (
                "error",
                link.frame(&ip(a, b).packet(&Payload::Icmp {
                    kind,
                    code: 0,
                    body: quoted,
                })),
            ),
            (
                "fragment",
                link.frame(&ip(a, b).fragments(&Payload::udp(1, 2, &[0; 40]), 24)[0]),
            ),
            ("protocol without ports", link.frame(&ip(a, b).around(47, &[0; 12]))),
        ]);
    }
    let options = ip(A4, B4).options(&[148, 4, 0, 0, 68, 12, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    frames.push(("options", link.frame(&options.packet(&Payload::udp(1, 2, b"data")))));
    let extended = [
        Extension::HopByHop(vec![1, 4, 0, 0, 0, 0]),
        Extension::DestinationOptions(vec![0; 14]),
        Extension::Routing(3, 0, vec![0; 4]),
        Extension::Fragment {
            offset: 0,
            more: true,
            id: 3,
        },
    ];
    let extended = extended
        .into_iter()
        .fold(ip(A6, B6), kni_integration::frames::Ip::extension);
    frames.push((
        "extension headers",
        link.frame(&extended.packet(&Payload::udp(1, 2, b"data"))),
    ));
    frames
}

#[test]
fn every_prefix_of_a_frame_is_truncated() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("truncation", |table| {
        for (name, frame) in whole_frames() {
            for cut in truncations(&frame).filter(|cut| runnable(cut)) {
                let case = format!("{name} of {} bytes cut to {}", frame.len(), cut.len());
                table.fresh(&case, DEFAULT_A, cut, Verdict::Truncated)?;
            }
        }
        Ok(())
    })
}

#[test]
fn every_prefix_of_a_frame_to_a_pod_is_truncated() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("truncation on the way to the pod", |table| {
        for (name, frame) in whole_frames() {
            let frame = towards_the_pod(&frame);
            let expected = if name == "ARP" {
                Verdict::Absorbed
            } else {
                Verdict::Truncated
            };
            for cut in truncations(&frame).filter(|cut| runnable(cut)) {
                let case = format!("{name} of {} bytes cut to {}", frame.len(), cut.len());
                table.received(&case, DEFAULT_A, cut, expected)?;
            }
        }
        Ok(())
    })
}

/// Replaces the MAC addresses by those of a frame from the node. The IP addresses are checked after the lengths.
fn towards_the_pod(frame: &[u8]) -> Vec<u8> {
    [&to(DEFAULT_A).frame_of(0, &[])[..12], &frame[12..]].concat()
}

/// Frames that end inside their IP header arrive over a real interface.
#[test]
fn every_prefix_without_an_ip_header_is_truncated_on_a_real_interface() -> Result<()> {
    require!(root, netns, bpf, ip);
    Lockstep::inside("headless", 4096, |step| {
        let node = Namespaces::current("headless")?;
        step.programs().dataplane().attach("kni5", EndpointId(DEFAULT_A))?;
        node.ip(&[
            "link set kni5 addrgenmode none up",
            "link set peer5 addrgenmode none up",
        ])?;
        step.publish(DEFAULT_A, &endpoint(DEFAULT_A))?;
        let (pod, host) = (PacketSocket::open(&node, "peer5")?, PacketSocket::open(&node, "kni5")?);
        let mut sent = 0;
        for (name, frame) in whole_frames()
            .into_iter()
            .filter(|(name, _)| ["UDP", "options"].contains(name))
        {
            let headless = |cut: &&[u8]| cut.len() >= 14 && !runnable(cut);
            for cut in truncations(&frame).filter(headless) {
                sent += 1;
                pod.send(cut)?;
                // The sender gets an error for its dropped frame.
                let refused = host
                    .send(&towards_the_pod(cut))
                    .err()
                    .and_then(|error| error.raw_os_error());
                ensure!(refused == Some(libc::ENOBUFS), "{name} cut to {} was sent", cut.len());
                for direction in [Direction::FromPod, Direction::ToPod] {
                    let key = (DEFAULT_A, direction, Verdict::Truncated);
                    eventually_sync(patience(), || {
                        let counts = counted(step.programs())?;
                        let packets = counts.get(&key).map_or(0, |(packets, _)| *packets);
                        ensure!(packets >= sent, "{name} cut to {} is not counted as {key:?}", cut.len());
                        Ok(())
                    })?;
                }
            }
        }
        println!("{sent} frames each way: {:?}", counted(step.programs())?);
        ensure!(sent == 20 + 40 + 20, "{sent} frames were cut");
        Ok(())
    })
}

/// The same with length fields that match the truncated length: only the model detects the missing bytes then.
#[test]
fn every_prefix_with_true_lengths_is_judged_by_what_is_there() -> Result<()> {
    require!(root, netns, bpf, ip);
    table("short packets", |table| {
        for (name, frame) in whole_frames().into_iter().filter(|(name, _)| *name != "ARP") {
            let is_v4 = frame[12] == 8;
            let head = if is_v4 { 34 } else { 54 };
            for length in head..frame.len() {
                let mut cut = frame[..length].to_vec();
                let (at, told) = if is_v4 { (16, length - 14) } else { (18, length - 54) };
                cut[at..at + 2].copy_from_slice(&u16::try_from(told)?.to_be_bytes());
                table.step.flush()?;
                for direction in [Direction::FromPod, Direction::ToPod] {
                    let (outcome, counted) = table.step.run_counted(Seen::by(direction, DEFAULT_A), &cut)?;
                    let key = (DEFAULT_A, direction, outcome.verdict);
                    ensure!(
                        counted.contains_key(&key),
                        "{name} of {length}: {outcome:?}, counted {counted:?}"
                    );
                }
            }
        }
        Ok(())
    })
}
