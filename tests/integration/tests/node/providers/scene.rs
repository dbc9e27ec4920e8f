//! Provides the networks of these tests, and the state of a node with them.

use std::{fs, net::IpAddr, path::Path};

use anyhow::{Context as _, Result};
use kni_integration::{
    AgentOptions, Manifest, Namespaces, NodeSnapshot, Pod, eventually,
    privilege::CNI_PLUGINS,
    traffic::{self, NoAnswer},
};
use kni_proto::runtime::{ListNetworksRequest, NetworkStatus};

use crate::watched::Watched;

pub(crate) use kni_integration::patience;

/// Folder of configurations, inside the node.
pub(crate) const CONF: &str = "/run/cni/net.d";
/// The leases of host-local, inside the node.
pub(crate) const LEASES: &str = "/run/cni/networks";
/// The agent's cached results of plugins, inside the node.
pub(crate) const CACHE: &str = "/run/cni/results";
/// The other end of the device that moves into a pod.
pub(crate) const WIRE_V4: &str = "192.0.2.1";
/// See [`WIRE_V4`].
pub(crate) const WIRE_V6: &str = "2001:db8:200::1";

/// A `default` network of the eBPF provider, and one network of each other provider.
pub(crate) fn networks() -> Vec<Manifest> {
    let lan = Manifest::network("lan", &["198.51.100.0/24", "2001:db8:100::/64"])
        .spec("excludeSubnets: [198.51.100.2/32, \"2001:db8:100::2/128\"]")
        .spec("provider: { type: Macvlan, parent: uplink0, allowUplink: true }");
    let nic = Manifest::network("nic", &["192.0.2.0/24", "2001:db8:200::/64"])
        .spec("mtu: 1380")
        .spec("provider: { type: HostDevice, devices: [nic0] }");
    let vm = Manifest::network("vm", &["10.50.0.0/24"])
        .spec("provider: { type: Tap, owner: 107, group: 108, multiQueue: true }");
    vec![
        Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]),
        lan,
        nic,
        vm,
        bridged("bridged", false),
    ]
}

/// A network of the bridge plugin.
pub(crate) fn bridged(name: &str, default: bool) -> Manifest {
    let text = format!(
        "apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: {name}\nspec:\n  default: {default}\n  \
         provider: {{ type: CNI, confName: chain }}\n  access: {{ namespaces: {{ from: All }} }}\n"
    );
    Manifest::file(&format!("{name}.yaml"), text)
}

/// An agent with a CNI backend and without prewarming.
pub(crate) fn options(manifests: Vec<Manifest>) -> AgentOptions {
    let args = [
        "--warm-sandboxes",
        "0",
        "--cni-backend",
        "--cni-bin-dir",
        CNI_PLUGINS,
        "--cni-bin-dir",
        "/run/cni/bin",
        "--cni-conf-dir",
        CONF,
        "--cni-cache-dir",
        CACHE,
    ];
    AgentOptions::new(manifests, &args)
}

/// Writes a configuration with bridge, host-local and portmap.
pub(crate) fn write_chain(node: &Namespaces) -> Result<()> {
    let text = format!(
        r#"{{ "cniVersion": "1.0.0", "name": "chain", "plugins": [
          {{ "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false,
             "ipam": {{ "type": "host-local", "dataDir": "{LEASES}", "routes": [{{ "dst": "0.0.0.0/0" }}],
                        "ranges": [[{{ "subnet": "10.245.0.0/16" }}], [{{ "subnet": "fd00:245::/64" }}]] }} }},
          {{ "type": "portmap", "capabilities": {{ "portMappings": true }}, "snat": true }}
        ] }}"#
    );
    write(node, CONF, "10-chain.conflist", &text, 0o644)
}

/// Writes a file inside the node, atomically.
pub(crate) fn write(node: &Namespaces, folder: &str, name: &str, text: &str, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    node.enter(|| {
        fs::create_dir_all(folder)?;
        let unfinished = Path::new(folder).join(format!(".{name}"));
        fs::write(&unfinished, text)?;
        fs::set_permissions(&unfinished, fs::Permissions::from_mode(mode))?;
        fs::rename(unfinished, Path::new(folder).join(name))
    })?
    .with_context(|| format!("write {folder}/{name}"))
}

/// Names of files inside the node; none if there is no such folder.
pub(crate) fn files(node: &Namespaces, folder: &str) -> Result<Vec<String>> {
    node.enter(|| {
        let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    })
}

/// Addresses that host-local has assigned and not released.
pub(crate) fn leases(node: &Namespaces) -> Result<Vec<String>> {
    let mut names = files(node, &format!("{LEASES}/chain"))?;
    names.retain(|name| name.parse::<IpAddr>().is_ok() || name.replace('_', ":").parse::<IpAddr>().is_ok());
    Ok(names)
}

/// Gives the node a device `nic0` with its own settings; its other end is in the fabric.
pub(crate) fn add_device(stage: &Watched) -> Result<()> {
    let (node, fabric) = (&stage.node, stage.node.fabric());
    node.veth("nic0", fabric, "wire0")?;
    node.ip(&[
        "link set nic0 down",
        "link set nic0 address 02:00:00:00:07:07 mtu 1400 alias rack-7",
        "link set nic0 up",
    ])?;
    fabric.add_address("wire0", &format!("{WIRE_V4}/24"))?;
    fabric.add_address("wire0", &format!("{WIRE_V6}/64"))?;
    node.wait_for_local("nic0", "fe80")
}

/// Gives the plugin's bridge a permanent port: without one it loses its carrier, and some routes a moment later.
pub(crate) fn keep_bridge(node: &Namespaces) -> Result<()> {
    node.ip(&[
        "link add keep0 type veth peer name keep1",
        "link set keep0 addrgenmode none",
        "link set keep1 addrgenmode none",
        "link set keep1 master cni0",
        "link set keep0 up",
        "link set keep1 up",
    ])?;
    node.wait_for_local("cni0", "fe80")?;
    node.wait_for_local("cni0", "fd00:245::1")
}

/// The snapshot of the node after all background work.
pub(crate) async fn picture(stage: &Watched) -> Result<NodeSnapshot> {
    stage.settled().await?;
    NodeSnapshot::take(&stage.node)
}

/// Panics unless the node returns to that state.
pub(crate) async fn assert_as(stage: &Watched, before: &NodeSnapshot) -> Result<()> {
    stage.settled().await?;
    let left = before.differences_within(&stage.node, patience())?;
    assert!(
        left.is_empty(),
        "something was left behind or taken away:\n{}",
        left.join("\n")
    );
    let status = stage.status().await?;
    assert_eq!((status.sandboxes, status.attachments), (0, 0));
    Ok(())
}

/// Waits until a network has this readiness.
pub(crate) async fn wait_for_network(stage: &Watched, name: &str, ready: bool) -> Result<NetworkStatus> {
    eventually(patience(), async || {
        let listed = stage.kubelet.runtime().list_networks(ListNetworksRequest {}).await?;
        let mut networks = listed.into_inner().networks.into_iter();
        let found = networks.find(|network| network.name == name && network.ready == ready);
        found.with_context(|| format!("network {name} does not become ready={ready}"))
    })
    .await
}

/// The server that answers at port 8080, over TCP.
pub(crate) fn ask(from: &Namespaces, address: &str) -> Result<String, NoAnswer> {
    let address = address.parse().expect("an address");
    traffic::tcp_get(from, address, 8080, patience()).map(|answer| answer.identity)
}

/// The first address of a family in the agent's answer to the kubelet.
pub(crate) fn address(pod: &Pod, ifname: &str, v4: bool) -> String {
    let found = pod.ips_of(ifname).into_iter().find(|ip| ip.is_ipv4() == v4);
    found.map_or_else(
        || panic!("{ifname} of {} has no such address: {:?}", pod.name, pod.interfaces),
        |ip| ip.to_string(),
    )
}
