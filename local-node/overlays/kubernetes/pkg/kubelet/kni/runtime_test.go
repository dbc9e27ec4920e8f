package kni

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	api "github.com/MikeZappa87/kni-api/pkg/apis/runtime/beta"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// server is a network runtime that notes its calls.
type server struct {
	api.UnimplementedKNIServer
	mutex   sync.Mutex
	calls   []string
	attach  error
	detach  error
	query   error
	network []*api.Network
}

func (s *server) note(format string, arguments ...any) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.calls = append(s.calls, fmt.Sprintf(format, arguments...))
}

func (s *server) taken() []string {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	calls := s.calls
	s.calls = nil
	return calls
}

func (s *server) CreateNetwork(_ context.Context, request *api.CreateNetworkRequest) (*api.CreateNetworkResponse, error) {
	s.note("create %s %s", request.Extradata["podUID"], request.Extradata["attempt"])
	return &api.CreateNetworkResponse{NetnsPath: "/run/netns/" + request.Extradata["podUID"]}, nil
}

func (s *server) AttachInterface(_ context.Context, request *api.AttachInterfaceRequest) (*api.AttachInterfaceResponse, error) {
	s.note("attach %s %s", request.Id, request.Isolation.GetPath())
	if s.attach != nil {
		return nil, s.attach
	}
	return &api.AttachInterfaceResponse{Ipconfigs: map[string]*api.IPConfig{"eth0": {Ip: []string{"10.0.0.1", "fd00::1"}}}}, nil
}

func (s *server) DetachInterface(_ context.Context, request *api.DetachInterfaceRequest) (*api.DetachInterfaceResponse, error) {
	s.note("detach %s", request.Id)
	if s.detach != nil {
		return nil, s.detach
	}
	return &api.DetachInterfaceResponse{}, nil
}

func (s *server) DeleteNetwork(_ context.Context, request *api.DeleteNetworkRequest) (*api.DeleteNetworkResponse, error) {
	s.note("delete %q %s", request.Id, request.NetnsPath)
	return &api.DeleteNetworkResponse{}, nil
}

func (s *server) QueryPodNetwork(_ context.Context, request *api.QueryPodNetworkRequest) (*api.QueryPodNetworkResponse, error) {
	s.note("query %s", request.Id)
	if s.query != nil {
		return nil, s.query
	}
	return &api.QueryPodNetworkResponse{Ipconfigs: map[string]*api.IPConfig{"eth0": {Ip: []string{"10.0.0.1", "fd00::1"}}}}, nil
}

func (s *server) QueryNodeNetworks(context.Context, *api.QueryNodeNetworksRequest) (*api.QueryNodeNetworksResponse, error) {
	return &api.QueryNodeNetworksResponse{Networks: s.network}, nil
}

// sandboxes is a container runtime without containers.
type sandboxes struct {
	internalapi.RuntimeService
	mutex sync.Mutex
	run   error
	list  map[string]*runtimeapi.PodSandboxStatus
}

func (r *sandboxes) RunPodSandbox(_ context.Context, config *runtimeapi.PodSandboxConfig, _ string) (string, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.run != nil {
		return "", r.run
	}
	id := fmt.Sprintf("%s-%d", config.Metadata.Uid, config.Metadata.Attempt)
	r.list[id] = &runtimeapi.PodSandboxStatus{
		Id: id, Metadata: config.Metadata, Annotations: config.Annotations, State: runtimeapi.PodSandboxState_SANDBOX_READY,
		Network: &runtimeapi.PodSandboxNetworkStatus{},
		Linux:   &runtimeapi.LinuxPodSandboxStatus{Namespaces: &runtimeapi.Namespace{Options: config.GetLinux().GetSecurityContext().GetNamespaceOptions()}},
	}
	return id, nil
}

func (r *sandboxes) StopPodSandbox(context.Context, string) error { return nil }

func (r *sandboxes) RemovePodSandbox(_ context.Context, id string) error {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.list, id)
	return nil
}

func (r *sandboxes) PodSandboxStatus(_ context.Context, id string, _ bool) (*runtimeapi.PodSandboxStatusResponse, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if found := r.list[id]; found != nil {
		return &runtimeapi.PodSandboxStatusResponse{Status: found}, nil
	}
	return nil, status.Error(codes.NotFound, id)
}

func (r *sandboxes) ListPodSandbox(context.Context, *runtimeapi.PodSandboxFilter) ([]*runtimeapi.PodSandbox, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var list []*runtimeapi.PodSandbox
	for id, one := range r.list {
		list = append(list, &runtimeapi.PodSandbox{Id: id, Metadata: one.Metadata})
	}
	return list, nil
}

func (r *sandboxes) Status(context.Context, bool) (*runtimeapi.StatusResponse, error) {
	return &runtimeapi.StatusResponse{Status: &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
		{Type: runtimeapi.RuntimeReady, Status: true}, {Type: runtimeapi.NetworkReady, Status: false},
	}}}, nil
}

// GetContainerEvents tells of every sandbox once, then fails.
func (r *sandboxes) GetContainerEvents(_ context.Context, events chan *runtimeapi.ContainerEventResponse, connected func(runtimeapi.RuntimeService_GetContainerEventsClient)) error {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	connected(nil)
	for id, one := range r.list {
		events <- &runtimeapi.ContainerEventResponse{
			ContainerId: id, ContainerEventType: runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT,
			PodSandboxStatus: proto.Clone(one).(*runtimeapi.PodSandboxStatus),
		}
	}
	events <- &runtimeapi.ContainerEventResponse{ContainerId: "without a sandbox"}
	return errEnded
}

var errEnded = errors.New("the stream has ended")

type scene struct {
	*testing.T
	server  *server
	runtime *sandboxes
	root    string
	stop    func()
}

func newScene(t *testing.T) *scene {
	s := &scene{T: t, server: &server{}, runtime: &sandboxes{list: map[string]*runtimeapi.PodSandboxStatus{}}, root: t.TempDir()}
	s.serve()
	return s
}

func (s *scene) serve() {
	listener, err := net.Listen("unix", filepath.Join(s.root, "kni.sock"))
	if err != nil {
		s.Fatal(err)
	}
	serving := grpc.NewServer()
	api.RegisterKNIServer(serving, s.server)
	go func() { _ = serving.Serve(listener) }()
	s.stop = serving.Stop
	s.Cleanup(serving.Stop)
}

// kubelet is a new process of it; the collection is left to the test.
func (s *scene) kubelet() *service {
	client, err := newClient("unix://" + filepath.Join(s.root, "kni.sock"))
	if err != nil {
		s.Fatal(err)
	}
	attempts, err := loadAttempts(filepath.Join(s.root, "attempts"))
	if err != nil {
		s.Fatal(err)
	}
	return &service{RuntimeService: s.runtime, client: client, attempts: attempts, readiness: readiness{grace: time.Minute}}
}

func (s *scene) files() int {
	entries, err := os.ReadDir(filepath.Join(s.root, "attempts"))
	if err != nil {
		s.Fatal(err)
	}
	return len(entries)
}

func (s *scene) calls(want ...string) {
	s.Helper()
	got := s.server.taken()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.Fatalf("calls %q, want %q", got, want)
	}
}

func config(uid string, attempt uint32) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata:    &runtimeapi.PodSandboxMetadata{Uid: uid, Name: "pod", Namespace: "default", Attempt: attempt},
		Annotations: map[string]string{netnsAnnotation: "/forged", "other": "kept"},
	}
}

func TestLife(t *testing.T) {
	s := newScene(t)
	kubelet := s.kubelet()
	ctx := context.Background()
	original := config("u", 0)
	id, err := kubelet.RunPodSandbox(ctx, original, "")
	if err != nil {
		t.Fatal(err)
	}
	s.calls("create u 0", "attach u-0 /run/netns/u")
	if original.Annotations[netnsAnnotation] != "/forged" {
		t.Error("the caller's annotations were changed")
	}
	if got := s.runtime.list[id].Annotations; got[netnsAnnotation] != "/run/netns/u" || got["other"] != "kept" {
		t.Errorf("the runtime has %v", got)
	}
	response, err := kubelet.PodSandboxStatus(ctx, id, false)
	if err != nil || response.Status.Network.Ip != "10.0.0.1" || response.Status.Network.AdditionalIps[0].Ip != "fd00::1" {
		t.Fatalf("%v %v", response, err)
	}
	s.calls()
	// Another process, and no network runtime: the last answer.
	s.stop()
	kubelet = s.kubelet()
	response, err = kubelet.PodSandboxStatus(ctx, id, false)
	if err != nil || response.Status.Network.Ip != "10.0.0.1" {
		t.Fatalf("%v %v", response, err)
	}
	s.serve()
	kubelet = s.kubelet()
	if err := kubelet.StopPodSandbox(ctx, id); err != nil {
		t.Fatal(err)
	}
	s.calls("detach u-0", `delete "u-0" /run/netns/u`)
	if s.files() != 0 {
		t.Error("an attempt is left")
	}
}

func TestAPodEndsWithoutTheNetworkRuntime(t *testing.T) {
	s := newScene(t)
	kubelet := s.kubelet()
	ctx := context.Background()
	var ids []string
	for _, uid := range []string{"a", "b"} {
		id, err := kubelet.RunPodSandbox(ctx, config(uid, 0), "")
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	s.server.taken()
	// The network runtime refuses: the kubelet tries again.
	s.server.detach = status.Error(codes.Internal, "refused")
	if kubelet.StopPodSandbox(ctx, ids[0]) == nil || kubelet.attempts.areStopped() {
		t.Fatal("what is refused is no success")
	}
	s.calls("detach a-0")
	s.server.detach = nil
	// It is away: the pod ends, and its network is noted, once.
	s.stop()
	for range 2 {
		if err := kubelet.StopPodSandbox(ctx, ids[0]); err != nil {
			t.Fatal("the pod hangs", err)
		}
	}
	// Its kubelet starts again, also one that has lost its folder.
	kubelet = s.kubelet()
	if !kubelet.attempts.areStopped() || s.files() != 2 || kubelet.collectOnce(ctx) == nil {
		t.Fatal("it is not noted")
	}
	if err := os.RemoveAll(filepath.Join(s.root, "attempts")); err != nil {
		t.Fatal(err)
	}
	kubelet = s.kubelet()
	if err := kubelet.StopPodSandbox(ctx, ids[0]); err != nil || s.files() != 1 {
		t.Fatal("the pod hangs", err, s.files())
	}
	// A sandbox that a call works on is left to the call.
	busy := &attempt{Key: key{UID: "b"}, Name: "pod", Namespace: "default", Sandbox: ids[1]}
	if _, err := kubelet.attempts.begin(busy); err != nil {
		t.Fatal(err)
	}
	if kubelet.StopPodSandbox(ctx, ids[1]) == nil || busy.Stopped {
		t.Fatal("a running attempt is noted as stopped")
	}
	kubelet.attempts.settle(busy)
	// Back: the network of the stopped sandbox is removed although the container runtime still has the sandbox, and only it.
	s.serve()
	kubelet = s.kubelet()
	if err := kubelet.collectOnce(ctx); err != nil {
		t.Fatal(err)
	}
	s.calls("detach a-0", `delete "a-0" `)
	if kubelet.attempts.areStopped() || s.files() != 1 {
		t.Fatal("it is still noted")
	}
}

func TestHostNetworkNeedsNoNetworkRuntime(t *testing.T) {
	s := newScene(t)
	s.stop()
	kubelet := s.kubelet()
	pod := config("h", 0)
	pod.Linux = &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
	}}
	id, err := kubelet.RunPodSandbox(context.Background(), pod, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, forged := s.runtime.list[id].Annotations[netnsAnnotation]; forged {
		t.Error("the author's annotation has reached the runtime")
	}
	if _, err := kubelet.PodSandboxStatus(context.Background(), id, false); err != nil {
		t.Error(err)
	}
	if err := kubelet.StopPodSandbox(context.Background(), id); err != nil {
		t.Error(err)
	}
}

func TestAFailedAttemptLeavesNothing(t *testing.T) {
	s := newScene(t)
	kubelet := s.kubelet()
	s.server.attach = status.Error(codes.ResourceExhausted, "no address is left")
	if _, err := kubelet.RunPodSandbox(context.Background(), config("u", 0), ""); err == nil {
		t.Fatal("attached")
	}
	s.calls("create u 0", "attach u-0 /run/netns/u", "detach u-0", `delete "u-0" /run/netns/u`)
	if len(s.runtime.list) != 0 || s.files() != 0 {
		t.Error("something is left")
	}
	// The next attempt waits.
	if _, err := kubelet.RunPodSandbox(context.Background(), config("u", 1), ""); err == nil {
		t.Fatal("attached")
	}
	s.calls()
	s.runtime.run = errors.New("no sandbox")
	if _, err := kubelet.RunPodSandbox(context.Background(), config("v", 0), ""); err == nil {
		t.Fatal("attached")
	}
	s.calls("create v 0", `delete "" /run/netns/v`)
	if s.files() != 0 {
		t.Error("an attempt is left")
	}
}

func TestAttemptsOfAKilledKubeletAreTakenBack(t *testing.T) {
	s := newScene(t)
	killed := s.kubelet()
	ctx := context.Background()
	begun := &attempt{Key: key{UID: "u"}, Name: "pod", Namespace: "default", Netns: "/run/netns/u"}
	if _, err := killed.attempts.begin(begun); err != nil {
		t.Fatal(err)
	}
	id, err := killed.RunPodSandbox(ctx, config("kept", 0), "")
	if err != nil {
		t.Fatal(err)
	}
	s.server.taken()
	kubelet := s.kubelet()
	if err := kubelet.collectOnce(ctx); err != nil {
		t.Fatal(err)
	}
	s.calls(`delete "" /run/netns/u`)
	// A later process that begins the same attempt before the collection takes the earlier one back, and keeps its own.
	killed = s.kubelet()
	if _, err := killed.attempts.begin(&attempt{Key: key{UID: "w"}, Netns: "/run/netns/old"}); err != nil {
		t.Fatal(err)
	}
	kubelet = s.kubelet()
	again, err := kubelet.RunPodSandbox(ctx, config("w", 0), "")
	if err != nil {
		t.Fatal(err)
	}
	s.calls(`delete "" /run/netns/old`, "create w 0", "attach w-0 /run/netns/w")
	for _, sandbox := range []string{id, again} {
		if err := kubelet.StopPodSandbox(ctx, sandbox); err != nil {
			t.Fatal(err)
		}
	}
	if s.files() != 0 {
		t.Error("an attempt is left")
	}
	// A sandbox that the runtime has lost.
	if _, err := kubelet.RunPodSandbox(ctx, config("lost", 0), ""); err != nil {
		t.Fatal(err)
	}
	s.server.taken()
	delete(s.runtime.list, "lost-0")
	if err := kubelet.collectOnce(ctx); err != nil {
		t.Fatal(err)
	}
	s.calls("detach lost-0", `delete "lost-0" /run/netns/lost`)
}

// The network runtime is away for longer than one attempt: what the first one left is taken back by its id, also after a
// kill of the kubelet.
func TestAnEarlierAttemptIsNotedUntilItIsTakenBack(t *testing.T) {
	s := newScene(t)
	away := status.Error(codes.Unavailable, "away")
	s.server.attach, s.server.detach = away, away
	run := func(kubelet *service) error {
		// The kubelet counts the sandboxes that the container runtime has, and the failed one is gone.
		kubelet.failures.end("a")
		_, err := kubelet.RunPodSandbox(context.Background(), config("a", 0), "")
		return err
	}
	kubelet := s.kubelet()
	if run(kubelet) == nil {
		t.Fatal("the attach must fail")
	}
	s.calls("create a 0", "attach a-0 /run/netns/a", "detach a-0")
	for range 2 {
		if run(kubelet) == nil {
			t.Fatal("the earlier attempt is not taken back yet")
		}
		s.calls("detach a-0")
	}
	kubelet = s.kubelet()
	if run(kubelet) == nil {
		t.Fatal("the earlier attempt is not taken back yet")
	}
	s.calls("detach a-0")
	s.server.attach, s.server.detach = nil, nil
	if err := run(kubelet); err != nil {
		t.Fatal(err)
	}
	s.calls("detach a-0", `delete "a-0" /run/netns/a`, "create a 0", "attach a-0 /run/netns/a")
	if err := kubelet.StopPodSandbox(context.Background(), "a-0"); err != nil || s.files() != 0 {
		t.Fatal(err, s.files())
	}
}

func TestAFileOfAnEarlierBootDoesNotKeepTheKubeletFromStarting(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "a-0.json")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadAttempts(folder); err == nil {
		t.Fatal("a file that cannot be read must be named")
	}
	if err := os.Chtimes(path, time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := loadAttempts(folder); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Fatal("the file stays", err)
	}
}

func TestAStopDoesNotEndARunningAttempt(t *testing.T) {
	s := newScene(t)
	kubelet := s.kubelet()
	one := &attempt{Key: key{UID: "a"}, Name: "pod", Namespace: "default"}
	if _, err := kubelet.attempts.begin(one); err != nil {
		t.Fatal(err)
	}
	if err := kubelet.attempts.change(one, func(one *attempt) { one.Sandbox = "a-0" }); err != nil {
		t.Fatal(err)
	}
	if err := kubelet.StopPodSandbox(context.Background(), "a-0"); err != nil {
		t.Fatal(err)
	}
	if s.files() != 1 || kubelet.attempts.byKey[one.Key] != one {
		t.Fatal("its record is gone")
	}
	kubelet.attempts.settle(one)
	if err := kubelet.StopPodSandbox(context.Background(), "a-0"); err != nil || s.files() != 0 {
		t.Fatal(err, s.files())
	}
}

func TestANamespaceThatWasNotAnsweredIsTakenBackByName(t *testing.T) {
	s := newScene(t)
	ctx := context.Background()
	if _, err := s.kubelet().attempts.begin(&attempt{Key: key{UID: "u"}, Name: "pod", Namespace: "default"}); err != nil {
		t.Fatal(err)
	}
	kubelet := s.kubelet()
	next := &attempt{Key: key{UID: "u", Attempt: 1}, Name: "pod", Namespace: "default"}
	if _, err := kubelet.attempts.begin(next); err != nil {
		t.Fatal(err)
	}
	// The namespace of the attempt that runs now has the same name.
	if err := kubelet.collectOnce(ctx); err != nil {
		t.Fatal(err)
	}
	s.calls()
	kubelet.attempts.settle(next)
	if kubelet.attempts.claim(attempt{Key: key{UID: "u"}, Netns: "/run/netns/u"}) != nil {
		t.Error("an attempt that has changed is taken back")
	}
	claimed := kubelet.attempts.claim(attempt{Key: key{UID: "u"}})
	if claimed == nil {
		t.Fatal("no call works on it")
	}
	if _, err := kubelet.attempts.begin(&attempt{Key: key{UID: "u", Attempt: 2}}); err == nil {
		t.Error("an attempt begins while another one of its pod is taken back")
	}
	kubelet.attempts.settle(claimed)
	if err := kubelet.collectOnce(ctx); err != nil {
		t.Fatal(err)
	}
	s.calls(`delete "" `, `delete "" `)
	if s.files() != 0 {
		t.Error("an attempt is left")
	}
}

func TestASandboxThatWasNotAnsweredTakesItsAttemptWithIt(t *testing.T) {
	s := newScene(t)
	killed := s.kubelet()
	ctx := context.Background()
	if _, err := killed.attempts.begin(&attempt{Key: key{UID: "u"}, Name: "pod", Namespace: "default", Netns: "/run/netns/u"}); err != nil {
		t.Fatal(err)
	}
	// The runtime has made the sandbox; the kubelet was killed before it knew.
	id, err := s.runtime.RunPodSandbox(ctx, config("u", 0), "")
	if err != nil {
		t.Fatal(err)
	}
	kubelet := s.kubelet()
	if err := kubelet.collectOnce(ctx); err != nil {
		t.Fatal(err)
	}
	s.calls()
	// The runtime would not remove the sandbox before its namespace.
	if err := kubelet.StopPodSandbox(ctx, id); err != nil {
		t.Fatal(err)
	}
	s.calls("detach u-0", `delete "u-0" /run/netns/u`)
	if s.files() != 0 {
		t.Error("an attempt is left")
	}
}

func TestEventsCarryTheAddresses(t *testing.T) {
	s := newScene(t)
	kubelet := s.kubelet()
	ctx := context.Background()
	if _, err := kubelet.RunPodSandbox(ctx, config("u", 0), ""); err != nil {
		t.Fatal(err)
	}
	onHost := config("h", 0)
	onHost.Linux = &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
	}}
	if _, err := kubelet.RunPodSandbox(ctx, onHost, ""); err != nil {
		t.Fatal(err)
	}
	// Of one that this kubelet has not noted the network runtime is asked, of a dead one it is not.
	for _, id := range []string{"asked", "dead"} {
		if _, err := s.runtime.RunPodSandbox(ctx, config(id, 0), ""); err != nil {
			t.Fatal(err)
		}
	}
	s.runtime.list["dead-0"].State = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	s.server.taken()
	events := make(chan *runtimeapi.ContainerEventResponse, 10)
	connections := 0
	err := kubelet.GetContainerEvents(ctx, events, func(runtimeapi.RuntimeService_GetContainerEventsClient) { connections++ })
	if !errors.Is(err, errEnded) || connections != 1 {
		t.Fatal(err, connections)
	}
	// All were passed on before the end was.
	close(events)
	got := map[string]string{}
	for event := range events {
		network := event.PodSandboxStatus.GetNetwork()
		addresses := network.GetIp()
		for _, more := range network.GetAdditionalIps() {
			addresses += " " + more.Ip
		}
		got[event.ContainerId] = addresses
	}
	both := "10.0.0.1 fd00::1"
	want := map[string]string{"u-0": both, "asked-0": both, "h-0": "", "dead-0": "", "without a sandbox": ""}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("events %v, want %v", got, want)
	}
	s.calls("query asked-0")
	// Without an answer an event arrives nevertheless.
	s.server.query = status.Error(codes.Internal, "no answer")
	events = make(chan *runtimeapi.ContainerEventResponse, 10)
	if err := kubelet.GetContainerEvents(ctx, events, func(runtimeapi.RuntimeService_GetContainerEventsClient) {}); !errors.Is(err, errEnded) {
		t.Fatal(err)
	}
	if len(events) != 5 {
		t.Errorf("%d events", len(events))
	}
}

func TestReadiness(t *testing.T) {
	s := newScene(t)
	kubelet := s.kubelet()
	ready := func() (bool, string) {
		response, err := kubelet.Status(context.Background(), false)
		if err != nil || len(response.Status.Conditions) != 2 {
			t.Fatalf("%v %v", response, err)
		}
		return response.Status.Conditions[0].Status, response.Status.Conditions[0].Reason
	}
	if ok, reason := ready(); ok || reason != "NoNetwork" {
		t.Error(ok, reason)
	}
	s.server.network = []*api.Network{{Name: "default", Ready: true}, {Name: "other"}}
	if ok, _ := ready(); !ok {
		t.Error("the first network decides")
	}
	s.stop()
	if ok, _ := ready(); !ok {
		t.Error("the grace period has not ended")
	}
	kubelet.readiness.answered = time.Now().Add(-2 * time.Minute)
	if ok, reason := ready(); ok || reason != "NetworkRuntimeUnavailable" {
		t.Error(ok, reason)
	}
	s.serve()
	s.server.network = []*api.Network{{Name: "default"}}
	time.Sleep(1500 * time.Millisecond)
	if ok, reason := ready(); ok || reason != "NetworkNotReady" {
		t.Error(ok, reason)
	}
}

func TestAnswersThatAreNoAddressesAreErrors(t *testing.T) {
	for _, ips := range [][]string{{"10.0.0.1/24"}, {"10.0.0.1", ""}, {"name"}} {
		if _, err := addressesOf(map[string]*api.IPConfig{"eth0": {Ip: ips}}, nil); err == nil {
			t.Errorf("%q", ips)
		}
	}
	none, err := addressesOf(nil, map[string]string{"none": "true"})
	if err != nil || !none.None {
		t.Error(none, err)
	}
}
