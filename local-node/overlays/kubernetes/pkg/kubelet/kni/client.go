package kni

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	api "github.com/MikeZappa87/kni-api/pkg/apis/runtime/beta"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Deadlines of the calls. The kubelet repeats what fails, so none needs to be longer than a network runtime that works
// takes in the worst case.
const (
	createTimeout   = 10 * time.Second
	attachTimeout   = 60 * time.Second
	teardownTimeout = 60 * time.Second
	// Of calls whose answers the sync loops wait for.
	queryTimeout = 2 * time.Second
	// Of cleaning up after an attempt whose own context may have ended.
	undoTimeout = 90 * time.Second
)

// Answers are small: a response above this size is an error and not a reason to allocate memory.
const maxMessageSize = 1 << 20

// socketPath of an endpoint that validation has accepted.
func socketPath(endpoint string) (string, error) {
	path := strings.TrimPrefix(endpoint, "unix://")
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("networkRuntimeEndpoint %q is no absolute path of a unix socket", endpoint)
	}
	return path, nil
}

// client calls the network runtime. Every call has a deadline, and an error names the call and the endpoint.
type client struct {
	path       string
	connection *grpc.ClientConn
	stub       api.KNIClient
}

// newClient does not connect: the socket may be absent now and at any later time.
func newClient(endpoint string) (*client, error) {
	path, err := socketPath(endpoint)
	if err != nil {
		return nil, err
	}
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
	retry := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}
	connection, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: queryTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageSize)),
	)
	if err != nil {
		return nil, fmt.Errorf("network runtime endpoint %q: %w", endpoint, err)
	}
	// A kubelet without a pod to attach connects too, so that the first one does not wait.
	connection.Connect()
	return &client{path: path, connection: connection, stub: api.NewKNIClient(connection)}, nil
}

func (c *client) close() error {
	return c.connection.Close()
}

// call runs one request with its deadline.
func call[Request, Response any](
	ctx context.Context, c *client, name string, timeout time.Duration, request Request,
	method func(context.Context, Request, ...grpc.CallOption) (Response, error), options ...grpc.CallOption,
) (Response, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	response, err := method(ctx, request, options...)
	if err != nil {
		return response, c.explain(name, err)
	}
	return response, nil
}

// explain says what failed in words for an event of the pod. The status of gRPC stays available to status.Code.
func (c *client) explain(name string, err error) error {
	switch status.Code(err) {
	case codes.Unavailable:
		if _, missing := os.Stat(c.path); os.IsNotExist(missing) {
			return fmt.Errorf("network runtime is not running: %s: no socket %s: %w", name, c.path, err)
		}
		return fmt.Errorf("network runtime does not answer: %s at %s: %w", name, c.path, err)
	case codes.DeadlineExceeded:
		return fmt.Errorf("network runtime does not answer in time: %s at %s: %w", name, c.path, err)
	default:
		return fmt.Errorf("network runtime: %s: %w", name, err)
	}
}

// isAway tells an error of the connection, or a runtime that does not answer, from a refusal.
func isAway(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return true
	default:
		return false
	}
}
