// A small server of the KNI gRPC API (KEP-4410) in memory, on which the conformance suite is tested: with --fault it
// breaks one rule.
package main

import (
	"flag"
	"log"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"google.golang.org/grpc"

	kni "github.com/MikeZappa87/kni-api/pkg/apis/runtime/beta"
)

func main() {
	socket := flag.String("socket", "/run/kni-reference/kni.sock", "path of the socket")
	dir := flag.String("netns-dir", "/run/kni-reference/netns", "folder of the network namespaces")
	subnet4 := flag.String("subnet4", "10.200.0.0/16", "IPv4 addresses of pods; empty for none")
	subnet6 := flag.String("subnet6", "fd00:200::/64", "IPv6 addresses of pods; empty for none")
	broken := flag.String("fault", "", "rule to break")
	flag.Parse()
	if err := run(*socket, *dir, []string{*subnet4, *subnet6}, fault(*broken)); err != nil {
		log.Fatal(err)
	}
}

func run(socket, dir string, subnets []string, fault fault) error {
	if err := fault.check(); err != nil {
		return err
	}
	pools := []*pool{}
	for _, subnet := range subnets {
		if subnet == "" {
			continue
		}
		prefix, err := netip.ParsePrefix(subnet)
		if err != nil {
			return err
		}
		pools = append(pools, newPool(prefix, fault))
	}
	if err := forward(); err != nil {
		return err
	}
	for _, folder := range []string{dir, filepath.Dir(socket)} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(socket); err != nil {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	kni.RegisterKNIServer(server, newService(dir, pools, fault))
	log.Printf("serving on %s", socket)
	return server.Serve(listener)
}
