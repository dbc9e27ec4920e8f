package server

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/containerd/containerd/v2/pkg/netns"
)

// netnsAnnotation names the namespace that the kubelet has had made for a sandbox. A kubelet that knows it removes what a
// pod's author writes there; another kubelet does not, so nothing is believed of it that is not checked here.
const netnsAnnotation = "kni.dev/netns"

// namespacesInUse has the namespaces of sandboxes that are being made: the store of sandboxes gets one at the end.
var namespacesInUse = struct {
	sync.Mutex
	sandboxes map[uint64]string
}{sandboxes: map[uint64]string{}}

// useNamespace reserves a namespace for a sandbox that is being made; the sandbox that has it already, or itself.
func useNamespace(inode uint64, id string) string {
	namespacesInUse.Lock()
	defer namespacesInUse.Unlock()
	if other, used := namespacesInUse.sandboxes[inode]; used {
		return other
	}
	namespacesInUse.sandboxes[inode] = id
	return id
}

// madeSandbox ends what useNamespace began: the sandbox is in the store now, or there is none.
func madeSandbox(id string) {
	namespacesInUse.Lock()
	defer namespacesInUse.Unlock()
	for inode, user := range namespacesInUse.sandboxes {
		if user == id {
			delete(namespacesInUse.sandboxes, inode)
		}
	}
}

// kubeletMakesNetworks says whether pods get their networks from the kubelet and none from CNI.
func (c *criService) kubeletMakesNetworks() bool {
	return c.config.NamespaceDir != ""
}

func (c *criService) checkNamespaceDir() error {
	dir := c.config.NamespaceDir
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
		return fmt.Errorf("cni.pod_namespace_dir %q is not the absolute, clean path of a folder", dir)
	}
	return nil
}

// namespaceOfKubelet is the namespace that the kubelet names for a sandbox; nil if it names none.
func (c *criService) namespaceOfKubelet(id string, config *runtime.PodSandboxConfig, userNsEnabled bool) (*netns.NetNS, error) {
	path, named := config.GetAnnotations()[netnsAnnotation]
	if !named || !c.kubeletMakesNetworks() {
		return nil, nil
	}
	refuse := func(format string, arguments ...any) (*netns.NetNS, error) {
		metadata := config.GetMetadata()
		return nil, fmt.Errorf("pod %s/%s: annotation %s: %s", metadata.GetNamespace(), metadata.GetName(), netnsAnnotation, fmt.Sprintf(format, arguments...))
	}
	if userNsEnabled {
		return refuse("a pod with a user namespace has a network namespace that belongs to it")
	}
	if filepath.Clean(path) != path || filepath.Dir(path) != c.config.NamespaceDir {
		return refuse("%q is not in folder %s", path, c.config.NamespaceDir)
	}
	if resolved, err := filepath.EvalSymlinks(c.config.NamespaceDir); err != nil || resolved != c.config.NamespaceDir {
		return refuse("folder %s is a link, or missing (%v)", c.config.NamespaceDir, err)
	}
	inode, err := networkNamespace(path)
	if err != nil {
		return refuse("%q: %v", path, err)
	}
	// Where a security module hides the init process, containerd's own namespace is the one to compare with.
	own, err := networkNamespace("/proc/self/ns/net")
	if err != nil {
		return refuse("the namespace of the node: %v", err)
	}
	if init, err := networkNamespace("/proc/1/ns/net"); inode == own || (err == nil && inode == init) {
		return refuse("%q is the namespace of the node", path)
	}
	// Before the store is read, so that two sandboxes that are made at once do not miss each other.
	if user := useNamespace(inode, id); user != id {
		return refuse("%q is the namespace of sandbox %s", path, user)
	}
	for _, other := range c.sandboxStore.List() {
		if other.ID == id || other.NetNSPath == "" {
			continue
		}
		// Of a sandbox that is stopped the namespace may be gone; the name is compared nevertheless.
		used, err := networkNamespace(other.NetNSPath)
		if other.NetNSPath == path || (err == nil && used == inode) {
			madeSandbox(id)
			return refuse("%q is the namespace of sandbox %s", path, other.ID)
		}
	}
	return netns.LoadNetNS(path), nil
}

// networkNamespace identifies the network namespace that is mounted at a path, or why there is none. Links are not followed
// except in /proc, whose files are links of the kernel.
func networkNamespace(path string) (uint64, error) {
	flags := unix.O_RDONLY | unix.O_CLOEXEC
	if !strings.HasPrefix(path, "/proc/") {
		flags |= unix.O_NOFOLLOW
	}
	// A FIFO must not be waited for.
	file, err := unix.Open(path, flags|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(file)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(file, &fs); err != nil {
		return 0, err
	}
	if fs.Type != unix.NSFS_MAGIC {
		return 0, fmt.Errorf("no namespace is mounted there")
	}
	kind, err := unix.IoctlRetInt(file, unix.NS_GET_NSTYPE)
	if err != nil {
		return 0, err
	}
	if kind != unix.CLONE_NEWNET {
		return 0, fmt.Errorf("a namespace of another kind is mounted there")
	}
	var stat unix.Stat_t
	if err := unix.Fstat(file, &stat); err != nil {
		return 0, err
	}
	return stat.Ino, nil
}
