package main

import (
	"fmt"
	"slices"
	"strings"
)

// A rule that the server breaks; empty for none.
type fault string

const (
	unknownQueryFails    fault = "unknown-query-fails"
	unknownDetachFails   fault = "unknown-detach-fails"
	cidrAddresses        fault = "cidr-addresses"
	sameAddressTwice     fault = "same-address-twice"
	attachNotIdempotent  fault = "attach-not-idempotent"
	deleteKeepsNamespace fault = "delete-keeps-namespace"
	noNetworks           fault = "no-networks"
	detachKeepsInterface fault = "detach-keeps-interface"
	attachAnswersEarly   fault = "attach-answers-early"
	pathFromName         fault = "path-from-name"
	deleteKeepsInterface fault = "delete-keeps-interface"
	missingNamespaceLost fault = "missing-namespace-succeeds"
	oldIDsHitNewer       fault = "old-ids-hit-newer"
)

var faults = []fault{
	unknownQueryFails, unknownDetachFails, cidrAddresses, sameAddressTwice, attachNotIdempotent, deleteKeepsNamespace,
	noNetworks, detachKeepsInterface, attachAnswersEarly, pathFromName, deleteKeepsInterface, missingNamespaceLost,
	oldIDsHitNewer,
}

func (f fault) check() error {
	if f == "" || slices.Contains(faults, f) {
		return nil
	}
	names := make([]string, len(faults))
	for i, known := range faults {
		names[i] = string(known)
	}
	return fmt.Errorf("no fault %q; there are %s", f, strings.Join(names, ", "))
}
