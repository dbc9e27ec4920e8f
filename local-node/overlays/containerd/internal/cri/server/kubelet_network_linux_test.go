package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"

	sandboxstore "github.com/containerd/containerd/v2/internal/cri/store/sandbox"
	"github.com/containerd/containerd/v2/pkg/netns"
)

// newNamespace mounts a network namespace in a folder until the test ends, for which the test needs root.
func newNamespace(t *testing.T, folder string) string {
	t.Helper()
	made, err := netns.NewNetNS(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = made.Remove() })
	return made.GetPath()
}

// bind mounts a file at another one.
func bind(t *testing.T, from, at string) string {
	t.Helper()
	if err := os.WriteFile(at, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	return at
}

func podNaming(path string) *runtime.PodSandboxConfig {
	return &runtime.PodSandboxConfig{
		Metadata:    &runtime.PodSandboxMetadata{Name: "forger", Namespace: "theirs"},
		Annotations: map[string]string{netnsAnnotation: path},
	}
}

func TestNamespacesOfOthersAreRefused(t *testing.T) {
	folder, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	service := newTestCRIService()
	service.config.NamespaceDir = folder
	in := func(name string) string { return filepath.Join(folder, name) }
	free, used := newNamespace(t, folder), newNamespace(t, folder)
	for _, other := range []sandboxstore.Metadata{
		{ID: "other", NetNSPath: used}, {ID: "on-host"}, {ID: "stopped", NetNSPath: in("gone")},
	} {
		if err := service.sandboxStore.Add(sandboxstore.Sandbox{Metadata: other}); err != nil {
			t.Fatal(err)
		}
	}
	bind(t, used, in("used-again"))
	bind(t, "/proc/self/ns/net", in("host"))
	bind(t, "/proc/self/ns/uts", in("uts"))
	// The path of a stopped sandbox, where somebody has mounted another namespace.
	bind(t, newNamespace(t, folder), in("gone"))
	for _, err := range []error{
		os.Mkdir(in("sub"), 0o700), os.WriteFile(in("file"), nil, 0o600), unix.Mkfifo(in("fifo"), 0o600),
		os.Symlink(free, in("link")), os.Symlink("/proc/self/ns/net", in("host-link")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	below := newNamespace(t, in("sub"))
	for path, why := range map[string]string{
		used:                       "is the namespace of sandbox other",
		in("used-again"):           "is the namespace of sandbox other",
		in("gone"):                 "is the namespace of sandbox stopped",
		in("host"):                 "is the namespace of the node",
		in("uts"):                  "a namespace of another kind is mounted there",
		in("sub"):                  "no namespace is mounted there",
		in("file"):                 "no namespace is mounted there",
		in("fifo"):                 "no namespace is mounted there",
		in("link"):                 "too many levels of symbolic links",
		in("host-link"):            "too many levels of symbolic links",
		in("made-up"):              "no such file or directory",
		below:                      "is not in folder " + folder,
		folder + "/sub/../made-up": "is not in folder " + folder,
		folder + "/./made-up":      "is not in folder " + folder,
		"/proc/self/ns/net":        "is not in folder " + folder,
		"/proc/1/ns/net":           "is not in folder " + folder,
		filepath.Base(free):        "is not in folder " + folder,
		folder:                     "is not in folder " + folder,
		"":                         "is not in folder " + folder,
		folder + "-2/" + "made-up": "is not in folder " + folder,
		folder + "/":               "is not in folder " + folder,
	} {
		given, err := service.namespaceOfKubelet("own", podNaming(path), false)
		if given != nil || err == nil {
			t.Errorf("%q is accepted: %v", path, given)
			continue
		}
		for _, part := range []string{why, "pod theirs/forger", netnsAnnotation} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q: %q has no %q", path, err, part)
			}
		}
	}
	if _, err := service.namespaceOfKubelet("own", podNaming(free), true); err == nil || !strings.Contains(err.Error(), "user namespace") {
		t.Errorf("a pod with a user namespace: %v", err)
	}
	given, err := service.namespaceOfKubelet("own", podNaming(free), false)
	if err != nil || given.GetPath() != free {
		t.Errorf("%q is not accepted: %v", free, err)
	}
	// The store does not have a sandbox that is being made.
	if _, err := service.namespaceOfKubelet("at-once", podNaming(free), false); err == nil || !strings.Contains(err.Error(), "is the namespace of sandbox own") {
		t.Errorf("two sandboxes have %q: %v", free, err)
	}
	madeSandbox("own")
	if _, err := service.namespaceOfKubelet("at-once", podNaming(free), false); err != nil {
		t.Errorf("%q is not accepted when nobody has it any more: %v", free, err)
	}
	madeSandbox("at-once")
	// A sandbox that is run again is not in its own way.
	given, err = service.namespaceOfKubelet("other", podNaming(used), false)
	if err != nil || given.GetPath() != used {
		t.Errorf("%q is not accepted for its own sandbox: %v", used, err)
	}
	if given, err := service.namespaceOfKubelet("own", &runtime.PodSandboxConfig{}, false); given != nil || err != nil {
		t.Errorf("no namespace is named: %v %v", given, err)
	}
	// With CNI the annotation has no meaning.
	service.config.NamespaceDir = ""
	if given, err := service.namespaceOfKubelet("own", podNaming(used), false); given != nil || err != nil {
		t.Errorf("by CNI: %v %v", given, err)
	}
}

func TestTheFolderOfNamespacesIsNoLink(t *testing.T) {
	folder, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	service := newTestCRIService()
	service.config.NamespaceDir = filepath.Join(folder, "link")
	inside := newNamespace(t, filepath.Join(folder, "real"))
	if err := os.Symlink("real", service.config.NamespaceDir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(service.config.NamespaceDir, filepath.Base(inside))
	if _, err := service.namespaceOfKubelet("own", podNaming(path), false); err == nil || !strings.Contains(err.Error(), "is a link") {
		t.Errorf("%q: %v", path, err)
	}
	for dir, valid := range map[string]bool{"/run/netns": true, "run/netns": false, "/run//netns": false, "/run/netns/": false, "/": false, "/run/..": false} {
		service.config.NamespaceDir = dir
		if err := service.checkNamespaceDir(); (err == nil) != valid {
			t.Errorf("pod_namespace_dir %q: %v", dir, err)
		}
	}
}
