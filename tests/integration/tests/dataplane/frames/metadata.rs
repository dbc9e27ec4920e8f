//! Tests fields of packets that are not in their bytes: priority and mark.

use anyhow::{Result, ensure};
use kni_common::Verdict;
use kni_dataplane::EndpointConfig;
use kni_integration::{
    model::Seen,
    programs::{Metadata, Programs, action_of, publish_unrestricted, routes},
    require,
};
use kni_model::{EndpointId, MacAddr, NetworkId};

use super::table::{A4, B4, BLUE, BLUE_A, BLUE_B, DEFAULT, DEFAULT_A, DEFAULT_B, OUTSIDE4, endpoint, from, to, udp};

fn publish(programs: &Programs, id: u32, shaped: bool) -> Result<()> {
    let endpoint = endpoint(id);
    publish_unrestricted(
        programs.dataplane(),
        &EndpointConfig {
            endpoint: EndpointId(id),
            network: NetworkId::try_from(endpoint.network)?,
            ipv4: endpoint.ipv4,
            ipv6: endpoint.ipv6,
            mac: MacAddr(endpoint.mac),
            host_mac: MacAddr(endpoint.host_mac),
            host_access: endpoint.host_access,
            xdp: false,
            plugin: None,
            shaped,
        },
    )
}

#[test]
fn a_pod_does_not_choose_the_class_of_what_leaves_it() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("priority", 1024, |programs| {
        let network = NetworkId::try_from(DEFAULT)?;
        let routes = routes(&["10.0.0.0/24".parse()?], true);
        programs.dataplane().set_routes(network, &routes)?;
        for id in [DEFAULT_A, DEFAULT_B] {
            publish(&programs, id, false)?;
        }
        let chosen = Metadata {
            priority: 0x10005,
            mark: 0,
        };
        let frame = from(DEFAULT_A).frame(&udp(A4, OUTSIDE4));
        for round in ["first", "established"] {
            let (action, left) = programs.run_with(Seen::from_pod(DEFAULT_A), &frame, chosen)?;
            ensure!(action == action_of(Verdict::PassedToStack), "{round}: action {action}");
            ensure!(
                left.priority == 0,
                "{round}: it leaves with priority {:#x}",
                left.priority
            );
        }
        Ok(())
    })
}

#[test]
fn only_the_mark_of_this_boot_says_that_a_packet_was_judged() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("marks", 1024, |programs| {
        for (id, shaped) in [(BLUE_A, true), (BLUE_B, false)] {
            publish(&programs, id, shaped)?;
        }
        ensure!(endpoint(BLUE_A).network == BLUE && !endpoint(BLUE_A).host_access);
        // An evaluated packet, to learn the mark.
        let frame = from(BLUE_B).frame(&udp(B4, A4));
        let (action, judged) = programs.run_with(Seen::from_pod(BLUE_B), &frame, Metadata::default())?;
        ensure!(
            action == action_of(Verdict::Redirected) && judged.mark != 0,
            "{judged:?}"
        );
        let frame = to(BLUE_A).frame(&udp(B4, A4));
        for (mark, verdict) in [
            (judged.mark, Verdict::Delivered),
            (judged.mark ^ 1, Verdict::HostNotAllowed),
            (0, Verdict::HostNotAllowed),
            // "KNIJ", which any process could guess.
            (0x4b4e_494a, Verdict::HostNotAllowed),
        ] {
            let metadata = Metadata { priority: 0, mark };
            let (action, left) = programs.run_with(Seen::to_pod(BLUE_A, 0), &frame, metadata)?;
            ensure!(action == action_of(verdict), "mark {mark:#x}: action {action}");
            ensure!(verdict != Verdict::Delivered || left.mark == 0, "the pod gets the mark");
        }
        Ok(())
    })
}
