//! Generates the rules of kube-proxy's nftables mode for one service with one endpoint, and for a host port.

use std::net::IpAddr;

use super::{CLOSED, ECHO, HOST_PORT, NODE_PORT, PORT, VIP_CLOSED, VIP_ECHO, VIP_PORT, node, vip};

/// The complete table for the family of the backend.
pub(crate) fn ruleset(backend: IpAddr) -> String {
    let v4 = backend.is_ipv4();
    let (family, kind) = if v4 { ("ip", "ipv4_addr") } else { ("ip6", "ipv6_addr") };
    let (vip, node) = (vip(v4), node(v4));
    let ports = [
        ("web", VIP_PORT, PORT),
        ("closed", VIP_CLOSED, CLOSED),
        ("echo", VIP_ECHO, ECHO),
    ];
    let all = || {
        ["tcp", "udp"]
            .into_iter()
            .flat_map(|protocol| ports.map(|port| (protocol, port)))
    };
    let chains: String = all()
        .map(|(protocol, (name, _, to))| service(protocol, name, backend, to))
        .collect();
    let elements: Vec<_> = all()
        .map(|(protocol, (name, port, _))| format!("{vip} . {protocol} . {port} : goto service-{name}-{protocol}"))
        .collect();
    let elements = elements.join(",\n");
    format!(
        "table {family} kube-proxy {{
           set cluster-ips {{ type {kind}; elements = {{ {vip} }} }}
           set nodeport-ips {{ type {kind}; elements = {{ {node} }} }}
           chain mark-for-masquerade {{ meta mark set meta mark | 0x4000; }}
           {chains}
           map service-ips {{ type {kind} . inet_proto . inet_service : verdict; elements = {{ {elements} }} }}
           map service-nodeports {{
             type inet_proto . inet_service : verdict
             elements = {{
               tcp . {NODE_PORT} : goto external-web-tcp, udp . {NODE_PORT} : goto external-web-udp,
               tcp . {HOST_PORT} : goto endpoint-web-tcp, udp . {HOST_PORT} : goto endpoint-web-udp
             }}
           }}
           chain services {{
             {family} daddr . meta l4proto . th dport vmap @service-ips
             {family} daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
           }}
           {}
         }}\n",
        hooks(family)
    )
}

/// The chains of one port of the service. External clients are masqueraded, and so is the endpoint itself.
fn service(protocol: &str, name: &str, backend: IpAddr, port: u16) -> String {
    let (family, target) = match backend {
        IpAddr::V4(ip) => ("ip", format!("{ip}:{port}")),
        IpAddr::V6(ip) => ("ip6", format!("[{ip}]:{port}")),
    };
    format!(
        "chain endpoint-{name}-{protocol} {{
           {family} saddr {backend} jump mark-for-masquerade
           meta l4proto {protocol} dnat to {target}
         }}
         chain service-{name}-{protocol} {{ numgen random mod 1 vmap {{ 0 : goto endpoint-{name}-{protocol} }}; }}
         chain external-{name}-{protocol} {{ jump mark-for-masquerade; goto service-{name}-{protocol}; }}\n"
    )
}

fn hooks(family: &str) -> String {
    format!(
        "chain cluster-ips-check {{ {family} daddr @cluster-ips reject; }}
         chain filter-forward {{
           type filter hook forward priority -110
           ct state invalid drop
           ct state new jump cluster-ips-check
         }}
         chain filter-output {{ type filter hook output priority -90; ct state new jump cluster-ips-check; }}
         chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
         chain nat-output {{ type nat hook output priority -100; jump services; }}
         chain masquerading {{
           meta mark & 0x4000 == 0 return
           meta mark set meta mark ^ 0x4000
           masquerade fully-random
         }}
         chain nat-postrouting {{ type nat hook postrouting priority srcnat; jump masquerading; }}"
    )
}
