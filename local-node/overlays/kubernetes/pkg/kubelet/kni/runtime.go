// Package kni makes the networks of pods by the Kubernetes Networking Interface (KEP-4410), a gRPC service of the node.
//
// It is a CRI runtime service around another one: what the kubelet asks of sandboxes passes through it, so every path that
// starts, stops, lists or reports a sandbox is covered, and no code of the sync loops changes. Sandboxes in the node's network
// namespace pass unchanged.
package kni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	api "github.com/MikeZappa87/kni-api/pkg/apis/runtime/beta"
	"google.golang.org/protobuf/proto"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierror "k8s.io/cri-api/pkg/errors"
	"k8s.io/klog/v2"
)

const (
	// netnsAnnotation passes the path of the namespace to the container runtime. It belongs to the kubelet: what a pod's
	// author writes there is removed.
	netnsAnnotation = "kni.dev/netns"
	// primary is the interface whose addresses are the pod's.
	primary = "eth0"
	// Keys of extradata.
	extraNetns   = "netns"
	extraUID     = "podUID"
	extraAttempt = "attempt"
	// In answers: the pod has no address, as its author asked for.
	extraNone = "none"
	// How old an answer may be before it is asked for again.
	freshness = 10 * time.Second
	// How often attempts are compared with the sandboxes of the container runtime.
	collectPeriod = 30 * time.Second
	// The same while a sandbox is stopped whose network is still to be removed.
	stoppedPeriod = 5 * time.Second
)

// service is the runtime service with KNI.
type service struct {
	internalapi.RuntimeService
	client    *client
	attempts  *attempts
	readiness readiness
	failures  failures
	// Ends the pause of collect.
	wake chan struct{}
}

// Wrap returns a runtime service that makes the networks of pods by the network runtime at `endpoint`, or `inner` itself for
// an empty endpoint. State is kept in a folder of `root`, the kubelet's. A network runtime that does not answer is
// reported as not ready after `grace`.
func Wrap(ctx context.Context, inner internalapi.RuntimeService, endpoint string, grace time.Duration, root string) (internalapi.RuntimeService, error) {
	if endpoint == "" {
		return inner, nil
	}
	client, err := newClient(endpoint)
	if err != nil {
		return nil, err
	}
	attempts, err := loadAttempts(filepath.Join(root, "kni", "attempts"))
	if err != nil {
		return nil, errors.Join(err, client.close())
	}
	s := &service{RuntimeService: inner, client: client, attempts: attempts, readiness: readiness{grace: grace}, wake: make(chan struct{}, 1)}
	go s.collect(ctx)
	klog.FromContext(ctx).Info("Networks of pods are made by KNI", "endpoint", endpoint, "grace", grace)
	return s, nil
}

func (s *service) Close(ctx context.Context) error {
	return errors.Join(s.client.close(), s.RuntimeService.Close(ctx))
}

// RunPodSandbox makes the namespace, runs the sandbox in it and attaches it. An error leaves nothing: what cannot be taken
// back now is taken back by collect.
func (s *service) RunPodSandbox(ctx context.Context, original *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	config := proto.Clone(original).(*runtimeapi.PodSandboxConfig)
	delete(config.Annotations, netnsAnnotation)
	if isHostNetwork(config.GetLinux().GetSecurityContext().GetNamespaceOptions()) {
		return s.RuntimeService.RunPodSandbox(ctx, config, handler)
	}
	one := &attempt{
		Key:       key{UID: config.GetMetadata().GetUid(), Attempt: config.GetMetadata().GetAttempt()},
		Name:      config.GetMetadata().GetName(),
		Namespace: config.GetMetadata().GetNamespace(),
	}
	if err := s.failures.wait(one.Key.UID, time.Now()); err != nil {
		return "", err
	}
	earlier, err := s.attempts.begin(one)
	if err != nil {
		return "", err
	}
	defer s.attempts.settle(one)
	if earlier != nil {
		if err := s.release(ctx, *earlier); err != nil {
			return "", fmt.Errorf("an earlier attempt %s is not taken back: %w", one.Key, err)
		}
		if err := s.attempts.released(one); err != nil {
			return "", err
		}
	}
	id, err := s.run(ctx, one, config, handler)
	if err != nil {
		s.undo(ctx, one)
		// Without a sandbox the kubelet itself waits before the next attempt; one that has come and gone it notices at once.
		if one.Sandbox != "" {
			s.failures.add(one.Key.UID, err, time.Now())
		}
		return "", err
	}
	s.failures.end(one.Key.UID)
	return id, nil
}

func (s *service) run(ctx context.Context, one *attempt, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	annotations := config.GetAnnotations()
	// A namespace that belongs to the pod's user namespace can only be made by who makes that: the container runtime.
	userns := config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
	runtimeMakes := userns != nil && userns.GetMode() == runtimeapi.NamespaceMode_POD
	if !runtimeMakes {
		created, err := call(ctx, s.client, "CreateNetwork", createTimeout, &api.CreateNetworkRequest{
			Name: one.Name, Namespace: one.Namespace, Uid: one.Key.UID,
			Labels: config.Labels, Annotations: annotations, Extradata: one.extradata(""),
		}, s.client.stub.CreateNetwork)
		if err != nil {
			return "", err
		}
		path := created.GetNetnsPath()
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return "", fmt.Errorf("network runtime: CreateNetwork answers no absolute, clean path of a namespace: %q", path)
		}
		if err := s.attempts.change(one, func(one *attempt) { one.Netns = path }); err != nil {
			return "", err
		}
		given := make(map[string]string, len(annotations)+1)
		for key, value := range annotations {
			given[key] = value
		}
		given[netnsAnnotation] = path
		config.Annotations = given
	}
	id, err := s.RuntimeService.RunPodSandbox(ctx, config, handler)
	if err != nil {
		return "", err
	}
	if err := s.attempts.change(one, func(one *attempt) { one.Sandbox = id }); err != nil {
		return "", err
	}
	netns, err := s.namespaceOf(ctx, id)
	if err != nil {
		return "", err
	}
	switch {
	case runtimeMakes && netns == "":
		return "", errors.New("the container runtime does not say which network namespace it has made for the pod's user namespace (PodSandboxStatus, info)")
	case !runtimeMakes && netns != "" && netns != one.Netns:
		return "", fmt.Errorf("the container runtime has not used the pod's network namespace %s but %s: it does not take namespaces from the kubelet, or is not configured to", one.Netns, netns)
	case !runtimeMakes:
		netns = one.Netns
	}
	attached, err := call(ctx, s.client, "AttachInterface", attachTimeout, &api.AttachInterfaceRequest{
		Name: one.Name, Namespace: one.Namespace, Id: id,
		Isolation:    &api.Isolation{Path: netns, Type: "namespace"},
		DnsConfig:    dnsOf(config.DnsConfig),
		PortMappings: portsOf(config.PortMappings),
		Labels:       config.Labels,
		Annotations:  annotations,
		Extradata:    one.extradata(netns),
	}, s.client.stub.AttachInterface)
	if err != nil {
		return "", err
	}
	answer, err := addressesOf(attached.GetIpconfigs(), attached.GetExtradata())
	if err != nil {
		return "", fmt.Errorf("network runtime: AttachInterface: %w", err)
	}
	if !answer.known() {
		return "", fmt.Errorf("network runtime: AttachInterface answers no address of %s", primary)
	}
	err = s.attempts.change(one, func(one *attempt) {
		one.Addresses = answer
		one.asked = time.Now()
	})
	return id, err
}

// undo takes an attempt back after an error. The context of the attempt may have ended, which is no reason to leave
// something.
func (s *service) undo(ctx context.Context, one *attempt) {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if one.Sandbox != "" {
		if err := s.RuntimeService.StopPodSandbox(ctx, one.Sandbox); err != nil && !crierror.IsNotFound(err) {
			logger.Error(err, "Sandbox of a failed attempt is not stopped; its pod's next sync does it", "podSandboxID", one.Sandbox)
			return
		}
		if err := s.RuntimeService.RemovePodSandbox(ctx, one.Sandbox); err != nil && !crierror.IsNotFound(err) {
			logger.Error(err, "Sandbox of a failed attempt is not removed; its pod's next sync does it", "podSandboxID", one.Sandbox)
			return
		}
	} else if present, err := s.present(ctx); err != nil || present[one.Key] {
		// RunPodSandbox has failed for the kubelet, and the container runtime has, or may have, a sandbox.
		logger.Info("An attempt is taken back when its sandbox is gone", "attempt", one.Key, "err", err)
		return
	}
	if err := s.release(ctx, *one); err != nil {
		logger.Error(err, "Network of a failed attempt is not removed yet", "attempt", one.Key)
	}
}

// StopPodSandbox stops the sandbox, so that nothing uses the network any more, and then removes its network. A network runtime
// that does not answer keeps no pod from ending: what is left is noted, and removed by collect when the runtime is back.
func (s *service) StopPodSandbox(ctx context.Context, id string) error {
	one, attached := s.attempts.of(id)
	// An attempt that still runs is ended by its own call.
	one.busy = false
	if !attached {
		status, err := s.RuntimeService.PodSandboxStatus(ctx, id, false)
		if err != nil && !crierror.IsNotFound(err) {
			return err
		}
		// The pod of the network runtime itself is one of these, and must not wait for it.
		if err != nil || isHostNetwork(status.GetStatus().GetLinux().GetNamespaces().GetOptions()) {
			return s.RuntimeService.StopPodSandbox(ctx, id)
		}
		metadata := status.GetStatus().GetMetadata()
		// A sandbox of an attempt whose RunPodSandbox was not answered: the runtime removes it only after its namespace.
		found, err := s.attempts.adopt(key{UID: metadata.GetUid(), Attempt: metadata.GetAttempt()}, id)
		if err != nil {
			return err
		}
		if found != nil {
			one = *found
		} else {
			one = attempt{
				Key:  key{UID: metadata.GetUid(), Attempt: metadata.GetAttempt()},
				Name: metadata.GetName(), Namespace: metadata.GetNamespace(), Sandbox: id,
			}
		}
	}
	if err := s.RuntimeService.StopPodSandbox(ctx, id); err != nil {
		return err
	}
	err := s.release(ctx, one)
	if err == nil || !isAway(err) {
		return err
	}
	noted, failed := s.attempts.stop(one)
	if !noted {
		return errors.Join(err, failed)
	}
	klog.FromContext(ctx).Info("Sandbox is stopped; its network is removed when the network runtime answers", "podSandboxID", id, "pod", klog.KRef(one.Namespace, one.Name), "err", err)
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return nil
}

// RemovePodSandbox removes a sandbox whose network is gone.
func (s *service) RemovePodSandbox(ctx context.Context, id string) error {
	if one, attached := s.attempts.of(id); attached {
		one.busy = false
		if err := s.release(ctx, one); err != nil {
			return err
		}
	}
	return s.RuntimeService.RemovePodSandbox(ctx, id)
}

// release removes the network of an attempt, and forgets it.
func (s *service) release(ctx context.Context, one attempt) error {
	if one.Sandbox != "" {
		_, err := call(ctx, s.client, "DetachInterface", teardownTimeout, &api.DetachInterfaceRequest{
			Name: one.Name, Namespace: one.Namespace, Id: one.Sandbox, Extradata: one.extradata(""),
		}, s.client.stub.DetachInterface)
		if err != nil {
			return err
		}
	}
	// Without a sandbox and a namespace by the pod's name: CreateNetwork may have made one without an answer to the kubelet.
	_, err := call(ctx, s.client, "DeleteNetwork", teardownTimeout, &api.DeleteNetworkRequest{
		Name: one.Name, Namespace: one.Namespace, Id: one.Sandbox, NetnsPath: one.Netns, Extradata: one.extradata(""),
	}, s.client.stub.DeleteNetwork)
	if err != nil {
		return err
	}
	return s.attempts.end(one)
}

// collect takes back attempts of which the container runtime has no sandbox: the kubelet was killed between two steps, or
// the runtime has lost it. The list of sandboxes decides and never the age. It also removes the networks of sandboxes that were
// stopped while the network runtime did not answer.
func (s *service) collect(ctx context.Context) {
	logger := klog.FromContext(ctx)
	for {
		if err := s.collectOnce(ctx); err != nil {
			logger.Error(err, "Networks of attempts that have ended are not removed; trying again")
		}
		pause := collectPeriod
		if s.attempts.areStopped() {
			pause = stoppedPeriod
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
			// The network runtime has just not answered.
			select {
			case <-ctx.Done():
				return
			case <-time.After(stoppedPeriod):
			}
		case <-time.After(pause):
		}
	}
}

func (s *service) collectOnce(ctx context.Context) error {
	// Before the list: an attempt that begins afterwards is not in it.
	idle := s.attempts.idle()
	if len(idle) == 0 {
		return nil
	}
	present, err := s.present(ctx)
	if err != nil {
		return err
	}
	var failed []error
	for _, one := range idle {
		if present[one.Key] && !one.Stopped {
			continue
		}
		claimed := s.attempts.claim(one)
		if claimed == nil {
			continue
		}
		klog.FromContext(ctx).Info("An attempt has no sandbox, or a stopped one; removing its network", "attempt", one.Key, "pod", klog.KRef(one.Namespace, one.Name), "netns", one.Netns)
		failed = append(failed, s.release(ctx, *claimed))
		s.attempts.settle(claimed)
	}
	return errors.Join(failed...)
}

// present is the set of attempts of which the container runtime has a sandbox.
func (s *service) present(ctx context.Context) (map[key]bool, error) {
	sandboxes, err := s.RuntimeService.ListPodSandbox(ctx, nil)
	if err != nil {
		return nil, err
	}
	present := map[key]bool{}
	for _, sandbox := range sandboxes {
		present[key{UID: sandbox.GetMetadata().GetUid(), Attempt: sandbox.GetMetadata().GetAttempt()}] = true
	}
	return present, nil
}

// namespaceOf is the network namespace of a sandbox as the container runtime's verbose status has it; empty where it has
// none.
func (s *service) namespaceOf(ctx context.Context, id string) (string, error) {
	response, err := s.RuntimeService.PodSandboxStatus(ctx, id, true)
	if err != nil {
		return "", err
	}
	var info struct {
		RuntimeSpec struct {
			Linux struct {
				Namespaces []struct{ Type, Path string }
			}
		}
	}
	text, ok := response.GetInfo()["info"]
	if !ok {
		return "", nil
	}
	if err := json.Unmarshal([]byte(text), &info); err != nil {
		return "", fmt.Errorf("the verbose status of sandbox %s: %w", id, err)
	}
	for _, namespace := range info.RuntimeSpec.Linux.Namespaces {
		if namespace.Type == "network" {
			return namespace.Path, nil
		}
	}
	return "", nil
}

func (one *attempt) extradata(netns string) map[string]string {
	extra := map[string]string{}
	if one.Key.UID != "" {
		extra[extraUID] = one.Key.UID
		extra[extraAttempt] = strconv.FormatUint(uint64(one.Key.Attempt), 10)
	}
	if netns != "" {
		extra[extraNetns] = netns
	}
	return extra
}

func isHostNetwork(options *runtimeapi.NamespaceOption) bool {
	return options.GetNetwork() == runtimeapi.NamespaceMode_NODE
}

func dnsOf(dns *runtimeapi.DNSConfig) *api.DNSConfig {
	return &api.DNSConfig{Servers: dns.GetServers(), Searches: dns.GetSearches(), Options: dns.GetOptions()}
}

func portsOf(ports []*runtimeapi.PortMapping) []*api.PortMapping {
	list := make([]*api.PortMapping, 0, len(ports))
	for _, port := range ports {
		list = append(list, &api.PortMapping{
			Protocol: api.Protocol(port.GetProtocol()), ContainerPort: port.GetContainerPort(),
			HostPort: port.GetHostPort(), HostIp: port.GetHostIp(),
		})
	}
	return list
}
