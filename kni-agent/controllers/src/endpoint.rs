//! Reports in the node's `NodeEndpoint` where other nodes reach it: addresses, port and MTU of its tunnel.
//!
//! kni-controller confirms the addresses. Nothing waits for the report: without it other nodes send nothing to this
//! one.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kni_api::{NodeEndpoint, NodeEndpointSpec};
use kni_cluster::{Key, NodeRow, Tables};
use kni_reflectors::version_of;
use kni_uplink::{LEAST_MTU, UnderlayAddress};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};

use tokio::time::{Instant, sleep_until};

use super::{ObjectControllers, retry::Retry};

/// The largest IP packet.
const LARGEST_MTU: u32 = 65_535;
/// Interfaces and addresses change in bursts.
const GATHER: Duration = Duration::from_millis(200);
/// The node's addresses are read again at this interval, too.
const ROUND: Duration = Duration::from_secs(30);

/// How other nodes shall reach this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// UDP port.
    pub port: u16,
    /// Whether the node prefers its IPv4 address.
    pub prefers_ipv4: bool,
}

/// A change of the node's object.
#[derive(Debug, PartialEq)]
enum Write {
    Put(Box<NodeEndpoint>),
    /// The object with this UID.
    Delete(Option<String>),
}

impl ObjectControllers {
    /// Reports changes for as long as the agent runs.
    pub(super) async fn reconcile_endpoint(self: Arc<Self>) {
        let mut network = self.state.link_changes.clone();
        let mut known = self.cache.changes();
        let mut retry = Retry::default();
        let mut last = String::new();
        let mut seen = None;
        let mut addresses = None;
        let mut former = None;
        let mut read_again = Instant::now();
        loop {
            if addresses.is_none() || Instant::now() >= read_again {
                (read_again, seen) = (Instant::now() + ROUND, None);
                let read = (self.state.addresses)(()).await;
                addresses = read.map_err(|error| warn_once(&mut last, &error)).ok();
            }
            if former.is_some() && addresses.is_some() && former != addresses {
                // The kernel keeps connections from an address that is gone; nothing arrives on them.
                tracing::info!("the node's addresses have changed; every kind is read again");
                self.cache.begin_watches_again();
            }
            if addresses.is_some() {
                former.clone_from(&addresses);
            }
            let versions = {
                let tables = self.cache.tables();
                (tables.own_node.version(), tables.node_endpoints.version())
            };
            if let Some(addresses) = &addresses
                && (seen != Some(versions) || retry.is_over())
            {
                seen = Some(versions);
                match self.write_endpoint(addresses).await {
                    Ok(()) => {
                        last.clear();
                        retry.ended(true);
                    }
                    Err(problem) => {
                        warn_once(&mut last, &problem);
                        retry.ended(false);
                    }
                }
                kni_tasks::progress();
            }
            let changed = kni_tasks::waiting(async {
                tokio::select! {
                    changed = network.changed() => changed.is_ok(),
                    _ = known.changed() => false,
                    () = retry.wait() => false,
                    () = sleep_until(read_again) => false,
                }
            })
            .await;
            if changed {
                addresses = None;
            }
            kni_tasks::waiting(tokio::time::sleep(GATHER)).await;
        }
    }

    /// Writes the object if it has to change.
    async fn write_endpoint(&self, addresses: &[UnderlayAddress]) -> Result<(), String> {
        let write = {
            let tables = self.cache.tables();
            write(&tables, &self.node, addresses, self.tunnel, now())?
        };
        let done = match write {
            None => return Ok(()),
            Some(Write::Put(object)) => self.put_endpoint(&object).await,
            Some(Write::Delete(uid)) => self.delete_endpoint(uid).await,
        };
        done.map_err(|error| format!("cannot write it: {error}"))
    }

    async fn put_endpoint(&self, object: &NodeEndpoint) -> Result<(), kube::Error> {
        let api: Api<NodeEndpoint> = Api::all(self.client.clone());
        let apply = PatchParams::apply(&self.field_manager()).force();
        let since = self.cache.tables().node_endpoints.newest();
        let mut written = api.patch(&self.node, &apply, &Patch::Apply(object)).await?;
        let version = version_of(&written.metadata);
        written.metadata.managed_fields = None;
        self.cache.change_written(|tables| {
            let (key, row) = (Key::new("", &self.node), Arc::new(written));
            tables.node_endpoints.put_written(key, since, version, Some(row))
        });
        Ok(())
    }

    async fn delete_endpoint(&self, uid: Option<String>) -> Result<(), kube::Error> {
        let api: Api<NodeEndpoint> = Api::all(self.client.clone());
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match api.delete(&self.node, &params).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
        let key = Key::new("", &self.node);
        self.cache.change(|tables| tables.node_endpoints.remove(&key));
        Ok(())
    }
}

/// Logs each problem once.
fn warn_once(last: &mut String, problem: &str) {
    if last != problem {
        tracing::warn!(
            problem,
            "other nodes are not informed how they reach this one; trying again"
        );
        problem.clone_into(last);
    }
}

/// The necessary write; `None` if the object is right, or nothing is known of it yet.
fn write(
    tables: &Tables,
    node: &str,
    addresses: &[UnderlayAddress],
    tunnel: Tunnel,
    now: u32,
) -> Result<Option<Write>, String> {
    let table = &tables.node_endpoints;
    if !table.is_synced() || table.is_absent() {
        return Ok(None);
    }
    let Some(row) = tables.own_node.get("", node).filter(|row| !row.uid.is_empty()) else {
        return Ok(None);
    };
    let before = table.get("", node);
    if let Some(before) = before
        && before.spec.node_uid != row.uid
    {
        // Of an earlier node of this name: the UID cannot be changed.
        return Ok(Some(Write::Delete(before.uid())));
    }
    let chosen = chosen(row, addresses, tunnel.prefers_ipv4);
    // The object stays as it is: its addresses may come back.
    let Some(mtu) = chosen.iter().map(|found| found.mtu.min(LARGEST_MTU)).min() else {
        return Err(unusable(row, addresses));
    };
    let mut spec = NodeEndpointSpec {
        node_name: node.to_owned(),
        node_uid: row.uid.clone(),
        addresses: chosen.iter().map(|found| found.address.to_string()).collect(),
        port: tunnel.port,
        mtu,
        epoch: before.map_or(now, |before| before.spec.epoch),
    };
    if before.is_some_and(|before| before.spec == spec) {
        return Ok(None);
    }
    spec.epoch = next_epoch(before.map(|before| before.spec.epoch), now);
    Ok(Some(Write::Put(Box::new(NodeEndpoint::new(node, spec)))))
}

/// Why no address of the node can be reported.
fn unusable(node: &NodeRow, addresses: &[UnderlayAddress]) -> String {
    let internal = node.addresses.join(", ");
    let present = |found: &&UnderlayAddress| node.addresses.contains(&found.address.to_string());
    match addresses.iter().find(present) {
        Some(UnderlayAddress { address, ifname, mtu }) => format!(
            "{ifname}, the interface with the node's address {address}, has an MTU of {mtu}, below {LEAST_MTU}: other nodes \
             cannot send to it (InternalIPs: {internal})"
        ),
        None => format!("none of the InternalIPs of the node ({internal}) is an address of an interface that is up"),
    }
}

/// The first `InternalIP` of each family that an interface has, the preferred family first.
fn chosen<'a>(node: &NodeRow, addresses: &'a [UnderlayAddress], prefers_ipv4: bool) -> Vec<&'a UnderlayAddress> {
    let of_family = |ipv4: bool| {
        let internal = node.addresses.iter().filter_map(|text| text.parse::<IpAddr>().ok());
        let mut found = internal.filter_map(|address| {
            let mut present = addresses.iter();
            present.find(|found| found.address == address && found.mtu >= LEAST_MTU)
        });
        found.find(|found| found.address.is_ipv4() == ipv4)
    };
    [prefers_ipv4, !prefers_ipv4]
        .into_iter()
        .filter_map(of_family)
        .collect()
}

/// The epoch of other contents: larger than the one before, and than all before a restore of the API server's storage,
/// which the clock has left behind.
fn next_epoch(before: Option<u32>, now: u32) -> u32 {
    let next = before.map_or(1, |before| before.wrapping_add(1));
    next.max(now).max(1)
}

/// Seconds since 1970, until 2106.
fn now() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u32::try_from(since.as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TUNNEL: Tunnel = Tunnel {
        port: 4789,
        prefers_ipv4: true,
    };

    fn address(text: &str, mtu: u32) -> UnderlayAddress {
        UnderlayAddress {
            address: text.parse().unwrap(),
            ifname: "eth0".to_owned(),
            mtu,
        }
    }

    fn present() -> Vec<UnderlayAddress> {
        vec![
            address("127.0.0.1", 1500),
            address("192.0.2.9", 9000),
            address("2001:db8::9", 1500),
            address("192.0.2.10", 1450),
        ]
    }

    /// Node n1 with these addresses, and an empty list of endpoints.
    fn tables(addresses: &[&str]) -> Tables {
        let mut tables = Tables::default();
        tables.node_endpoints.begin();
        tables.node_endpoints.complete();
        set_node(&mut tables, "u1", addresses);
        tables
    }

    fn set_node(tables: &mut Tables, uid: &str, addresses: &[&str]) {
        let row = NodeRow {
            uid: uid.to_owned(),
            addresses: addresses.iter().map(|text| (*text).to_owned()).collect(),
            ..NodeRow::default()
        };
        tables.own_node.put(Key::new("", "n1"), Some(row));
    }

    /// Carries out the write; returns the spec that the object has then, and whether it was written.
    fn carry_out(
        tables: &mut Tables,
        addresses: &[UnderlayAddress],
        tunnel: Tunnel,
        now: u32,
    ) -> (NodeEndpointSpec, bool) {
        let key = Key::new("", "n1");
        let written = match write(tables, "n1", addresses, tunnel, now).unwrap() {
            Some(Write::Put(object)) => {
                tables.node_endpoints.put(key.clone(), Some(Arc::from(object)));
                true
            }
            Some(Write::Delete(uid)) => panic!("{uid:?}"),
            None => false,
        };
        (tables.node_endpoints.rows()[&key].spec.clone(), written)
    }

    #[test]
    fn the_first_internal_address_of_each_family_that_is_present_is_reported() {
        let mut tables = tables(&["198.51.100.1", "192.0.2.10", "192.0.2.9", "2001:db8::9"]);
        let (spec, written) = carry_out(&mut tables, &present(), TUNNEL, 1000);
        let expected = json!({
            "nodeName": "n1", "nodeUID": "u1", "addresses": ["192.0.2.10", "2001:db8::9"], "port": 4789, "mtu": 1450,
            "epoch": 1000,
        });
        assert!(written);
        assert_eq!(serde_json::to_value(&spec).unwrap(), expected);
        assert!(!carry_out(&mut tables, &present(), TUNNEL, 2000).1, "it is right");
        let ipv6 = Tunnel {
            prefers_ipv4: false,
            ..TUNNEL
        };
        let (spec, _) = carry_out(&mut tables, &present(), ipv6, 2000);
        assert_eq!((spec.addresses[0].as_str(), spec.epoch), ("2001:db8::9", 2000));
    }

    #[test]
    fn every_change_has_another_epoch_and_the_same_contents_keep_theirs() {
        let mut tables = tables(&["192.0.2.9"]);
        let (first, _) = carry_out(&mut tables, &present(), TUNNEL, 1000);
        let port = Tunnel { port: 4790, ..TUNNEL };
        let (second, _) = carry_out(&mut tables, &present(), port, 1000);
        assert_eq!((first.epoch, second.epoch, second.port), (1000, 1001, 4790));
        // The clock went back.
        let (third, _) = carry_out(&mut tables, &[address("192.0.2.9", 1400)], port, 10);
        assert_eq!((third.epoch, third.mtu), (1002, 1400));
        set_node(&mut tables, "u1", &["192.0.2.10"]);
        let (fourth, _) = carry_out(&mut tables, &present(), port, 5000);
        assert_eq!(
            (fourth.epoch, fourth.addresses.join(",")),
            (5000, "192.0.2.10".to_owned())
        );
        assert_eq!(next_epoch(Some(u32::MAX), 7), 7, "it is another one");
        assert_eq!(next_epoch(None, 0), 1);
    }

    #[test]
    fn a_node_without_a_usable_address_reports_why_and_changes_nothing() {
        let mut tables = tables(&["192.0.2.9"]);
        carry_out(&mut tables, &present(), TUNNEL, 1);
        for addresses in [vec![], vec![address("192.0.2.10", 1500)]] {
            let problem = write(&tables, "n1", &addresses, TUNNEL, 2).unwrap_err();
            assert!(problem.contains("(192.0.2.9)"), "{problem}");
        }
        let problem = write(&tables, "n1", &[address("192.0.2.9", 1279)], TUNNEL, 2).unwrap_err();
        assert!(
            problem
                .starts_with("eth0, the interface with the node's address 192.0.2.9, has an MTU of 1279, below 1280"),
            "{problem}"
        );
        let large = [address("192.0.2.9", 65_536)];
        assert_eq!(carry_out(&mut tables, &large, TUNNEL, 2).0.mtu, 65_535);
    }

    #[test]
    fn the_object_of_an_earlier_node_of_the_name_is_replaced() {
        let mut tables = tables(&["192.0.2.9"]);
        carry_out(&mut tables, &present(), TUNNEL, 1);
        let mut object = NodeEndpoint::clone(tables.node_endpoints.get("", "n1").unwrap());
        object.metadata.uid = Some("o1".to_owned());
        tables.node_endpoints.put(Key::new("", "n1"), Some(Arc::new(object)));
        set_node(&mut tables, "u2", &["192.0.2.9"]);
        let planned = write(&tables, "n1", &present(), TUNNEL, 2).unwrap();
        assert_eq!(planned, Some(Write::Delete(Some("o1".to_owned()))));
        tables.node_endpoints.remove(&Key::new("", "n1"));
        assert_eq!(carry_out(&mut tables, &present(), TUNNEL, 2).0.node_uid, "u2");
    }

    #[test]
    fn nothing_is_written_before_the_kind_and_the_node_are_known() {
        let known = tables(&["192.0.2.9"]);
        let mut unread = Tables::default();
        set_node(&mut unread, "u1", &["192.0.2.9"]);
        let mut absent = tables(&["192.0.2.9"]);
        absent.node_endpoints.absent(std::time::Instant::now());
        let mut unknown = tables(&[]);
        set_node(&mut unknown, "", &["192.0.2.9"]);
        for tables in [&unread, &absent, &unknown] {
            assert_eq!(write(tables, "n1", &present(), TUNNEL, 1), Ok(None));
        }
        assert!(write(&known, "n1", &present(), TUNNEL, 1).unwrap().is_some());
    }
}
