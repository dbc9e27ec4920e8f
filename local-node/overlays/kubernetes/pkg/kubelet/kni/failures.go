package kni

import (
	"fmt"
	"sync"
	"time"
)

const (
	// Pause after the first failure of a pod; it doubles with each further one.
	firstPause = time.Second
	// The longest pause.
	longestPause = time.Minute
	// Failures that are older are forgotten, so that pods that never come again need no memory.
	forgetAfter = 10 * time.Minute
)

// failures slows down pods that cannot be attached: each attempt costs the node a sandbox.
type failures struct {
	mutex sync.Mutex
	byUID map[string]failure
}

type failure struct {
	pause time.Duration
	at    time.Time
	cause error
}

// wait returns why a pod is not tried now, or nil.
func (f *failures) wait(uid string, now time.Time) error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	last, failed := f.byUID[uid]
	left := last.at.Add(last.pause).Sub(now)
	if !failed || left <= 0 {
		return nil
	}
	return fmt.Errorf("waiting %s after a failed attempt: %w", left.Round(time.Second), last.cause)
}

func (f *failures) add(uid string, cause error, now time.Time) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	for other, last := range f.byUID {
		if now.Sub(last.at) > forgetAfter {
			delete(f.byUID, other)
		}
	}
	if f.byUID == nil {
		f.byUID = map[string]failure{}
	}
	pause := min(2*f.byUID[uid].pause, longestPause)
	f.byUID[uid] = failure{pause: max(pause, firstPause), at: now, cause: cause}
}

func (f *failures) end(uid string) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	delete(f.byUID, uid)
}
