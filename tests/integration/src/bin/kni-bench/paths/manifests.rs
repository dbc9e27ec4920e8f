//! Generates the manifests of the agents: the network, the policies of namespace `guarded` and its services.

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use kni_integration::Manifest;

use crate::path::SERVICE_PORT;

/// The virtual addresses of the first service; the others follow them.
const VIRTUAL4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const VIRTUAL6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10);
/// The addresses of the server behind all services.
pub(super) const BACKEND: [&str; 2] = ["10.244.0.200", "fd00:244::200"];
/// Services per file: the agent does not read files of more than 1 MiB.
const PER_FILE: u16 = 50;

/// The number of services, all with TCP and UDP at [`SERVICE_PORT`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Served {
    pub(super) services: u16,
    /// Ports of the server behind each service, starting at [`SERVICE_PORT`].
    pub(super) endpoints: u16,
    /// Whether they are dual-stack.
    pub(super) dual: bool,
}

impl Served {
    pub(super) const ONE: Self = Self {
        services: 1,
        endpoints: 1,
        dual: true,
    };

    /// IPv4 services with ten endpoints each.
    pub(super) const fn of_ten(services: u16) -> Self {
        Self {
            services,
            endpoints: 10,
            dual: false,
        }
    }

    /// Their virtual addresses of a family.
    pub(super) fn addresses(self, v4: bool) -> Vec<IpAddr> {
        (0..self.services).map(|number| address(number, v4)).collect()
    }

    /// The number of virtual address and port pairs: each family, two protocols.
    pub(super) fn frontends(self) -> usize {
        usize::from(self.services) * if self.dual { 4 } else { 2 }
    }
}

fn address(number: u16, v4: bool) -> IpAddr {
    if v4 {
        Ipv4Addr::from_bits(VIRTUAL4.to_bits() + u32::from(number)).into()
    } else {
        Ipv6Addr::from_bits(VIRTUAL6.to_bits() + u128::from(number)).into()
    }
}

/// All files of the agent's manifest folder.
pub(super) fn all(served: Served) -> Vec<Manifest> {
    let network = Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"])
        .spec("serviceSubnets: [\"10.96.0.0/16\", \"fd00:96::/64\"]");
    let policies = Manifest::file("policies.yaml", POLICIES);
    let mut manifests = vec![network, policies];
    for first in (0..served.services).step_by(usize::from(PER_FILE)) {
        let numbers = first..served.services.min(first + PER_FILE);
        manifests.push(Manifest::file(
            &format!("services-{first}.yaml"),
            numbers.map(|number| service(number, served)).collect::<String>(),
        ));
    }
    manifests
}

/// Both directions of both pods are isolated, and one rule each allows the traffic.
const POLICIES: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny, namespace: guarded}
spec: {podSelector: {}, policyTypes: [Ingress, Egress]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: allow, namespace: guarded}
spec:
  podSelector: {}
  policyTypes: [Ingress, Egress]
  ingress:
  - from: [{podSelector: {}}]
    ports: [{port: 1024, endPort: 65535}, {port: 1024, endPort: 65535, protocol: UDP}]
  egress:
  - to: [{podSelector: {}}]
    ports: [{port: 1024, endPort: 65535}, {port: 1024, endPort: 65535, protocol: UDP}]
";

/// A service and its slices, one per endpoint and family, because the ports of a slice apply to all its endpoints.
fn service(number: u16, served: Served) -> String {
    let name = format!("server-{number}");
    let [v4, v6] = [true, false].map(|v4| address(number, v4));
    let ports =
        |port: u16| format!("[{{name: tcp, port: {port}, protocol: TCP}}, {{name: udp, port: {port}, protocol: UDP}}]");
    let (ips, count) = if served.dual {
        (format!("[{v4}, \"{v6}\"]"), 2)
    } else {
        (format!("[{v4}]"), 1)
    };
    let mut text = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: guarded}}\nspec: {{clusterIP: {v4}, \
         clusterIPs: {ips}, ports: {}}}\n---\n",
        ports(SERVICE_PORT)
    );
    let families = [("v4", "IPv4", BACKEND[0]), ("v6", "IPv6", BACKEND[1])];
    for endpoint in SERVICE_PORT..SERVICE_PORT + served.endpoints {
        for (suffix, family, backend) in families.into_iter().take(count) {
            let slice = format!(
                "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}-{endpoint}-{suffix}, \
                 namespace: guarded, labels: {{kubernetes.io/service-name: {name}}}}}\naddressType: {family}\n\
                 ports: {}\nendpoints: [{{addresses: [\"{backend}\"], conditions: {{ready: true}}}}]\n---\n",
                ports(endpoint)
            );
            // Writing to a string cannot fail.
            let _never = text.write_str(&slice);
        }
    }
    text
}
