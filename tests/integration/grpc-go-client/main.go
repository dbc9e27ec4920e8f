// Command grpc-go-client calls KNI through the real grpc-go, dialing a bare socket path as the kubelet does.
//
// Argument: the path of the socket. Each line of standard input is a call: "/package.Service/Method HEX", with the
// encoded message. Each line of standard output is its response: "ok HEX" or "error CODE TEXT". The calls share one
// connection.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// rawCodec passes messages unchanged, so that no generated code is needed. It has the name of the codec that it
// replaces, because the name becomes part of the content type.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func (rawCodec) Name() string { return "proto" }

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("usage: grpc-go-client SOCKET")
	}
	connection, err := connect(args[0])
	if err != nil {
		return err
	}
	defer connection.Close()
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 8<<20)
	for lines.Scan() {
		method, message, _ := strings.Cut(lines.Text(), " ")
		request, err := hex.DecodeString(message)
		if err != nil {
			return err
		}
		fmt.Println(call(connection, method, request))
	}
	return lines.Err()
}

// Dial is deprecated in newer versions, but it is what the kubelet calls, and what makes the path the authority.
func connect(socket string) (*grpc.ClientConn, error) {
	return grpc.Dial(socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", address)
		}))
}

func call(connection *grpc.ClientConn, method string, request []byte) string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var answer []byte
	if err := connection.Invoke(ctx, method, &request, &answer, grpc.ForceCodec(rawCodec{})); err != nil {
		state := status.Convert(err)
		return fmt.Sprintf("error %s %q", state.Code(), state.Message())
	}
	return "ok " + hex.EncodeToString(answer)
}
