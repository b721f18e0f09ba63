package document

import (
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

// ReissueBy is Reissue for an export that somebody restores, who is noted. Replicas stay listed: who lost its log or its mark is to be
// forgotten by name.
func (d *Document) ReissueBy(seen uint64, by Import) (*Document, error) {
	if by.Actor == "" || len(by.Actor) > maxActor {
		return nil, fmt.Errorf("the actor's name has %d bytes; it should have 1 to %d", len(by.Actor), maxActor)
	}
	n, err := d.Reissue(seen)
	if err != nil {
		return nil, err
	}
	by.Version = d.Version
	n.Imported = &by
	return n, nil
}
