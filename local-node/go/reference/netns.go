package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Makes a network namespace and mounts it at path.
func makeNamespace(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return err
	}
	file.Close()
	done := make(chan error)
	go func() {
		// The thread ends with the goroutine, because it is never unlocked: no other code runs in the new namespace.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	if err := <-done; err != nil {
		os.Remove(path)
		return fmt.Errorf("make namespace %s: %w", path, err)
	}
	return nil
}

// Removes the name of a network namespace; succeeds if there is none.
func removeNamespace(path string) error {
	if !isNamespace(path) {
		return nil
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func isNamespace(path string) bool {
	var system unix.Statfs_t
	return unix.Statfs(path, &system) == nil && system.Type == unix.NSFS_MAGIC
}

// Makes the host forward packets between pods.
func forward() error {
	for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0o644); err != nil {
			return err
		}
	}
	return nil
}
