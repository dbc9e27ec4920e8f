//! Evaluates the policy tables with the same lookups as the eBPF programs.

use kni_common::{
    event::PolicyTrail,
    policy::{
        IDENTITY_ANY, PORTS_ALL, PORTS_NONE, PREFIX_ANY_PORT, PREFIX_ANY_PROTOCOL, PREFIX_PORT, PolicyKey, PortData,
        PortKey, PortValue,
    },
};
use kni_model::{PolicyTables, policy::PolicyDirection};

/// Whether a policy set allows a packet of a peer, and the rule that decided. `port` is the destination port in host
/// byte order, 0 for protocols without ports. Set 0 allows everything.
pub fn evaluate(
    tables: &PolicyTables,
    set: u32,
    direction: PolicyDirection,
    identity: u32,
    protocol: u8,
    port: u16,
) -> (bool, PolicyTrail) {
    let mut trail = PolicyTrail::default();
    if set == 0 {
        return (true, trail);
    }
    trail.set = set;
    let row = |identity| {
        let key = PolicyKey {
            set,
            identity,
            direction: direction.code(),
        };
        tables.policy.get(&key).map(|row| (identity, *row))
    };
    let Some((identity, row)) = row(identity).or_else(|| row(IDENTITY_ANY)) else {
        return (false, trail);
    };
    trail.identity = identity;
    match row.ports {
        PORTS_NONE => (false, trail),
        PORTS_ALL => {
            trail.rule = row.rule;
            (true, trail)
        }
        ports => {
            let Some(entry) = port_row(tables, ports, protocol, port) else {
                return (false, trail);
            };
            trail.rule = row.rule;
            trail.ordinal = u32::from(entry.ordinal);
            (entry.allow != 0, trail)
        }
    }
}

/// The row with the longest prefix.
fn port_row(tables: &PolicyTables, ports: u32, protocol: u8, port: u16) -> Option<PortValue> {
    let of_protocol = (PREFIX_ANY_PORT..=PREFIX_PORT).rev().map(|length| {
        let mask = u16::MAX.checked_shl(PREFIX_PORT - length).unwrap_or(0);
        (length, protocol, port & mask)
    });
    let mut prefixes = of_protocol.chain([(PREFIX_ANY_PROTOCOL, 0, 0)]);
    prefixes.find_map(|(prefix_length, protocol, port)| {
        let key = PortKey {
            prefix_length,
            data: PortData {
                ports: ports.to_be_bytes(),
                protocol,
                zero: 0,
                port: port.to_be_bytes(),
            },
        };
        tables.ports.get(&key).copied()
    })
}
