//! Tests the formats for programs: names, types, and empty lists.

use kni_proto::runtime::{DropCount, ListDropsResponse};
use serde_json::{Value, json};

use super::{answers, knictl};
use crate::{
    escape::is_hidden,
    fake::{Agent, Answers},
};

async fn document(agent: &Agent, args: &[&str]) -> Value {
    let ran = knictl(agent, args).await;
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(!ran.out.chars().any(|c| c != '\n' && is_hidden(c)), "{:?}", ran.out);
    if args.contains(&"yaml") {
        serde_saphyr::from_str(&ran.out).unwrap()
    } else {
        serde_json::from_str(&ran.out).unwrap()
    }
}

#[tokio::test]
async fn interfaces_keep_the_names_of_the_protocol() {
    let agent = Agent::serve(answers::full());
    let expected = json!({
        "podNamespace": "shop", "podName": "web-0", "podUid": "u-1", "sandboxId": "5f2b",
        "network": "blue", "networkId": 1, "endpointId": 11,
        "ifname": "eth0", "ifindex": 2, "hostIfname": "kni0a1b", "hostIfindex": 40,
        "netnsPath": "/run/netns/a", "netnsInode": 4_026_532_000_u64,
        "mac": "0a:58:0a:00:00:05", "hostMac": "0a:58:00:00:00:01", "mtu": 1500,
        "addresses": [{ "family": "IPv4", "ip": "10.0.0.5" }, { "family": "IPv6", "ip": "fd00::5" }],
        "programs": [
            { "name": "from_pod", "id": 70, "hook": "tcx/ingress", "linkId": 7 },
            { "name": "to_pod", "id": 71, "hook": "tcx/egress", "linkId": 8 },
        ],
        "fromPod": { "packets": 12, "bytes": 1536 }, "toPod": { "packets": 9, "bytes": 900 },
        "dropped": { "packets": 0, "bytes": 0 },
        "healthy": true, "problems": [], "defaultRoute": true, "hostAccess": true, "kind": "veth", "policyEnforced": true,
    });
    for form in ["json", "yaml"] {
        let answer = document(&agent, &["interfaces", "-o", form]).await;
        assert_eq!(answer["interfaces"][0], expected, "{form}");
        assert_eq!(answer["interfaces"][1]["podName"], "db\u{1b}[2J\u{9b}0m", "{form}");
        assert_eq!(answer["interfaces"].as_array().unwrap().len(), 2, "{form}");
    }
}

#[tokio::test]
async fn status_and_networks_keep_the_names_of_the_protocol() {
    let agent = Agent::serve(answers::full());
    let status = json!({
        "version": "0.1.0", "pid": 4711, "uptimeSeconds": 3725, "ready": true, "reasons": [],
        "kernelRelease": "6.18.5", "hook": "tcx", "layoutVersion": 1, "pinPath": "/sys/fs/bpf/kni/v1",
        "sockets": ["/run/kni/kni.sock", "/tmp/kni.sock"], "sandboxes": 3, "attachments": 2,
        "endpointsCapacity": 1024, "warmSandboxes": 8, "pendingRemovals": 0, "pendingLinks": 1,
        "uplink": {
            "ifname": "uplink0", "ifindex": 2, "sources": ["192.0.2.2", "2001:db8::2"], "dedicated": [],
            "programs": [{ "name": "from_uplink", "id": 7, "hook": "tcx/ingress", "linkId": 9 }],
            "xdp": "", "hostPorts": 3, "warning": "",
        },
        "featuresCore": ["addresses"], "featuresExtended": ["policy", "egress"], "kniMethods": ["AttachInterface"],
    });
    let blue = json!({
        "name": "blue", "id": 1, "default": true, "ready": true, "reason": "",
        "subnets": ["10.0.0.0/24", "fd00::/64"], "mtu": 1500, "attachments": 1,
        "totalAddresses": "18446744073709551868", "usedAddresses": "2", "origin": "blue.yaml:1",
        "provider": "Ebpf", "features": ["addresses", "policy"], "number": 7_340_033, "numberProblem": "",
    });
    let refused = json!([{ "file": "green.yaml", "line": 7, "field": "spec.mtu", "reason": "below 1280" }]);
    for form in ["json", "yaml"] {
        assert_eq!(document(&agent, &["status", "-o", form]).await, status);
        let networks = document(&agent, &["networks", "-o", form]).await;
        assert_eq!((&networks["networks"][0], &networks["refused"]), (&blue, &refused));
    }
}

#[tokio::test]
async fn drops_and_maps_keep_the_names_of_the_protocol() {
    let agent = Agent::serve(answers::full());
    let drops = json!({ "drops": [{
        "network": "blue", "podNamespace": "shop", "podName": "web-0", "ifname": "eth0",
        "direction": "from_pod", "reason": "source_mac", "count": { "packets": 4, "bytes": 4096 },
        "explanation": "the source MAC address is not the pod's (spoofed)",
    }]});
    let maps = json!({ "maps": [{
        "name": "endpoints", "id": 33, "kind": "Array", "keySize": 4, "valueSize": 64, "maxEntries": 1024,
        "entries": 2, "pin": "/sys/fs/bpf/kni/v1/maps/endpoints", "purpose": "one row per pod interface",
    }]});
    for form in ["json", "yaml"] {
        assert_eq!(document(&agent, &["drops", "-o", form]).await, drops);
        assert_eq!(document(&agent, &["maps", "-o", form]).await, maps);
    }
    assert_eq!(document(&agent, &["drops", "--json"]).await, drops);
}

#[tokio::test]
async fn empty_lists_are_lists() {
    let agent = Agent::serve(Answers::default());
    for form in ["json", "yaml"] {
        for noun in ["interfaces", "drops", "flows", "services", "maps"] {
            assert_eq!(document(&agent, &[noun, "-o", form]).await, json!({ noun: [] }));
        }
        assert_eq!(
            document(&agent, &["networks", "-o", form]).await,
            json!({ "networks": [], "refused": [] })
        );
    }
}

#[tokio::test]
async fn absent_messages_have_their_defaults() {
    let drops = ListDropsResponse {
        drops: vec![DropCount::default()],
    };
    let agent = Agent::serve(Answers {
        drops,
        ..Answers::default()
    });
    for form in ["json", "yaml"] {
        let drops = document(&agent, &["drops", "-o", form]).await;
        assert_eq!(
            drops["drops"][0]["count"],
            json!({ "packets": 0, "bytes": 0 }),
            "{form}"
        );
        let explanation = document(&agent, &["explain", "x/a", "x/b", "tcp/80", "-o", form]).await;
        let unset = json!({ "ip": "", "port": 0, "podNamespace": "", "podName": "", "node": "" });
        let flow = &explanation["flow"];
        assert_eq!((&flow["source"], &flow["destination"]), (&unset, &unset), "{form}");
        assert_eq!(
            (&flow["egress"], &flow["translatedSource"]),
            (&Value::Null, &Value::Null)
        );
        assert_eq!(flow["time"], "1970-01-01T00:00:00.000000Z");
    }
}
