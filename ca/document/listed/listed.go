// Package listed owns the list of replicas in an authority document: the servers that share it, each with a log of its own (decision D13).
//
// It refuses two under one name, or with one log ID, and a log in the place of the one that is listed.
package listed

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/store"
)

// LogState is a replica, and names its log.
type LogState struct {
	ID           uint32     `json:"id"`                     // ca.MinLogID to ca.MaxLogID; leads every serial
	Key          string     `json:"key,omitempty"`          // public key of the issuance log; empty for a replica without one
	Replica      string     `json:"replica,omitempty"`      // its name; empty in a document of format 1, see Own
	DeclaredDead *time.Time `json:"declaredDead,omitempty"` // when somebody said that it will not come back
}

// Max bounds the replicas in a document, those that were declared dead and are still listed included. Of those that live
// there are at most store.MaxNotes.
const Max = 1024

// NewLogID returns a log ID at random.
func NewLogID() uint32 {
	var b [4]byte
	rand.Read(b[:])
	return ca.MinLogID + binary.BigEndian.Uint32(b[:])%(ca.MaxLogID-ca.MinLogID)
}

// Own returns the entry of a replica with this name, whose issuance log has this public key (empty without one); nil if it is not
// registered. The log comes first: a host that got another name is the same replica. An entry without a name was written by a
// version that knew one server, and is the entry of whoever opens it.
func Own(logs []LogState, name, key string) *LogState {
	fits := []func(l *LogState) bool{
		func(l *LogState) bool { return key != "" && l.Key == key },
		func(l *LogState) bool { return l.Replica == name && l.DeclaredDead == nil },
		func(l *LogState) bool { return l.Replica == "" && l.DeclaredDead == nil },
		func(l *LogState) bool { return l.Replica == name && l.Key == "" && key == "" },
	}
	for _, fit := range fits {
		for i := range logs {
			if fit(&logs[i]) {
				return &logs[i]
			}
		}
	}
	return nil
}

// Live returns the entries of the replicas that nobody declared dead.
func Live(logs []LogState) []LogState {
	var live []LogState
	for _, l := range logs {
		if l.DeclaredDead == nil {
			live = append(live, l)
		}
	}
	return live
}

// Register enters a replica, or takes its entry up again: under the name that it has now, and alive. Have is its issuance log;
// without one only have.ID counts, as the log ID that it had before, zero if it had none.
func Register(logs []LogState, name string, have LogState) ([]LogState, error) {
	if err := store.CheckNote(name, nil); err != nil {
		return logs, err
	}
	own := Own(logs, name, have.Key)
	if own == nil {
		entry, err := newEntry(logs, have)
		if err != nil {
			return logs, fmt.Errorf("registering replica %s: %w", name, err)
		}
		logs = append(logs, entry)
		own = &logs[len(logs)-1]
	} else if err := own.Check(have); err != nil {
		return logs, err
	}
	for i := range logs {
		if l := &logs[i]; l != own && l.Replica == name && l.DeclaredDead == nil {
			return logs, fmt.Errorf("another replica is registered as %s, with log ID %d: give this one another name (state.replica)", name, l.ID)
		}
	}
	own.Replica, own.DeclaredDead = name, nil
	return logs, nil
}

func newEntry(logs []LogState, have LogState) (LogState, error) {
	if n := len(Live(logs)); n >= store.MaxNotes || len(logs) >= Max {
		return LogState{}, fmt.Errorf("the document lists %d replicas and %d that were forgotten, whose certificates may not have ended, and no more fit; "+
			"`chancery replica forget NAME` for those that are gone", n, len(logs)-n)
	}
	taken := map[uint32]string{}
	for _, l := range logs {
		taken[l.ID] = l.Replica
	}
	if by, is := taken[have.ID]; is && have.Key != "" { // by chance, once in billions; more likely a copy that was signed anew
		return LogState{}, fmt.Errorf("the issuance log's ID %d is that of replica %q: serials would not tell them apart. Move the log's folder away, and a new one is made", have.ID, by)
	}
	for {
		if _, is := taken[have.ID]; have.ID != 0 && !is {
			return LogState{ID: have.ID, Key: have.Key}, nil
		}
		have.ID = NewLogID()
	}
}

// Check holds the log that a server writes to the one that is listed: a log that is lost, or that another one was put in place
// of, must not pass for the whole history.
func (l *LogState) Check(have LogState) error {
	switch {
	case l.Key == have.Key && (have.Key == "" || have.ID == l.ID):
		return nil
	case have.Key == "":
		return fmt.Errorf("the authority document lists the issuance log %s: set issuanceLog in the config to its folder; what is issued would be missing from it", l.Key)
	case l.Key == "":
		return errors.New("the authority document lists no issuance log yet: run `chancery authority init -c FILE` once")
	}
	return fmt.Errorf("the issuance log is %s, and the authority document lists %s: put the folder of that one back", have.Key, l.Key)
}

// Forget declares a replica dead: nobody waits for it any more. It reports whether it was not already.
func Forget(logs []LogState, name string, now time.Time) (bool, error) {
	known := false
	for i := range logs {
		l := &logs[i]
		if l.Replica != name {
			continue
		}
		if known = true; l.DeclaredDead == nil {
			now = now.UTC().Truncate(time.Second)
			l.DeclaredDead = &now
			return true, nil
		}
	}
	if !known {
		return false, fmt.Errorf("there is no replica %.80q; there are %s", name, strings.Join(names(logs), ", "))
	}
	return false, nil
}

func names(logs []LogState) []string {
	var names []string
	for _, l := range logs {
		names = append(names, l.Replica)
	}
	return names
}

// DropDead drops the entries of replicas that were declared dead so long ago that what they issued has ended. It returns the names
// that nobody has any more.
func DropDead(logs []LogState, now time.Time) (kept []LogState, gone []string) {
	left := map[string]bool{}
	for _, l := range logs {
		if l.DeclaredDead == nil || now.Before(l.DeclaredDead.Add(ca.LeafTTLLimit)) {
			kept = append(kept, l)
			left[l.Replica] = true
		}
	}
	if len(kept) == 0 { // the last one's, which comes back or not; a document without any is not read
		return logs, nil
	}
	for _, l := range logs {
		if !left[l.Replica] {
			gone = append(gone, l.Replica)
			left[l.Replica] = true
		}
	}
	return kept, gone
}
