package main

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The gateways of every pod, which no interface has: the neighbour entries are permanent.
var gateways = map[bool]net.IP{true: net.IPv4(169, 254, 1, 1), false: net.ParseIP("fe80::1")}

// Makes a veth pair between the host and the namespace: hostName here, podName there, with the addresses of the pod and
// the routes of both sides. Returns the pod's MAC address.
func connect(hostName, podName string, namespace netns.NsHandle, addresses []netip.Addr) (string, error) {
	inside, err := netlink.NewHandleAt(namespace)
	if err != nil {
		return "", err
	}
	defer inside.Close()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = hostName
	veth := netlink.NewVeth(attributes)
	veth.PeerName = podName
	veth.PeerNamespace = netlink.NsFd(namespace)
	if err := netlink.LinkAdd(veth); err != nil {
		return "", err
	}
	mac, err := configure(hostName, podName, inside, addresses)
	if err != nil {
		netlink.LinkDel(veth)
	}
	return mac, err
}

func configure(hostName, podName string, inside *netlink.Handle, addresses []netip.Addr) (string, error) {
	host, err := netlink.LinkByName(hostName)
	if err != nil {
		return "", err
	}
	pod, err := inside.LinkByName(podName)
	if err != nil {
		return "", err
	}
	lo, err := inside.LinkByName("lo")
	if err != nil {
		return "", err
	}
	for _, up := range []func() error{
		func() error { return netlink.LinkSetUp(host) },
		func() error { return inside.LinkSetUp(lo) },
		func() error { return inside.LinkSetUp(pod) },
	} {
		if err := up(); err != nil {
			return "", err
		}
	}
	for _, address := range addresses {
		if err := route(host, pod, inside, address); err != nil {
			return "", err
		}
	}
	return pod.Attrs().HardwareAddr.String(), nil
}

// Gives the pod one address, with the routes and neighbour entries of both sides.
func route(host, pod netlink.Link, inside *netlink.Handle, address netip.Addr) error {
	ip := net.IP(address.AsSlice())
	own := &net.IPNet{IP: ip, Mask: net.CIDRMask(address.BitLen(), address.BitLen())}
	gateway := gateways[address.Is4()]
	// Without duplicate address detection, an address can be used at once.
	if err := inside.AddrAdd(pod, &netlink.Addr{IPNet: own, Flags: unix.IFA_F_NODAD}); err != nil {
		return err
	}
	entry := func(link netlink.Link, ip net.IP, mac net.HardwareAddr) *netlink.Neigh {
		return &netlink.Neigh{LinkIndex: link.Attrs().Index, IP: ip, HardwareAddr: mac, State: unix.NUD_PERMANENT}
	}
	if err := inside.NeighSet(entry(pod, gateway, host.Attrs().HardwareAddr)); err != nil {
		return err
	}
	if err := netlink.NeighSet(entry(host, ip, pod.Attrs().HardwareAddr)); err != nil {
		return err
	}
	every := &net.IPNet{IP: make(net.IP, len(ip)), Mask: make(net.IPMask, len(ip))}
	out := &netlink.Route{LinkIndex: pod.Attrs().Index, Dst: every, Gw: gateway, Flags: int(netlink.FLAG_ONLINK)}
	// Replaced, because of the fault that makes a second interface.
	if err := inside.RouteReplace(out); err != nil {
		return err
	}
	// Replaced, because of the fault that gives an address to two pods.
	return netlink.RouteReplace(&netlink.Route{LinkIndex: host.Attrs().Index, Dst: own, Scope: netlink.SCOPE_LINK})
}

// Removes a pair by its end in the host; succeeds if there is none.
func disconnect(hostName string) error {
	link, err := netlink.LinkByName(hostName)
	if _, absent := err.(netlink.LinkNotFoundError); absent {
		return nil
	}
	if err != nil {
		return err
	}
	return netlink.LinkDel(link)
}
