//! Writes the maps of a node in the form of layout 2, byte by byte, as if an agent of that layout had left them. The
//! programs continue with the maps that they have.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, lpm_trie::Key};
use kni_common::{
    address::from_ip,
    config::Config,
    endpoint::{EndpointPolicy, EndpointRow},
    flow::{
        END_LOCAL, END_OUTSIDE, END_STACK, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FROM_SECOND, FLOW_HAIRPIN, FLOW_NODE,
        FLOW_REPLIED, FLOW_TRANSLATED, FlowKey4, FlowKey6, FlowValue, network_of, protocol_of,
    },
    route::{RouteData, RouteValue},
    service::{BackendKey, BackendValue, ServiceKey, ServiceValue},
    uplink::{SourceData, SourceValue},
};
use kni_integration::Node;

const NEW: &str = "/sys/fs/bpf/kni/v3";
const OLD: &str = "/sys/fs/bpf/kni/v2";

/// Tables whose rows are those of layout 2.
const SAME: [&str; 8] = [
    "INTERFACES",
    "ADDRESSES",
    "POLICY",
    "PORTS",
    "IDENTITIES",
    "AFFINITY",
    "HOST_PORTS",
    "MASQUERADE",
];

/// The UDP flows in the maps of this layout that are not established yet; none without its maps.
pub(super) fn unestablished(node: &Node) -> Result<usize> {
    node.enter(|| -> Result<usize> {
        if !Path::new(NEW).exists() {
            return Ok(0);
        }
        let is_young = |scope: u32, row: &FlowValue| {
            i32::from(protocol_of(scope)) == libc::IPPROTO_UDP && row.flags & FLOW_CONFIRMED == 0
        };
        let mut young = 0;
        for map in [Map::LruHashMap(pinned("FLOWS4")?), Map::HashMap(pinned("NAT4")?)] {
            for row in &HashMap::<_, FlowKey4, FlowValue>::try_from(map)? {
                let (key, row) = row?;
                young += usize::from(is_young(key.scope, &row));
            }
        }
        for map in [Map::LruHashMap(pinned("FLOWS6")?), Map::HashMap(pinned("NAT6")?)] {
            for row in &HashMap::<_, FlowKey6, FlowValue>::try_from(map)? {
                let (key, row) = row?;
                young += usize::from(is_young(key.scope, &row));
            }
        }
        Ok(young)
    })?
}

/// Replaces the maps of this layout by those of layout 2.
pub(super) fn write(node: &Node) -> Result<()> {
    node.enter(|| -> Result<()> {
        fs::create_dir(OLD)?;
        for name in SAME {
            fs::hard_link(format!("{NEW}/{name}"), format!("{OLD}/{name}")).context(name)?;
        }
        let config = config()?;
        endpoints()?;
        routes()?;
        services()?;
        backends()?;
        sources()?;
        flows4(&config)?;
        flows6(&config)?;
        fs::remove_dir_all(NEW).context("removing the new maps")
    })?
}

fn pinned(name: &str) -> Result<MapData> {
    MapData::from_pin(format!("{NEW}/{name}")).with_context(|| name.to_owned())
}

fn at(name: &str) -> String {
    format!("{OLD}/{name}")
}

/// Joins fields.
fn bytes<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    fields.concat().try_into().expect("the size of the row")
}

fn config() -> Result<Config> {
    let new = Array::<_, Config>::try_from(Map::Array(pinned("CONFIG")?))?.get(&0, 0)?;
    let old = [
        new.hz,
        new.flow_events,
        new.flows_per_endpoint,
        new.tcp_new,
        new.tcp_established,
        new.tcp_closing,
        new.other_new,
        new.udp_established,
        new.sctp_established,
        new.other_established,
        new.uplink,
    ];
    let mut map = Array::<MapData, [u32; 11]>::create(1, 0)?;
    map.set(0, old, 0)?;
    map.pin(at("CONFIG"))?;
    Ok(new)
}

fn endpoints() -> Result<()> {
    let rows = Array::<_, EndpointRow>::try_from(Map::Array(pinned("ENDPOINTS")?))?;
    let policies = Array::<_, EndpointPolicy>::try_from(Map::Array(pinned("ENDPOINT_POLICIES")?))?;
    let mut map = Array::<MapData, [u8; 64]>::create(rows.len(), 0)?;
    for index in 0..rows.len() {
        let (row, policy) = (rows.get(&index, 0)?, policies.get(&index, 0)?);
        let words = [
            row.network,
            row.generation,
            row.incarnation,
            row.flags,
            policy.policy,
            policy.identity4,
            policy.identity6,
        ]
        .map(u32::to_ne_bytes);
        let old = bytes(&[
            words.as_flattened(),
            &row.ipv4,
            &row.ipv6,
            &row.to_pod.destination,
            &row.to_pod.source,
            &policy.ifindex.to_ne_bytes(),
        ]);
        map.set(index, old, 0)?;
    }
    Ok(map.pin(at("ENDPOINTS"))?)
}

fn routes() -> Result<()> {
    let rows = LpmTrie::<_, RouteData, RouteValue>::try_from(Map::LpmTrie(pinned("ROUTES")?))?;
    let mut map = LpmTrie::<MapData, RouteData, u32>::create(16_384, 1)?;
    for row in &rows {
        let (key, value) = row?;
        map.insert(&Key::new(key.prefix_len(), key.data()), u32::from(value.action), 0)?;
    }
    Ok(map.pin(at("ROUTES"))?)
}

/// One direction of a flow, with the value of its row in layout 2.
struct Direction {
    network: u32,
    source: [u8; 16],
    destination: [u8; 16],
    ports: [u8; 4],
    protocol: u8,
    value: [u8; 48],
}

const REPLY: u16 = 1;
const CONFIRMED: u16 = 2;
const CLOSED: u16 = 8;
const TO: u16 = 16;
const FROM: u16 = 32;
const HAIRPIN: u16 = 64;
const NODE: u16 = 128;

/// The ends of a key: addresses, and both ports of the first end's packets.
struct Ends {
    scope: u32,
    first: [u8; 16],
    second: [u8; 16],
    ports: [u8; 4],
}

/// The directions that a row stands for.
fn directions(ends: &Ends, row: &FlowValue, clock: &Clock) -> Vec<Direction> {
    if row.flags & FLOW_TRANSLATED == 0 {
        return [false, true].map(|second| direction(ends, row, second, clock)).into();
    }
    vec![direction(ends, row, row.flags & FLOW_FROM_SECOND != 0, clock)]
}

fn direction(ends: &Ends, row: &FlowValue, second: bool, clock: &Clock) -> Direction {
    let swap = |[a, b, c, d]: [u8; 4]| [c, d, a, b];
    let (source, destination, ports) = if second {
        (ends.second, ends.first, swap(ends.ports))
    } else {
        (ends.first, ends.second, ends.ports)
    };
    let ((from, sender), (to, receiver)) = (row.sender(second), row.receiver(second));
    let is_uplink = from == END_OUTSIDE || to == END_OUTSIDE;
    let kind: u16 = match (from, to) {
        _ if is_uplink => 4,
        (END_STACK, _) => 3,
        (_, END_STACK) => 2,
        _ => 1,
    };
    let mut flags = if row.is_reply(second) { REPLY } else { 0 };
    for (new, old) in [
        (FLOW_REPLIED, CONFIRMED),
        (FLOW_CLOSED, CLOSED),
        (FLOW_HAIRPIN, HAIRPIN),
        (FLOW_NODE, NODE),
    ] {
        flags |= if row.flags & new == 0 { 0 } else { old };
    }
    let (mut address, mut new_ports) = ([0; 16], [0; 4]);
    if row.flags & FLOW_TRANSLATED != 0 {
        let moved = [row.source != source, row.destination != destination];
        let translation = translation(row, moved, flags & REPLY != 0, is_uplink);
        flags |= translation.0;
        address = translation.1;
        new_ports = bytes(&[&row.ports.source, &row.ports.destination]);
    }
    let local = |kind, word: u32| if kind == END_LOCAL { word } else { 0 };
    let words = [
        local(from, sender.generation),
        local(to, receiver.generation),
        local(to, receiver.id),
        row.lifetime,
    ]
    .map(u32::to_ne_bytes);
    let value = bytes(&[
        &clock.whole(row.last_seen).to_ne_bytes(),
        words.as_flattened(),
        &kind.to_ne_bytes(),
        &flags.to_ne_bytes(),
        &new_ports,
        &address,
    ]);
    Direction {
        network: network_of(ends.scope),
        source,
        destination,
        ports,
        protocol: protocol_of(ends.scope),
        value,
    }
}

/// The flags and the address of a translated row. `moved`: whether the source and the destination are others.
fn translation(row: &FlowValue, moved: [bool; 2], is_reply: bool, is_uplink: bool) -> (u16, [u8; 16]) {
    let flags = match moved {
        [true, true] => TO | FROM,
        [true, false] => FROM,
        // Only the port.
        [false, false] if is_reply => FROM,
        [false, _] => TO,
    };
    if flags == TO | FROM && is_uplink {
        return (flags, bytes(&[&row.source[12..], &row.destination[12..], &[0; 8]]));
    }
    let address = if flags & TO == 0 { row.source } else { row.destination };
    (flags, address)
}

fn services() -> Result<()> {
    let rows = HashMap::<_, ServiceKey, ServiceValue>::try_from(Map::HashMap(pinned("SERVICES")?))?;
    let mut map = HashMap::<MapData, [u8; 24], [u8; 20]>::create(16_384, 1)?;
    for row in &rows {
        let (key, value) = row?;
        let fields = [value.service, value.backends, value.count, value.flags, value.affinity];
        let key = bytes(&[
            &key.network.to_ne_bytes(),
            &key.address,
            &key.port,
            &key.protocol.to_ne_bytes(),
        ]);
        map.insert(key, bytes(&[fields.map(u32::to_ne_bytes).as_flattened()]), 0)?;
    }
    Ok(map.pin(at("SERVICES"))?)
}

fn backends() -> Result<()> {
    let rows = HashMap::<_, BackendKey, BackendValue>::try_from(Map::HashMap(pinned("BACKENDS")?))?;
    let mut map = HashMap::<MapData, [u8; 8], [u8; 20]>::create(65_536, 1)?;
    for row in &rows {
        let (key, value) = row?;
        let key = bytes(&[&key.backends.to_ne_bytes(), &key.slot.to_ne_bytes()]);
        map.insert(key, bytes(&[&value.address, &value.port, &[0; 2]]), 0)?;
    }
    Ok(map.pin(at("BACKENDS"))?)
}

/// Codes of verdicts that drop were smaller by 24.
fn sources() -> Result<()> {
    let rows = LpmTrie::<_, SourceData, SourceValue>::try_from(Map::LpmTrie(pinned("SOURCES")?))?;
    let mut map = LpmTrie::<MapData, [u8; 16], u32>::create(16_384, 1)?;
    for row in &rows {
        let (key, value) = row?;
        let old = Key::new(key.prefix_len(), key.data().address);
        map.insert(&old, value.verdict - 24, 0)?;
    }
    Ok(map.pin(at("SOURCES"))?)
}

/// jiffies: they begin five minutes before the low 32 bits wrap.
struct Clock(u64);

impl Clock {
    fn now(config: &Config) -> Result<Self> {
        let uptime = fs::read_to_string("/proc/uptime")?;
        let seconds: f64 = uptime.split(' ').next().context("no uptime")?.parse()?;
        let hz = u64::from(config.hz);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time")]
        let ticks = (seconds * f64::from(config.hz)) as u64;
        Ok(Self((1 << 32) - 300 * hz + ticks))
    }

    /// The time with these low bits that is next to now.
    fn whole(&self, low: u32) -> u64 {
        let high = self.0 & !u64::from(u32::MAX);
        let near = high | u64::from(low);
        if near > self.0 + (1 << 31) {
            near - (1 << 32)
        } else {
            near
        }
    }
}

fn flows4(config: &Config) -> Result<()> {
    let clock = Clock::now(config)?;
    let rows = HashMap::<_, FlowKey4, FlowValue>::try_from(Map::LruHashMap(pinned("FLOWS4")?))?;
    let outside = HashMap::<_, FlowKey4, FlowValue>::try_from(Map::HashMap(pinned("NAT4")?))?;
    let mut map = HashMap::<MapData, [u8; 20], [u8; 48]>::create(131_072, 1)?;
    for row in rows.iter().chain(outside.iter()) {
        let (key, value) = row?;
        let ends = Ends {
            scope: key.scope,
            first: from_ip(key.first.into()),
            second: from_ip(key.second.into()),
            ports: [key.ports.first, key.ports.second].as_flattened().try_into()?,
        };
        for row in directions(&ends, &value, &clock) {
            let key = bytes(&[
                &row.network.to_ne_bytes(),
                &row.source[12..],
                &row.destination[12..],
                &row.ports,
                &u32::from(row.protocol).to_ne_bytes(),
            ]);
            map.insert(key, row.value, 0)?;
        }
    }
    Ok(map.pin(at("FLOWS4"))?)
}

fn flows6(config: &Config) -> Result<()> {
    let clock = Clock::now(config)?;
    let rows = HashMap::<_, FlowKey6, FlowValue>::try_from(Map::LruHashMap(pinned("FLOWS6")?))?;
    let outside = HashMap::<_, FlowKey6, FlowValue>::try_from(Map::HashMap(pinned("NAT6")?))?;
    let mut map = HashMap::<MapData, [u8; 44], [u8; 48]>::create(131_072, 1)?;
    for row in rows.iter().chain(outside.iter()) {
        let (key, value) = row?;
        let ends = Ends {
            scope: key.scope,
            first: key.first,
            second: key.second,
            ports: [key.ports.first, key.ports.second].as_flattened().try_into()?,
        };
        for row in directions(&ends, &value, &clock) {
            let key = bytes(&[
                &row.network.to_ne_bytes(),
                &row.source,
                &row.destination,
                &row.ports,
                &u32::from(row.protocol).to_ne_bytes(),
            ]);
            map.insert(key, row.value, 0)?;
        }
    }
    Ok(map.pin(at("FLOWS6"))?)
}
