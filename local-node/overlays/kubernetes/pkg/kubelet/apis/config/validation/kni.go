package validation

import (
	"fmt"
	"path/filepath"
	"strings"

	"k8s.io/component-base/featuregate"
	"k8s.io/kubernetes/pkg/features"
	kubeletconfig "k8s.io/kubernetes/pkg/kubelet/apis/config"
)

// maxSocketPath is the longest path of a unix socket in bytes (sun_path of unix(7), without its NUL).
const maxSocketPath = 107

// validateNetworkRuntime checks the fields of KNI. Only unix sockets are supported, because the permissions of a file keep
// other users of the node away.
func validateNetworkRuntime(kc *kubeletconfig.KubeletConfiguration, gates featuregate.FeatureGate) []error {
	var found []error
	refuse := func(format string, arguments ...any) {
		found = append(found, fmt.Errorf("invalid configuration: "+format, arguments...))
	}
	if !gates.Enabled(features.KNI) {
		if kc.NetworkRuntimeEndpoint != "" {
			refuse("networkRuntimeEndpoint requires the feature gate KNI")
		}
		if kc.NetworkRuntimeGracePeriod.Duration != 0 {
			refuse("networkRuntimeGracePeriod requires the feature gate KNI")
		}
		return found
	}
	path := strings.TrimPrefix(kc.NetworkRuntimeEndpoint, "unix://")
	switch {
	case kc.NetworkRuntimeEndpoint == "":
		refuse("networkRuntimeEndpoint must be set with the feature gate KNI")
	case strings.Contains(path, "://"):
		refuse("networkRuntimeEndpoint %q is no unix socket: want unix:///path or /path", kc.NetworkRuntimeEndpoint)
	case !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/":
		refuse("networkRuntimeEndpoint %q is not the absolute, clean path of a socket", kc.NetworkRuntimeEndpoint)
	case len(path) > maxSocketPath:
		refuse("networkRuntimeEndpoint has a path of %d bytes, more than the %d of a unix socket", len(path), maxSocketPath)
	}
	if kc.NetworkRuntimeGracePeriod.Duration < 0 {
		refuse("networkRuntimeGracePeriod %v is negative", kc.NetworkRuntimeGracePeriod.Duration)
	}
	return found
}
