package document

import (
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca/document/listed"
)

// This file is about the replicas: the servers that share the document, each with a log of its own.

// Driver is the replica that drives changes. The term tells one time of driving from another: it grows each time.
type Driver struct {
	Replica string `json:"replica"`
	Term    uint64 `json:"term"`
}

// MaxReplicas bounds the replicas in a document, those that were declared dead and are still listed included.
const MaxReplicas = listed.Max

// Own returns the entry of a replica; see listed.Own.
func (d *Document) Own(name, key string) *LogState { return listed.Own(d.Logs, name, key) }

// Live returns the entries of the replicas that nobody declared dead.
func (d *Document) Live() []LogState { return listed.Live(d.Logs) }

// Register enters a replica, or takes its entry up again; see listed.Register.
func (d *Document) Register(name string, have LogState) (err error) {
	d.Logs, err = listed.Register(d.Logs, name, have)
	return err
}

// Forget declares a replica dead: nobody waits for it any more. It reports whether it was not already.
func (d *Document) Forget(name string, now time.Time) (bool, error) {
	return listed.Forget(d.Logs, name, now)
}

// DropDead drops the entries of replicas that were declared dead so long ago that what they issued has ended. It returns the names
// that nobody has any more.
func (d *Document) DropDead(now time.Time) (gone []string) {
	d.Logs, gone = listed.DropDead(d.Logs, now)
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
