package netns

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Needs root.
func TestNamespacesOfOthersStay(t *testing.T) {
	folder := t.TempDir()
	own, err := NewNetNS(folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = own.Remove() })
	theirs := filepath.Join(folder, "kni-1")
	if err := os.WriteFile(theirs, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(own.GetPath(), theirs, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(theirs, unix.MNT_DETACH) })
	other := LoadNetNS(theirs)
	if err := other.Remove(); err != nil {
		t.Fatal(err)
	}
	if closed, err := other.Closed(); err != nil || closed {
		t.Errorf("the namespace of somebody else is gone: %v %v", closed, err)
	}
	if err := unix.Unmount(theirs, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	// A file is left, as where its owner has unmounted the namespace and not removed the file yet.
	if closed, err := other.Closed(); err != nil || !closed {
		t.Errorf("it is not closed: %v %v", closed, err)
	}
	if _, err := os.Stat(theirs); err != nil {
		t.Errorf("its file was removed: %v", err)
	}
	if err := own.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(own.GetPath()); !os.IsNotExist(err) {
		t.Errorf("a namespace of this package is left: %v", err)
	}
}
