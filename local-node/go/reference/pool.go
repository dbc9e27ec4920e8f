package main

import (
	"errors"
	"net/netip"
)

// The addresses of one family, each of which belongs to at most one sandbox.
type pool struct {
	prefix netip.Prefix
	next   netip.Addr
	used   map[netip.Addr]bool
	fault  fault
}

func newPool(prefix netip.Prefix, fault fault) *pool {
	prefix = prefix.Masked()
	// The first address of a subnet is special in both families.
	return &pool{prefix: prefix, next: prefix.Addr().Next(), used: map[netip.Addr]bool{}, fault: fault}
}

// An unused address. Released ones return only after all others were used once.
func (p *pool) take() (netip.Addr, error) {
	start := p.next
	for {
		address := p.next
		p.next = address.Next()
		if !p.prefix.Contains(p.next) {
			p.next = p.prefix.Addr().Next()
		}
		if p.fault == sameAddressTwice && len(p.used)%2 == 1 {
			for taken := range p.used {
				return taken, nil
			}
		}
		if !p.used[address] {
			p.used[address] = true
			return address, nil
		}
		if p.next == start {
			return netip.Addr{}, errors.New("no address is free in " + p.prefix.String())
		}
	}
}

func (p *pool) release(address netip.Addr) {
	delete(p.used, address)
}
