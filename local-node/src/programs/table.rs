//! The table of a node's programs. Their versions are those of `go/go.mod`.

/// A program that is built from a Go module in `go`.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// Its file name.
    pub name: &'static str,
    /// The import path of its package.
    pub package: &'static str,
}

impl Program {
    /// The file name that Go chooses: the last component of the path that is not a major version. That of compiled
    /// tests has a suffix, and is their name here too.
    pub(super) fn built_name(&self) -> &'static str {
        if self.name.strip_suffix(".test").is_some() {
            return self.name;
        }
        let is_version = |part: &str| {
            part.strip_prefix('v')
                .is_some_and(|digits| digits.parse::<u8>().is_ok())
        };
        let mut parts = self.package.rsplit('/').filter(|part| !is_version(part));
        parts.next().unwrap_or(self.name)
    }
}

/// The programs of [`super::go::KNI`].
pub(super) const KNI: &[Program] = &[
    program("containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
    program("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
];

/// The programs of [`super::go::HELM`].
pub(super) const HELM: &[Program] = &[program("helm", "helm.sh/helm/v4/cmd/helm")];

/// The programs of [`super::go::TEST_IMAGES`].
pub(super) const TEST_IMAGES: &[Program] = &[
    program("agnhost", "k8s.io/kubernetes/test/images/agnhost"),
    program(
        "regression-issue-74839",
        "k8s.io/kubernetes/test/images/regression-issue-74839",
    ),
];

/// The programs of [`super::go::E2E`].
pub(super) const E2E: &[Program] = &[program("e2e.test", "k8s.io/kubernetes/test/e2e")];

/// The programs of [`super::go::RUNC`].
pub(super) const RUNC: &[Program] = &[program("runc", "github.com/opencontainers/runc")];

/// Every program of a node except runc, which is built apart.
pub const PROGRAMS: &[Program] = &[
    program("bridge", "github.com/containernetworking/plugins/plugins/main/bridge"),
    program("ptp", "github.com/containernetworking/plugins/plugins/main/ptp"),
    program(
        "loopback",
        "github.com/containernetworking/plugins/plugins/main/loopback",
    ),
    program(
        "host-local",
        "github.com/containernetworking/plugins/plugins/ipam/host-local",
    ),
    program("portmap", "github.com/containernetworking/plugins/plugins/meta/portmap"),
    program("containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
    program(
        "containerd-shim-runc-v2",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    ),
    program("ctr", "github.com/containerd/containerd/v2/cmd/ctr"),
    program("etcd", "go.etcd.io/etcd/server/v3"),
    program("coredns", "kni.dev/local-node/coredns"),
    program("kni-reference", "kni.dev/local-node/reference"),
    program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    program(
        "kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
    ),
    program("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    program("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    program("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
    program("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
];

const fn program(name: &'static str, package: &'static str) -> Program {
    Program { name, package }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiled_tests_have_the_name_of_their_package() {
        for tests in E2E {
            let package = tests.package.rsplit('/').next().unwrap();
            assert_eq!(tests.built_name(), format!("{package}.test"));
        }
    }

    #[test]
    fn built_files_have_the_names_of_the_programs_with_two_exceptions() {
        for program in PROGRAMS {
            let expected = match program.name {
                "etcd" => "server",
                "kni-reference" => "reference",
                name => name,
            };
            assert_eq!(program.built_name(), expected);
        }
    }
}
