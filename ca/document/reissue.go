package document

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"
)

// Import says that a document was restored from an export, and who did it.
type Import struct {
	Time     time.Time `json:"time"`
	Actor    string    `json:"actor"`
	Version  uint64    `json:"version"`  // that was restored
	Exported time.Time `json:"exported"` // when it was exported
}

// maxEpoch keeps versions below 1<<62, which is the most that a store takes.
const maxEpoch = 1<<30 - 1

// EpochOf is the higher half of a version. It grows by one with each import, so that nobody takes what was restored for a step
// back (decision D9).
func EpochOf(version uint64) uint64 { return version >> 32 }

// Reissue returns a copy of d, whose stored form is data, as the first version of an epoch above that of seen, the highest
// version that anybody may know. Numbers of CRLs and generations of bundles are moved to where they can have been at no time
// before: their holders would refuse those that go back, too.
func (d *Document) Reissue(data []byte, seen uint64, by Import) (*Document, error) {
	if by.Actor == "" || len(by.Actor) > maxActor {
		return nil, fmt.Errorf("the actor's name has %d bytes; it should have 1 to %d", len(by.Actor), maxActor)
	}
	epoch := EpochOf(max(seen, d.Version)) + 1
	if epoch > maxEpoch {
		return nil, errors.New("the version of the document is at its end; was it made up?")
	}
	n, err := d.Next(data)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	n.Format, n.Version, n.Previous = Format, epoch<<32, hex.EncodeToString(sum[:])
	n.Imported = &by
	n.Imported.Version = d.Version
	for _, state := range n.Domains {
		state.Generation = max(state.Generation+1<<16, epoch<<16)
		state.CRLNumber = max(state.CRLNumber+1<<32, epoch<<32)
	}
	return n, nil
}
