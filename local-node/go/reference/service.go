package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/vishvananda/netns"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kni "github.com/MikeZappa87/kni-api/pkg/apis/runtime/beta"
)

// The name of a pod's interface.
const primary = "eth0"

// How long the fault attach-answers-early waits before it attaches.
const late = 700 * time.Millisecond

// An attached sandbox.
type sandbox struct {
	pod        string
	path       string
	hostName   string
	addresses  []netip.Addr
	interfaces map[string]*kni.IPConfig
}

// All calls are served one after another.
type service struct {
	kni.UnimplementedKNIServer
	lock      sync.Mutex
	dir       string
	pools     []*pool
	fault     fault
	sandboxes map[string]*sandbox
	// The id of the newest sandbox of each pod, for the fault old-ids-hit-newer.
	newest map[string]string
}

func newService(dir string, pools []*pool, fault fault) *service {
	return &service{dir: dir, pools: pools, fault: fault, sandboxes: map[string]*sandbox{}, newest: map[string]string{}}
}

func (s *service) CreateNetwork(_ context.Context, request *kni.CreateNetworkRequest) (*kni.CreateNetworkResponse, error) {
	path := filepath.Join(s.dir, randomName())
	if s.fault == pathFromName {
		path = filepath.Join(s.dir, "kni-"+request.Namespace+"-"+request.Name)
	}
	if request.NetnsPathPrefix != "" {
		path = request.NetnsPathPrefix + randomName()
	}
	if err := makeNamespace(path); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &kni.CreateNetworkResponse{NetnsPath: path}, nil
}

func (s *service) AttachInterface(_ context.Context, request *kni.AttachInterfaceRequest) (*kni.AttachInterfaceResponse, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	name := primary
	if known := s.sandboxes[request.Id]; known != nil && known.interfaces != nil {
		if s.fault != attachNotIdempotent {
			return &kni.AttachInterfaceResponse{Ipconfigs: known.interfaces}, nil
		}
		name = "eth1"
	}
	path := request.Extradata["netns"]
	if path == "" {
		path = request.GetIsolation().GetPath()
	}
	if path == "" {
		path = request.Annotations["kni.dev/netns"]
	}
	made, err := s.attach(request, path, name)
	if err != nil {
		return nil, err
	}
	s.sandboxes[request.Id] = made
	s.newest[made.pod] = request.Id
	return &kni.AttachInterfaceResponse{Ipconfigs: made.interfaces}, nil
}

func (s *service) attach(request *kni.AttachInterfaceRequest, path, name string) (*sandbox, error) {
	made := &sandbox{pod: request.Namespace + "/" + request.Name, path: path, hostName: randomName()[:12]}
	namespace, err := netns.GetFromPath(path)
	if err != nil {
		if s.fault != missingNamespaceLost {
			return nil, status.Errorf(codes.NotFound, "namespace %s: %v", path, err)
		}
		made.interfaces = map[string]*kni.IPConfig{primary: {Ip: []string{"192.0.2.1"}}}
		return made, nil
	}
	for _, pool := range s.pools {
		address, err := pool.take()
		if err != nil {
			namespace.Close()
			s.release(made)
			return nil, status.Error(codes.ResourceExhausted, err.Error())
		}
		made.addresses = append(made.addresses, address)
	}
	if s.fault == attachAnswersEarly {
		go func() {
			time.Sleep(late)
			connect(made.hostName, name, namespace, made.addresses)
			namespace.Close()
		}()
		made.interfaces = s.answer("", made.addresses)
		return made, nil
	}
	defer namespace.Close()
	mac, err := connect(made.hostName, name, namespace, made.addresses)
	if err != nil {
		s.release(made)
		return nil, status.Error(codes.Internal, err.Error())
	}
	made.interfaces = s.answer(mac, made.addresses)
	return made, nil
}

func (s *service) answer(mac string, addresses []netip.Addr) map[string]*kni.IPConfig {
	config := &kni.IPConfig{Mac: mac}
	details := []map[string]any{}
	for _, address := range addresses {
		text, family := address.String(), "IPv6"
		if address.Is4() {
			family = "IPv4"
		}
		details = append(details, map[string]any{
			"ip": text, "family": family, "prefix": address.BitLen(), "gateway": gateways[address.Is4()].String(),
		})
		if s.fault == cidrAddresses {
			text = netip.PrefixFrom(address, address.BitLen()).String()
		}
		config.Ip = append(config.Ip, text)
	}
	// Maps of texts and numbers can be encoded.
	encoded, _ := json.Marshal(details)
	config.Extradata = map[string]string{"addresses": string(encoded)}
	return map[string]*kni.IPConfig{primary: config}
}

func (s *service) QueryPodNetwork(_ context.Context, request *kni.QueryPodNetworkRequest) (*kni.QueryPodNetworkResponse, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if known := s.sandboxes[request.Id]; known != nil {
		return &kni.QueryPodNetworkResponse{Ipconfigs: known.interfaces}, nil
	}
	if s.fault == unknownQueryFails {
		return nil, status.Errorf(codes.NotFound, "no sandbox %q", request.Id)
	}
	return &kni.QueryPodNetworkResponse{}, nil
}

func (s *service) DetachInterface(_ context.Context, request *kni.DetachInterfaceRequest) (*kni.DetachInterfaceResponse, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	known := s.sandboxes[request.Id]
	if known == nil && s.fault == unknownDetachFails {
		return nil, status.Errorf(codes.NotFound, "no sandbox %q", request.Id)
	}
	if err := s.detach(known); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &kni.DetachInterfaceResponse{}, nil
}

// Removes the interface and keeps the sandbox, whose namespace is deleted later by its id.
func (s *service) detach(known *sandbox) error {
	if known == nil || known.interfaces == nil {
		return nil
	}
	if s.fault != detachKeepsInterface {
		if err := disconnect(known.hostName); err != nil {
			return err
		}
	}
	s.release(known)
	known.interfaces = nil
	return nil
}

func (s *service) DeleteNetwork(_ context.Context, request *kni.DeleteNetworkRequest) (*kni.DeleteNetworkResponse, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	path, known := request.NetnsPath, s.sandboxes[request.Id]
	if known != nil {
		path = known.path
		if newest := s.sandboxes[s.newest[known.pod]]; newest != nil && s.fault == oldIDsHitNewer {
			path = newest.path
		}
		if s.fault == deleteKeepsInterface {
			known.interfaces = nil
		}
		if err := s.detach(known); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		delete(s.sandboxes, request.Id)
	}
	if s.fault != deleteKeepsNamespace {
		if err := removeNamespace(path); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	return &kni.DeleteNetworkResponse{}, nil
}

func (s *service) QueryNodeNetworks(context.Context, *kni.QueryNodeNetworksRequest) (*kni.QueryNodeNetworksResponse, error) {
	if s.fault == noNetworks {
		return &kni.QueryNodeNetworksResponse{}, nil
	}
	return &kni.QueryNodeNetworksResponse{Networks: []*kni.Network{{Name: "reference", Ready: true}}}, nil
}

func (s *service) SetupNodeNetwork(context.Context, *kni.SetupNodeNetworkRequest) (*kni.SetupNodeNetworkResponse, error) {
	return &kni.SetupNodeNetworkResponse{}, nil
}

func (s *service) release(made *sandbox) {
	for i, address := range made.addresses {
		s.pools[i].release(address)
	}
	made.addresses = nil
}

func randomName() string {
	bytes := make([]byte, 8)
	// Documented never to fail.
	rand.Read(bytes)
	return "ref" + hex.EncodeToString(bytes)
}
