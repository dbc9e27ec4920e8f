package features

import (
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/component-base/featuregate"
)

// KNI lets the kubelet make the networks of pods by the Kubernetes Networking Interface (KEP-4410).
const KNI featuregate.Feature = "KNI"

// The gate joins the tables of gates before kube_features.go registers them: Go initializes the files of a package in the order
// of their names.
func init() {
	defaultVersionedKubernetesFeatureGates[KNI] = featuregate.VersionedSpecs{
		{Version: version.MustParse("1.36"), Default: false, PreRelease: featuregate.Alpha},
	}
	defaultKubernetesFeatureGateDependencies[KNI] = nil
}
