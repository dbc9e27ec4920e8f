//! Generates the rules of kube-proxy for one Service in each of its modes. Its backend differs from KNI's, so that an
//! answer identifies the translator.

use std::net::{IpAddr, SocketAddr};

use kni_integration::node::{NODE_V4, NODE_V6};

use super::objects::FRONT;

/// A port of the node, masqueraded.
pub(crate) const NODE_PORT: u16 = 30_080;

/// A Service of kube-proxy with one endpoint.
pub(crate) struct Proxied {
    pub(crate) vip: IpAddr,
    pub(crate) backend: SocketAddr,
}

impl Proxied {
    fn node(&self) -> &'static str {
        if self.vip.is_ipv4() { NODE_V4 } else { NODE_V6 }
    }
}

/// The table of its nftables mode.
pub(crate) fn nftables(service: &Proxied) -> String {
    let (family, kind) = if service.vip.is_ipv4() {
        ("ip", "ipv4_addr")
    } else {
        ("ip6", "ipv6_addr")
    };
    let Proxied { vip, backend } = service;
    let (node, pod) = (service.node(), backend.ip());
    let endpoint = |protocol: &str| {
        format!(
            "chain endpoint-{protocol} {{
               {family} saddr {pod} jump mark-for-masquerade
               meta l4proto {protocol} dnat to {backend}
             }}
             chain external-{protocol} {{ jump mark-for-masquerade; goto endpoint-{protocol}; }}\n"
        )
    };
    format!(
        "table {family} kube-proxy {{
           set cluster-ips {{ type {kind}; elements = {{ {vip} }} }}
           chain mark-for-masquerade {{ meta mark set meta mark | 0x4000; }}
           {}{}
           map service-ips {{
             type {kind} . inet_proto . inet_service : verdict
             elements = {{ {vip} . tcp . {FRONT} : goto endpoint-tcp, {vip} . udp . {FRONT} : goto endpoint-udp }}
           }}
           chain services {{
             {family} daddr . meta l4proto . th dport vmap @service-ips
             {family} daddr {node} tcp dport {NODE_PORT} goto external-tcp
             {family} daddr {node} udp dport {NODE_PORT} goto external-udp
           }}
           chain cluster-ips-check {{ {family} daddr @cluster-ips reject; }}
           chain filter-forward {{
             type filter hook forward priority -110
             ct state invalid drop
             ct state new jump cluster-ips-check
           }}
           chain filter-output {{ type filter hook output priority -90; ct state new jump cluster-ips-check; }}
           chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
           chain nat-output {{ type nat hook output priority -100; jump services; }}
           chain nat-postrouting {{
             type nat hook postrouting priority srcnat
             meta mark & 0x4000 == 0 return
             meta mark set meta mark ^ 0x4000
             masquerade fully-random
           }}
         }}\n",
        endpoint("tcp"),
        endpoint("udp")
    )
}

/// The input of `iptables-restore` (or `ip6tables-restore`) in its iptables mode.
pub(crate) fn iptables(service: &Proxied) -> String {
    let Proxied { vip, backend } = service;
    let (node, pod) = (service.node(), backend.ip());
    let of = |protocol: &str| {
        let upper = protocol.to_uppercase();
        format!(
            "-A KUBE-SERVICES -d {vip} -p {protocol} -m comment --comment \"team/web:{protocol} cluster IP\" -m \
             {protocol} --dport {FRONT} -j KUBE-SVC-{upper}\n\
             -A KUBE-NODEPORTS -d {node} -p {protocol} -m {protocol} --dport {NODE_PORT} -j KUBE-EXT-{upper}\n\
             -A KUBE-EXT-{upper} -j KUBE-MARK-MASQ\n-A KUBE-EXT-{upper} -j KUBE-SVC-{upper}\n\
             -A KUBE-SVC-{upper} -m comment --comment \"team/web -> {backend}\" -j KUBE-SEP-{upper}\n\
             -A KUBE-SEP-{upper} -s {pod} -j KUBE-MARK-MASQ\n\
             -A KUBE-SEP-{upper} -p {protocol} -m {protocol} -j DNAT --to-destination {backend}\n"
        )
    };
    let chains: String = ["TCP", "UDP"]
        .map(|name| format!(":KUBE-SVC-{name} - [0:0]\n:KUBE-SEP-{name} - [0:0]\n:KUBE-EXT-{name} - [0:0]\n"))
        .concat();
    format!(
        "*filter\n:KUBE-FORWARD - [0:0]\n-A FORWARD -j KUBE-FORWARD\n\
         -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
         -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\n\
         -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\nCOMMIT\n\
         *nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]\n\
         {chains}-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n\
         -A KUBE-POSTROUTING -j MASQUERADE --random-fully\n\
         {}{}-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\nCOMMIT\n",
        of("tcp"),
        of("udp")
    )
}
