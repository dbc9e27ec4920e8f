//! Provides the values of the metrics page from the services of the agent.

use std::{collections::BTreeMap, fmt::Display};

use kni_dataplane::DataplaneError;
use kni_metrics::{
    ControlPlane, MapUse, Part, PolicyState, PortUse, ProgramUse, RequestUse, Snapshot, Source, StateUse, TaskUse,
    Traffic, WatchUse,
};
use kni_model::{Attachment, EndpointId, Sandbox};

use super::Node;

impl Source for Node {
    fn snapshot(&self) -> Snapshot {
        let maps = part(self.dataplane.map_pressure());
        Snapshot {
            traffic: part(self.traffic()),
            flows: maps.as_ref().map(|maps| flows(maps)).map_err(Clone::clone),
            lost_events: part(self.dataplane.lost_events()),
            policy: Ok(self.policy_state()),
            maps: maps.map(|maps| maps.into_iter().map(map_use).collect()),
            masquerade: Ok(self.masquerade_ports()),
            programs: part(self.program_runs()),
            endpoints: Ok(self.endpoints()),
            attach: Ok(self.attacher.attach_times()),
            state: self.state(),
            control_plane: self.control_plane(),
        }
    }
}

impl Node {
    fn traffic(&self) -> Result<Vec<Traffic>, DataplaneError> {
        let attachments = self.attacher.attachments();
        let mut rows = Vec::new();
        for (sandbox, attachment) in &attachments {
            for (direction, verdict, count) in self.dataplane.forwarded(attachment.endpoint)? {
                rows.push(Traffic {
                    owner: owner(sandbox, attachment),
                    network: attachment.network.to_string(),
                    direction,
                    verdict,
                    packets: count.packets,
                    bytes: count.bytes,
                });
            }
        }
        let owners: BTreeMap<EndpointId, (String, String)> = attachments
            .iter()
            .map(|(sandbox, attachment)| {
                (
                    attachment.endpoint,
                    (owner(sandbox, attachment), attachment.network.to_string()),
                )
            })
            .collect();
        for drop in self.dataplane.drops()? {
            // No owner: the packet was dropped before its endpoint was published, or belongs to no endpoint.
            let (owner, network) = owners.get(&drop.endpoint).cloned().unwrap_or_default();
            rows.push(Traffic {
                owner,
                network,
                direction: drop.direction,
                verdict: drop.reason,
                packets: drop.count.packets,
                bytes: drop.count.bytes,
            });
        }
        Ok(rows)
    }

    fn state(&self) -> StateUse {
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let recovery = self.attacher.recovery();
        let (programs, pins) = self.attacher.repairs();
        StateUse {
            problems: vec![
                ("lost", u64::from(recovery.lost.is_some())),
                ("quarantined_rows", count(recovery.quarantined.len())),
                ("unwritable", u64::from(self.attacher.state_problem().is_some())),
                ("closed_interfaces", count(self.attacher.closed_interfaces().len())),
            ],
            repairs: vec![("programs", programs), ("pins", pins)],
            shared_ports: self.uplink.shared_ports().into(),
            early_attaches: self
                .reflectors
                .as_ref()
                .map_or(0, |reflectors| reflectors.cache().others().early()),
            unknown_extradata: self.unknown_keys.counts(),
        }
    }

    fn control_plane(&self) -> ControlPlane {
        let tasks = self.tasks.view().into_iter().map(|view| TaskUse {
            task: view.task,
            last_run: view.last_run,
        });
        let mut state = ControlPlane {
            tasks: tasks.collect(),
            ..ControlPlane::default()
        };
        let Some(reflectors) = &self.reflectors else {
            return state;
        };
        let requests = reflectors.requests().into_iter().map(|count| RequestUse {
            verb: count.verb,
            resource: count.resource,
            code: count.code,
            count: count.count,
        });
        state.requests = requests.collect();
        let watches = reflectors.watches().into_iter().map(|view| WatchUse {
            kind: view.kind,
            last_event: view.last_event,
            restarts: view.restarts,
        });
        state.watches = watches.collect();
        let objects = reflectors.cache().tables().counts().into_iter();
        state.objects = objects
            .map(|(kind, count)| (kind, u64::try_from(count).unwrap_or(u64::MAX)))
            .collect();
        state
    }

    fn policy_state(&self) -> PolicyState {
        let counts = self.sync.counts();
        let rows = |rows: usize| u64::try_from(rows).unwrap_or(u64::MAX);
        PolicyState {
            rows: vec![
                ("policy", rows(counts.policy)),
                ("ports", rows(counts.ports)),
                ("identities", rows(counts.identities)),
            ],
            sync: counts.times,
            failures: counts.failures,
        }
    }

    /// The counts of the last sweep of the flow tables.
    fn masquerade_ports(&self) -> Vec<PortUse> {
        let taken = self.dataplane.masquerade_ports().into_iter();
        let known = taken.filter_map(|((v4, protocol), used)| {
            let protocol = match protocol {
                6 => "tcp",
                17 => "udp",
                1 | 58 => "icmp",
                _ => return None,
            };
            Some(PortUse {
                family: if v4 { "ipv4" } else { "ipv6" },
                protocol,
                used: used.into(),
            })
        });
        known.collect()
    }

    /// Empty where the kernel does not count runs: zeros would suggest programs without cost.
    fn program_runs(&self) -> Result<Vec<ProgramUse>, DataplaneError> {
        if self.counting.is_none() {
            return Ok(Vec::new());
        }
        let stats = self.dataplane.program_stats()?.into_iter();
        Ok(stats
            .map(|stats| ProgramUse {
                name: stats.name,
                runs: stats.runs,
                run_ns: stats.run_time_ns,
            })
            .collect())
    }

    fn endpoints(&self) -> Vec<(String, u64)> {
        let networks = self.attacher.networks().into_iter();
        networks
            .map(|view| (view.network.spec.name.to_string(), u64::from(view.attachments)))
            .collect()
    }
}

fn part<T, E: Display>(read: Result<T, E>) -> Part<T> {
    read.map_err(|error| error.to_string())
}

fn owner(sandbox: &Sandbox, attachment: &Attachment) -> String {
    format!("{} {} {}", sandbox.id, attachment.endpoint, attachment.ifname)
}

fn flows(maps: &[(String, u32, u32)]) -> (u64, u64) {
    let rows = |name: &str| {
        let found = maps.iter().find(|(map, ..)| map == name);
        found.map_or(0, |(_, entries, _)| u64::from(*entries))
    };
    (rows("FLOWS4"), rows("FLOWS6"))
}

fn map_use((name, entries, max_entries): (String, u32, u32)) -> MapUse {
    MapUse {
        name,
        entries: entries.into(),
        max_entries: max_entries.into(),
    }
}
