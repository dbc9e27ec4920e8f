package kni

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// key identifies an attempt to run a pod: the kubelet counts the sandboxes of a pod.
type key struct {
	UID     string
	Attempt uint32
}

func (k key) String() string {
	return fmt.Sprintf("%s-%d", k.UID, k.Attempt)
}

// addresses is what the network runtime has answered for the pod's interface.
type addresses struct {
	// IPs of eth0, in the order of the network runtime.
	IPs []string `json:"ips,omitempty"`
	// The pod is attached and has no address, as its author asked for.
	None bool `json:"none,omitempty"`
}

func (a addresses) known() bool {
	return len(a.IPs) > 0 || a.None
}

// attempt is what the kubelet must know to take an attempt back, in this or a later process. It is written before its
// effects and removed after their undo.
type attempt struct {
	Key       key       `json:"key"`
	Name      string    `json:"name"`
	Namespace string    `json:"namespace"`
	Netns     string    `json:"netns,omitempty"`
	Sandbox   string    `json:"sandbox,omitempty"`
	Addresses addresses `json:"addresses"`
	// The sandbox is stopped for good, and its network is still to be removed: the network runtime did not answer.
	Stopped bool `json:"stopped,omitempty"`

	// Until RunPodSandbox has returned, nobody else touches the attempt.
	busy bool
	// When the addresses were last asked for, whether in vain or not.
	asked time.Time
}

// attempts keeps each attempt in a file of its own, so that a write costs the same with any number of pods.
type attempts struct {
	folder string

	mutex     sync.Mutex
	byKey     map[key]*attempt
	bySandbox map[string]*attempt
}

// loadAttempts reads what an earlier process has left. A file that is no attempt is an error that names it, because its
// sandbox would not be taken down; one from before the machine started is removed: no namespace is older than that, and a
// crash of the machine may have left an empty file.
func loadAttempts(folder string) (*attempts, error) {
	loaded := &attempts{folder: folder, byKey: map[key]*attempt{}, bySandbox: map[string]*attempt{}}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("attempts to attach pods: %w", err)
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("attempts to attach pods: %w", err)
	}
	for _, entry := range entries {
		path := filepath.Join(folder, entry.Name())
		if !strings.HasSuffix(entry.Name(), ".json") {
			// A process that died while it wrote has left it; the attempt did not begin.
			_ = os.Remove(path)
			continue
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("attempt to attach a pod: %w", err)
		}
		one := &attempt{}
		if err := json.Unmarshal(content, one); err != nil || one.Key.UID == "" {
			if isOfEarlierBoot(entry) {
				_ = os.Remove(path)
				continue
			}
			return nil, fmt.Errorf("attempt to attach a pod: %s: %w; remove the file when its pod is gone", path,
				errors.Join(err, errors.New("not an attempt")))
		}
		loaded.byKey[one.Key] = one
		if one.Sandbox != "" {
			loaded.bySandbox[one.Sandbox] = one
		}
	}
	return loaded, nil
}

// isOfEarlierBoot tells whether a file was written before the machine started.
func isOfEarlierBoot(entry os.DirEntry) bool {
	var system unix.Sysinfo_t
	info, err := entry.Info()
	if err != nil || unix.Sysinfo(&system) != nil {
		return false
	}
	// The kernel counts whole seconds.
	started := time.Now().Add(-time.Duration(system.Uptime+1) * time.Second)
	return info.ModTime().Before(started)
}

// begin notes a new attempt; an earlier one of the same number that left something is returned beside it, and what it left
// stays noted until released. Attempts of one pod follow each other: what is taken back by the pod's name must not be that of
// another attempt.
func (a *attempts) begin(one *attempt) (earlier *attempt, err error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if busy := a.busyOf(one.Key.UID); busy != nil {
		return nil, fmt.Errorf("attempt %s of pod %s/%s is still running, or being taken back", busy.Key, one.Namespace, one.Name)
	}
	if before := a.byKey[one.Key]; before != nil {
		copied := *before
		earlier = &copied
		one.Netns, one.Sandbox = before.Netns, before.Sandbox
	}
	one.busy = true
	if err := a.write(one); err != nil {
		return nil, err
	}
	a.byKey[one.Key] = one
	if one.Sandbox != "" {
		a.bySandbox[one.Sandbox] = one
	}
	return earlier, nil
}

// released removes what an earlier attempt of the same number left from a new one.
func (a *attempts) released(one *attempt) error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	delete(a.bySandbox, one.Sandbox)
	one.Netns, one.Sandbox, one.Stopped = "", "", false
	return a.write(one)
}

// change writes an attempt after `apply`.
func (a *attempts) change(one *attempt, apply func(*attempt)) error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	apply(one)
	if one.Sandbox != "" {
		a.bySandbox[one.Sandbox] = one
	}
	return a.write(one)
}

// busyOf is the attempt of a pod that a call works on.
func (a *attempts) busyOf(uid string) *attempt {
	for key, one := range a.byKey {
		if key.UID == uid && one.busy {
			return one
		}
	}
	return nil
}

// claim makes the caller the only one that touches an attempt, until settle; nil where a call works on one of its pod, or the
// attempt is no longer as it was seen.
func (a *attempts) claim(seen attempt) *attempt {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	one := a.byKey[seen.Key]
	if one == nil || a.busyOf(seen.Key.UID) != nil || one.Netns != seen.Netns || one.Sandbox != seen.Sandbox {
		return nil
	}
	one.busy = true
	return one
}

// settle lets others touch the attempt.
func (a *attempts) settle(one *attempt) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	one.busy = false
}

// end forgets an attempt of which nothing is left; not a later one of the same number.
func (a *attempts) end(gone attempt) error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	one := a.byKey[gone.Key]
	if one == nil || one.busy != gone.busy || one.Netns != gone.Netns || one.Sandbox != gone.Sandbox {
		return nil
	}
	if err := os.Remove(a.path(gone.Key)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("attempt to attach a pod: %w", err)
	}
	delete(a.byKey, gone.Key)
	if a.bySandbox[one.Sandbox] == one {
		delete(a.bySandbox, one.Sandbox)
	}
	return nil
}

// of is the attempt of a sandbox; ok is false for a sandbox that this kubelet has not attached.
func (a *attempts) of(sandbox string) (one attempt, ok bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if found := a.bySandbox[sandbox]; found != nil {
		return *found, true
	}
	return attempt{}, false
}

// adopt gives an attempt the sandbox that the container runtime has made for it without an answer to the kubelet. It returns
// nil where there is no such attempt, or a call works on it.
func (a *attempts) adopt(key key, sandbox string) (*attempt, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	one := a.byKey[key]
	if one == nil || one.busy || one.Sandbox != "" {
		return nil, nil
	}
	one.Sandbox = sandbox
	if err := a.write(one); err != nil {
		one.Sandbox = ""
		return nil, err
	}
	a.bySandbox[sandbox] = one
	copied := *one
	return &copied, nil
}

// stop notes that the network of a stopped sandbox is still to be removed; noted is false where a call works on the attempt, or
// it is not that of the sandbox.
func (a *attempts) stop(seen attempt) (noted bool, err error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	one := a.byKey[seen.Key]
	if one == nil {
		// Of a kubelet that has lost its folder.
		one = &seen
	}
	if seen.Key.UID == "" || one.busy || one.Netns != seen.Netns || one.Sandbox != seen.Sandbox {
		return false, nil
	}
	before := one.Stopped
	one.Stopped = true
	if err := a.write(one); err != nil {
		one.Stopped = before
		return false, err
	}
	a.byKey[one.Key] = one
	a.bySandbox[one.Sandbox] = one
	return true, nil
}

// areStopped tells whether a network of a stopped sandbox is still to be removed.
func (a *attempts) areStopped() bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for _, one := range a.byKey {
		if one.Stopped {
			return true
		}
	}
	return false
}

// answered notes what a query that began at `asked` has brought; an error is nil addresses. A later answer wins.
func (a *attempts) answered(sandbox string, asked time.Time, answer *addresses) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	one := a.bySandbox[sandbox]
	if one == nil || one.busy || asked.Before(one.asked) {
		return
	}
	one.asked = asked
	if answer == nil || equal(one.Addresses, *answer) {
		return
	}
	one.Addresses = *answer
	// Only a cache: the next process asks again.
	_ = a.write(one)
}

func equal(a, b addresses) bool {
	return a.None == b.None && strings.Join(a.IPs, " ") == strings.Join(b.IPs, " ")
}

// idle lists the attempts that no call works on.
func (a *attempts) idle() []attempt {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	var list []attempt
	for _, one := range a.byKey {
		if !one.busy {
			list = append(list, *one)
		}
	}
	return list
}

func (a *attempts) path(key key) string {
	// A UID of a static pod is a hash; that of another pod comes from the API server. Neither has a slash, and a forged
	// one must not leave the folder.
	return filepath.Join(a.folder, strings.ReplaceAll(key.String(), "/", "_")+".json")
}

// write replaces the file at once. The folder is on a disk, but nothing waits for the disk: after a crash of the machine
// there are no namespaces that an attempt could describe.
func (a *attempts) write(one *attempt) error {
	content, err := json.Marshal(one)
	if err != nil {
		return fmt.Errorf("attempt to attach pod %s/%s: %w", one.Namespace, one.Name, err)
	}
	path := a.path(one.Key)
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return fmt.Errorf("attempt to attach pod %s/%s: %w", one.Namespace, one.Name, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("attempt to attach pod %s/%s: %w", one.Namespace, one.Name, err)
	}
	return nil
}
