//! Defines the paths, configurations and arguments of a node's parts.

use serde_json::json;

use crate::{image, kni::Kni};

/// The name of a cluster's only node.
pub(crate) const NODE_NAME: &str = "node1";
/// Certificates and configurations.
pub(crate) const FOLDER: &str = "/run/node";
/// containerd's socket.
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// Where containerd looks for CNI plugins first.
pub(crate) const CNI_BIN: &str = "/run/cni/bin";
/// Where containerd looks for CNI configurations.
pub(crate) const CNI_CONF: &str = "/run/cni/net.d";
/// Where the agent mounts the namespaces that it makes.
const NAMESPACES: &str = "/run/netns";
/// The agent's socket.
const AGENT_SOCKET: &str = "unix:///run/kni/kni.sock";
/// The API server's address inside the node.
pub(crate) const API_SERVER: &str = "https://127.0.0.1:6443";
/// The same for connections.
pub(crate) const API_SERVER_SOCKET: &str = "127.0.0.1:6443";
/// A variable for programs of Kubernetes and its value: they collect garbage once the heap is five times as large as
/// what they use, not twice. It saves CPU time, and costs memory.
pub const COLLECTION: (&str, &str) = ("GOGC", "400");
/// The addresses of services, IPv4 first.
pub(crate) const SERVICE_RANGES: &str = "10.96.0.0/16,fd00:96::/112";
/// The address of the Service `kube-dns`.
pub(crate) const DNS: &str = "10.96.0.10";
/// The ranges of pod addresses for kube-proxy.
const POD_RANGES: &str = "10.244.0.0/16,fd00:244::/64";
/// The folder of etcd.
pub(crate) const ETCD_DATA: &str = "/var/lib/etcd";
const ETCD: &str = "http://127.0.0.1:2379";
/// The manifests of static pods.
pub(crate) const STATIC_PODS: &str = "/run/node/static-pods";
/// The policy of the audit log.
pub(crate) const AUDIT_POLICY: &str = "/run/node/audit-policy.json";
/// The audit log.
pub(crate) const AUDIT_LOG: &str = "/run/node/audit.log";

/// The path of a certificate, a key or a kubeconfig.
pub(crate) fn pki(file: &str) -> String {
    format!("{FOLDER}/pki/{file}")
}

/// containerd's configuration; plugins that are not in [`CNI_BIN`] are looked for in `plugins`.
pub(crate) fn containerd(plugins: &str, kni: Option<&Kni>) -> String {
    let pause = image::PAUSE;
    let by_kubelet = kni
        .filter(|kni| kni.containerd)
        .map_or_else(String::new, |_kni| format!("\n  pod_namespace_dir = \"{NAMESPACES}\""));
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  # Lowering a score takes CAP_SYS_RESOURCE, which root in a container may lack.
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{CNI_BIN}", "{plugins}"]
  conf_dir = "{CNI_CONF}"{by_kubelet}
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"#
    )
}

/// The kubelet's configuration; its pods are below the control group `group`.
pub(crate) fn kubelet(group: &str, kni: Option<&Kni>) -> String {
    let mut configuration = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failSwapOn": false,
        "failCgroupV1": false,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{group}"),
        "enforceNodeAllocatable": [],
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": pki("ca.crt") },
        },
        "authorization": { "mode": "Webhook" },
        "clusterDNS": [DNS],
        "clusterDomain": "cluster.local",
        "tlsCertFile": pki("kubelet.crt"),
        "tlsPrivateKeyFile": pki("kubelet.key"),
        "evictionHard": { "memory.available": "50Mi" },
        "imageGCHighThresholdPercent": 100,
        "syncFrequency": "10s",
        "staticPodPath": STATIC_PODS,
        "maxPods": 250,
        "volumePluginDir": "/var/lib/kubelet/volumeplugins",
        // Without rate limits, for tests that start many pods at once.
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
    });
    if let Some(kni) = kni.filter(|kni| kni.kubelet) {
        let seconds = |seconds: u32| (seconds > 0).then(|| json!(format!("{seconds}s")));
        let settings = [
            ("featureGates", Some(json!({ "KNI": true }))),
            ("networkRuntimeEndpoint", Some(json!(AGENT_SOCKET))),
            ("networkRuntimeGracePeriod", seconds(kni.grace_seconds)),
            ("nodeStatusUpdateFrequency", seconds(kni.status_seconds)),
        ];
        let given = settings
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        configuration
            .as_object_mut()
            .into_iter()
            .for_each(|all| all.extend(given.clone()));
    }
    configuration.to_string()
}

/// kube-proxy's configuration on the node `name`.
pub(crate) fn kube_proxy(name: &str) -> String {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": POD_RANGES,
        "hostnameOverride": name,
        "clientConnection": { "kubeconfig": pki("proxy.conf") },
        // The limits of conntrack apply to the whole machine.
        "conntrack": { "maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s" },
        "nftables": { "syncPeriod": "5s", "minSyncPeriod": "100ms" },
    })
    .to_string()
}

/// etcd's arguments.
pub(crate) fn etcd() -> Vec<String> {
    [
        &format!("--data-dir={ETCD_DATA}"),
        &format!("--listen-client-urls={ETCD}"),
        &format!("--advertise-client-urls={ETCD}"),
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
    ]
    .map(str::to_owned)
    .into()
}

/// kube-apiserver's arguments, for nodes without a kubelet that reach it at `address`.
pub(crate) fn api_server_without_kubelets(address: &str) -> Vec<String> {
    let mut arguments = api_server(address);
    arguments.extend(audit());
    // Pods can be created before their service accounts exist.
    arguments.push("--disable-admission-plugins=ServiceAccount".into());
    arguments
}

/// Arguments with which kube-apiserver writes a line into [`AUDIT_LOG`] before it answers a request.
pub(crate) fn audit() -> [String; 4] {
    [
        format!("--audit-policy-file={AUDIT_POLICY}"),
        format!("--audit-log-path={AUDIT_LOG}"),
        "--audit-log-mode=blocking".into(),
        // In MiB, at which the API server begins a new file; its default is 100, which a simulation exceeds.
        "--audit-log-maxsize=65536".into(),
    ]
}

/// Logs metadata of every request: user, verb, resource, time and result.
pub(crate) fn audit_policy() -> String {
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{ "level": "Metadata" }],
    })
    .to_string()
}

/// kube-apiserver's arguments. `address` is the endpoint of the Service `kubernetes`: one of the node's that pods
/// reach.
pub(crate) fn api_server(address: &str) -> Vec<String> {
    vec![
        format!("--etcd-servers={ETCD}"),
        "--bind-address=::".into(),
        format!("--advertise-address={address}"),
        "--secure-port=6443".into(),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!("--client-ca-file={}", pki("ca.crt")),
        format!("--service-account-key-file={}", pki("sa.pub")),
        format!("--service-account-signing-key-file={}", pki("sa.key")),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        "--authorization-mode=Node,RBAC".into(),
        format!("--service-cluster-ip-range={SERVICE_RANGES}"),
        "--allow-privileged=true".into(),
        // No DNS outside of pods resolves the node's name.
        "--kubelet-preferred-address-types=InternalIP".into(),
        format!("--kubelet-client-certificate={}", pki("admin.crt")),
        format!("--kubelet-client-key={}", pki("admin.key")),
    ]
}

/// kube-controller-manager's arguments.
pub(crate) fn controller_manager() -> Vec<String> {
    vec![
        format!("--kubeconfig={}", pki("controller-manager.conf")),
        format!("--service-account-private-key-file={}", pki("sa.key")),
        format!("--root-ca-file={}", pki("ca.crt")),
        "--use-service-account-credentials=true".into(),
        "--leader-elect=false".into(),
        format!("--cluster-signing-cert-file={}", pki("ca.crt")),
        format!("--cluster-signing-key-file={}", pki("ca.key")),
        "--kube-api-qps=200".into(),
        "--kube-api-burst=400".into(),
    ]
}

/// kube-controller-manager's arguments for nodes without a kubelet that renews their leases.
pub(crate) fn controller_manager_without_kubelets() -> Vec<String> {
    let mut arguments = controller_manager();
    arguments.push("--controllers=*,-node-lifecycle-controller,-taint-eviction-controller".into());
    arguments
}

/// kube-scheduler's arguments.
pub(crate) fn scheduler() -> Vec<String> {
    vec![
        format!("--kubeconfig={}", pki("scheduler.conf")),
        "--leader-elect=false".into(),
        "--kube-api-qps=200".into(),
        "--kube-api-burst=400".into(),
    ]
}

/// kubelet's arguments on the node `name`, whose `addresses` are separated by a comma.
pub(crate) fn kubelet_arguments(name: &str, addresses: &str) -> Vec<String> {
    vec![
        format!("--config={FOLDER}/kubelet.yaml"),
        format!("--kubeconfig={}", pki("kubelet.conf")),
        format!("--hostname-override={name}"),
        format!("--node-ip={addresses}"),
        "--cert-dir=/var/lib/kubelet/pki".into(),
    ]
}
