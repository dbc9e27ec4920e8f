//go:build tools

// Package e2e names upstream's end-to-end tests and the programs of their images, so that `go mod tidy` keeps what they need.
package e2e

import (
	_ "k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/images/agnhost"
	_ "k8s.io/kubernetes/test/images/regression-issue-74839"
)
