package adminsocket

import (
	"sync"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
)

// noteEvery is how often an actor who reads the same again and again gets a line in the audit log.
const noteEvery = time.Hour

// Notes takes down in the audit log who reads what that is asked for all day, by monitoring and by who watches: once an hour for each
// actor, and without waiting, since a log that cannot be written is among what should be told.
type Notes struct {
	log *audit.Log

	mu    sync.Mutex // guards noted
	noted map[[2]string]time.Time
}

// NewNotes takes down who reads in a log.
func NewNotes(log *audit.Log) *Notes { return &Notes{log: log, noted: map[[2]string]time.Time{}} }

// Note takes down that an actor reads something, unless that was done within the hour. What fails shows elsewhere: the log says itself
// why it cannot be written.
func (n *Notes) Note(actor, what string) {
	if n.due(actor, what) {
		_ = n.log.Note(audit.Record{Event: audit.Admin, Actor: actor, Detail: what + " (noted once an hour)"})
	}
}

// due reports whether an actor should be noted, and takes it down. Actors are few: root and the server's own user.
func (n *Notes) due(actor, what string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	key := [2]string{actor, what}
	last, ok := n.noted[key]
	if ok && time.Since(last) < noteEvery {
		return false
	}
	n.noted[key] = time.Now()
	return true
}
