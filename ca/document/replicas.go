package document

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/store"
)

// This file is about the replicas: the servers that share the document, each with a log of its own.

// MaxReplicas bounds the replicas in a document, those that were declared dead and are still listed included. Of those that live
// there are at most store.MaxNotes.
const MaxReplicas = 1024

// Driver is the replica that drives changes. The term tells one time of driving from another: it grows each time.
type Driver struct {
	Replica string `json:"replica"`
	Term    uint64 `json:"term"`
}

// Own returns the entry of a replica with this name, whose issuance log has this public key (empty without one); nil if it is not
// registered. The log comes first: a host that got another name is the same replica. An entry without a name was written by a
// version that knew one server, and is the entry of whoever opens it.
func (d *Document) Own(name, key string) *LogState {
	fits := []func(l *LogState) bool{
		func(l *LogState) bool { return key != "" && l.Key == key },
		func(l *LogState) bool { return l.Replica == name && l.DeclaredDead == nil },
		func(l *LogState) bool { return l.Replica == "" && l.DeclaredDead == nil },
		func(l *LogState) bool { return l.Replica == name && l.Key == "" && key == "" },
	}
	for _, fit := range fits {
		for i := range d.Logs {
			if fit(&d.Logs[i]) {
				return &d.Logs[i]
			}
		}
	}
	return nil
}

// Live returns the entries of the replicas that nobody declared dead.
func (d *Document) Live() []LogState {
	var live []LogState
	for _, l := range d.Logs {
		if l.DeclaredDead == nil {
			live = append(live, l)
		}
	}
	return live
}

// Register enters a replica, or takes its entry up again: under the name that it has now, and alive. Have is its issuance log;
// without one only have.ID counts, as the log ID that it had before, zero if it had none.
func (d *Document) Register(name string, have LogState) error {
	if err := store.CheckNote(name, nil); err != nil {
		return err
	}
	own := d.Own(name, have.Key)
	if own == nil {
		entry, err := d.newEntry(have)
		if err != nil {
			return fmt.Errorf("registering replica %s: %w", name, err)
		}
		d.Logs = append(d.Logs, entry)
		own = &d.Logs[len(d.Logs)-1]
	} else if err := own.Check(have); err != nil {
		return err
	}
	for i := range d.Logs {
		if l := &d.Logs[i]; l != own && l.Replica == name && l.DeclaredDead == nil {
			return fmt.Errorf("another replica is registered as %s, with log ID %d: give this one another name (state.replica)", name, l.ID)
		}
	}
	own.Replica, own.DeclaredDead = name, nil
	return nil
}

func (d *Document) newEntry(have LogState) (LogState, error) {
	if n := len(d.Live()); n >= store.MaxNotes || len(d.Logs) >= MaxReplicas {
		return LogState{}, fmt.Errorf("the document lists %d replicas and %d that were forgotten, whose certificates may not have ended, and no more fit; "+
			"`chancery replica forget NAME` for those that are gone", n, len(d.Logs)-n)
	}
	taken := map[uint32]string{}
	for _, l := range d.Logs {
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
func (d *Document) Forget(name string, now time.Time) (bool, error) {
	known := false
	for i := range d.Logs {
		l := &d.Logs[i]
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
		return false, fmt.Errorf("there is no replica %.80q; there are %s", name, strings.Join(d.replicaNames(), ", "))
	}
	return false, nil
}

func (d *Document) replicaNames() []string {
	var names []string
	for _, l := range d.Logs {
		names = append(names, l.Replica)
	}
	return names
}

// DropDead drops the entries of replicas that were declared dead so long ago that what they issued has ended. It returns the names
// that nobody has any more.
func (d *Document) DropDead(now time.Time) (gone []string) {
	var kept []LogState
	left := map[string]bool{}
	for _, l := range d.Logs {
		if l.DeclaredDead == nil || now.Before(l.DeclaredDead.Add(ca.LeafTTLLimit)) {
			kept = append(kept, l)
			left[l.Replica] = true
		}
	}
	if len(kept) == 0 { // the last one's, which comes back or not; a document without any is not read
		return nil
	}
	for _, l := range d.Logs {
		if !left[l.Replica] {
			gone = append(gone, l.Replica)
			left[l.Replica] = true
		}
	}
	d.Logs = kept
	return gone
}

// epochBits is how many bits of a version, and of a CRL number, count changes; those above count how often a document was
// restored. A generation of roots has half of them.
const epochBits = 32

// Reissue returns a document that was exported as the first version of the next epoch, above its own version and all that were
// seen. CRL numbers and generations of roots move along, so that nobody takes what follows for a step back. It keeps no hash of a
// version before: that one is not in the store any more.
func (d *Document) Reissue(seen uint64) (*Document, error) {
	n, err := d.Next(nil)
	if err != nil {
		return nil, err
	}
	epoch := max(d.Version, seen)>>epochBits + 1
	if epoch >= 1<<(62-epochBits) { // a store's version has 62 bits
		return nil, fmt.Errorf("version %d has no epoch after it", max(d.Version, seen))
	}
	n.Format, n.Version, n.By, n.Driver = n.Needs(), epoch<<epochBits, "", nil
	n.Previous, n.Before = "", nil
	for _, state := range n.Domains {
		// Without a content, so that the next one is taken at once: who has a CRL of before must not go on with it.
		state.CRL, state.CRLNumber = nil, epoch<<epochBits|state.LastCRL().Number&(1<<epochBits-1)
		if state.TaintedAt != 0 { // who has a document from before cannot know whether it is of the line that was restored
			state.TaintedAt = n.Version
		}
		state.Generation = epoch<<(epochBits/2) | state.Generation&(1<<(epochBits/2)-1)
		state.reissue(n.Version, time.Now())
	}
	return n, nil
}
