//! The one table of the programs and their versions.

/// A program that is built from a Go module.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// Its file name.
    pub name: &'static str,
    /// Module path.
    pub module: &'static str,
    /// Module version.
    pub version: &'static str,
    /// The package to build, below the module's path; empty for the module itself.
    pub package: &'static str,
    /// What a first build takes on two cores, for the patience of who waits.
    pub effort: &'static str,
}

impl Program {
    /// What has to be equal for a built program to be this one.
    pub(super) fn stamp(&self) -> String {
        format!("{}/{}@{}\n", self.module, self.package, self.version)
    }

    /// The import path of its package.
    pub(super) fn import(&self) -> String {
        if self.package.is_empty() {
            self.module.into()
        } else {
            format!("{}/{}", self.module, self.package)
        }
    }
}

const KUBERNETES: &str = "k8s.io/kubernetes";
const KUBERNETES_VERSION: &str = "v1.36.3";
const CONTAINERD: &str = "github.com/containerd/containerd/v2";
const CONTAINERD_VERSION: &str = "v2.3.7";
const PLUGINS: &str = "github.com/containernetworking/plugins";
const PLUGINS_VERSION: &str = "v1.9.1";

/// Every program of a node but runc, which is the system's: its seccomp needs a C library.
pub const PROGRAMS: &[Program] = &[
    plugin("bridge", "plugins/main/bridge"),
    plugin("ptp", "plugins/main/ptp"),
    plugin("loopback", "plugins/main/loopback"),
    plugin("host-local", "plugins/ipam/host-local"),
    plugin("portmap", "plugins/meta/portmap"),
    containerd("containerd", "cmd/containerd", "about 2 minutes"),
    containerd(
        "containerd-shim-runc-v2",
        "cmd/containerd-shim-runc-v2",
        "about 20 seconds",
    ),
    containerd("ctr", "cmd/ctr", "about 20 seconds"),
    Program {
        name: "etcd",
        module: "go.etcd.io/etcd/server/v3",
        version: "v3.6.5",
        package: "",
        effort: "about 1 minute",
    },
    kubernetes("kube-apiserver", "cmd/kube-apiserver", "about 5 minutes"),
    kubernetes(
        "kube-controller-manager",
        "cmd/kube-controller-manager",
        "about 1 minute",
    ),
    kubernetes("kube-scheduler", "cmd/kube-scheduler", "about 30 seconds"),
    kubernetes("kubelet", "cmd/kubelet", "about 1 minute"),
    kubernetes("kube-proxy", "cmd/kube-proxy", "about 20 seconds"),
    kubernetes("kubectl", "cmd/kubectl", "about 30 seconds"),
];

const fn kubernetes(name: &'static str, package: &'static str, effort: &'static str) -> Program {
    Program {
        name,
        module: KUBERNETES,
        version: KUBERNETES_VERSION,
        package,
        effort,
    }
}

const fn containerd(name: &'static str, package: &'static str, effort: &'static str) -> Program {
    Program {
        name,
        module: CONTAINERD,
        version: CONTAINERD_VERSION,
        package,
        effort,
    }
}

const fn plugin(name: &'static str, package: &'static str) -> Program {
    Program {
        name,
        module: PLUGINS,
        version: PLUGINS_VERSION,
        package,
        effort: "seconds",
    }
}
