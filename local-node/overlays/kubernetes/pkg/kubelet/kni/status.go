package kni

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	api "github.com/MikeZappa87/kni-api/pkg/apis/runtime/beta"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"
)

// PodSandboxStatus is the container runtime's, with the addresses that the network runtime has given.
func (s *service) PodSandboxStatus(ctx context.Context, id string, verbose bool) (*runtimeapi.PodSandboxStatusResponse, error) {
	response, err := s.RuntimeService.PodSandboxStatus(ctx, id, verbose)
	if err != nil {
		return response, err
	}
	if err := s.report(ctx, response.GetStatus()); err != nil {
		return nil, err
	}
	return response, nil
}

// GetContainerEvents adds the addresses to the sandboxes of the events.
func (s *service) GetContainerEvents(ctx context.Context, events chan *runtimeapi.ContainerEventResponse, connected func(runtimeapi.RuntimeService_GetContainerEventsClient)) error {
	raw := make(chan *runtimeapi.ContainerEventResponse, cap(events))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for event := range raw {
			if err := s.report(ctx, event.GetPodSandboxStatus()); err != nil {
				klog.FromContext(ctx).V(2).Info("An event of a sandbox has no addresses", "podSandboxID", event.GetPodSandboxStatus().GetId(), "err", err)
			}
			events <- event
		}
	}()
	err := s.RuntimeService.GetContainerEvents(ctx, raw, connected)
	close(raw)
	<-done
	return err
}

// report fills in the addresses of a ready sandbox. Dead ones and those in the node's namespace are not asked for. An error
// means that nothing is known: the kubelet then keeps what it knew of the pod.
func (s *service) report(ctx context.Context, status *runtimeapi.PodSandboxStatus) error {
	if status == nil || status.GetState() != runtimeapi.PodSandboxState_SANDBOX_READY || isHostNetwork(status.GetLinux().GetNamespaces().GetOptions()) {
		return nil
	}
	answer, err := s.addresses(ctx, status)
	if err != nil {
		return err
	}
	if answer.None {
		// The kubelet replaces a sandbox that has an empty address, and keeps one without a network status.
		status.Network = nil
		return nil
	}
	status.Network = &runtimeapi.PodSandboxNetworkStatus{}
	for position, ip := range answer.IPs {
		if position == 0 {
			status.Network.Ip = ip
		} else {
			status.Network.AdditionalIps = append(status.Network.AdditionalIps, &runtimeapi.PodIP{Ip: ip})
		}
	}
	return nil
}

// addresses of a sandbox: the last answer if it is fresh or the network runtime is away, otherwise a new one.
func (s *service) addresses(ctx context.Context, status *runtimeapi.PodSandboxStatus) (addresses, error) {
	one, attached := s.attempts.of(status.GetId())
	if attached && (one.busy || one.Addresses.known() && time.Since(one.asked) < freshness) {
		return one.Addresses, nil
	}
	asked := time.Now()
	if attached && one.Addresses.known() && !s.readiness.mayAsk(asked) {
		return one.Addresses, nil
	}
	response, err := call(ctx, s.client, "QueryPodNetwork", queryTimeout, &api.QueryPodNetworkRequest{
		Id: status.GetId(), Name: status.GetMetadata().GetName(), Namespace: status.GetMetadata().GetNamespace(),
	}, s.client.stub.QueryPodNetwork)
	if err != nil {
		if isAway(err) {
			s.readiness.silent(asked)
		}
		s.attempts.answered(status.GetId(), asked, nil)
		if attached && one.Addresses.known() {
			return one.Addresses, nil
		}
		return addresses{}, err
	}
	answer, err := addressesOf(response.GetIpconfigs(), response.GetExtradata())
	if err != nil {
		return addresses{}, fmt.Errorf("network runtime: QueryPodNetwork: sandbox %s: %w", status.GetId(), err)
	}
	s.attempts.answered(status.GetId(), asked, &answer)
	return answer, nil
}

func addressesOf(configs map[string]*api.IPConfig, extradata map[string]string) (addresses, error) {
	answer := addresses{None: extradata[extraNone] == "true"}
	for _, ip := range configs[primary].GetIp() {
		if _, err := netip.ParseAddr(ip); err != nil {
			return addresses{}, fmt.Errorf("address of %s: %w", primary, err)
		}
		answer.IPs = append(answer.IPs, ip)
	}
	if len(answer.IPs) > 0 {
		answer.None = false
	}
	return answer, nil
}

// Status is the container runtime's, with the readiness of the network runtime instead of its own network's.
func (s *service) Status(ctx context.Context, verbose bool) (*runtimeapi.StatusResponse, error) {
	response, err := s.RuntimeService.Status(ctx, verbose)
	if err != nil || response.GetStatus() == nil {
		return response, err
	}
	condition := s.networkReady(ctx)
	conditions := []*runtimeapi.RuntimeCondition{condition}
	for _, other := range response.Status.Conditions {
		if other.GetType() != runtimeapi.NetworkReady {
			conditions = append(conditions, other)
		}
	}
	response.Status.Conditions = conditions
	return response, nil
}

func (s *service) networkReady(ctx context.Context) *runtimeapi.RuntimeCondition {
	asked := time.Now()
	response, err := call(ctx, s.client, "QueryNodeNetworks", queryTimeout, &api.QueryNodeNetworksRequest{}, s.client.stub.QueryNodeNetworks)
	if err != nil {
		return s.readiness.without(time.Now(), err)
	}
	return s.readiness.with(asked, response.GetNetworks())
}

// readiness remembers what the network runtime has said of itself.
type readiness struct {
	grace time.Duration

	mutex sync.Mutex
	// The last answer and when it came.
	last     *runtimeapi.RuntimeCondition
	answered time.Time
	// When a call was last in vain.
	failed time.Time
}

// with is the condition of an answer: the first network decides.
func (r *readiness) with(now time.Time, networks []*api.Network) *runtimeapi.RuntimeCondition {
	condition := &runtimeapi.RuntimeCondition{Type: runtimeapi.NetworkReady, Status: true}
	switch {
	case len(networks) == 0:
		condition = notReady("NoNetwork", "the network runtime has no network")
	case !networks[0].GetReady():
		reason := networks[0].GetExtradata()["reason"]
		if reason == "" {
			reason = "no reason given"
		}
		condition = notReady("NetworkNotReady", fmt.Sprintf("network %q of the network runtime is not ready: %s", networks[0].GetName(), reason))
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.last, r.answered, r.failed = condition, now, time.Time{}
	return condition
}

// without is the condition while the network runtime does not answer: what it said last for the grace period, so that an
// upgrade takes no pod out of its Services, and not ready afterwards or if it has never answered this kubelet.
func (r *readiness) without(now time.Time, err error) *runtimeapi.RuntimeCondition {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.failed = now
	if r.last == nil {
		return notReady("NetworkRuntimeUnavailable", fmt.Sprintf("the network runtime has not answered yet: %v", err))
	}
	silence := now.Sub(r.answered)
	if silence <= r.grace {
		return r.last
	}
	return notReady("NetworkRuntimeUnavailable", fmt.Sprintf("the network runtime has not answered for %s: %v", silence.Round(time.Second), err))
}

// silent notes that a call was in vain.
func (r *readiness) silent(now time.Time) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.failed = now
}

// mayAsk limits what the sync loops wait for while the network runtime hangs: one call in vain in five seconds, for all
// sandboxes together.
func (r *readiness) mayAsk(now time.Time) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.failed.IsZero() || now.Sub(r.failed) > 5*time.Second
}

func notReady(reason, message string) *runtimeapi.RuntimeCondition {
	return &runtimeapi.RuntimeCondition{Type: runtimeapi.NetworkReady, Status: false, Reason: reason, Message: message}
}
