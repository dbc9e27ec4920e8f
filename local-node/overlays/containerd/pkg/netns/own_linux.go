package netns

import (
	"path/filepath"
	"strings"
)

// isOwn tells the namespaces that this package has made, by the names that newNS gives, from those of others, which are never
// unmounted or removed here. The configuration does not matter: it may have changed since the sandbox was made.
func isOwn(path string) bool {
	return strings.HasPrefix(filepath.Base(path), "cni-")
}
