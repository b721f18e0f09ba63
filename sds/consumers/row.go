package consumers

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// row is what the file says of one consumer.
type row struct {
	UID      uint32      `json:"uid"`
	PID      int32       `json:"pid"`
	Start    uint64      `json:"start"`
	Boot     string      `json:"boot,omitempty"` // of the machine
	Count    int         `json:"count"`          // of processes, where several are counted together
	API      string      `json:"api"`
	Node     string      `json:"node,omitempty"`
	SVIDs    []handed    `json:"svids"` // in the order in which they were handed out
	Contexts []trusts    `json:"contexts,omitempty"`
	Rejected []rejection `json:"rejected,omitempty"`
}

// rejection is what a consumer did not take of what it was sent, in its own words, and has not taken since.
type rejection struct {
	Name  string `json:"name"`
	Words string `json:"words"`

	stray time.Time // as of trusts
}

// handed is an SVID that was handed out, and not yet replaced.
type handed struct {
	Name     string    `json:"name"`
	Version  string    `json:"version"`
	Issuer   hexBytes  `json:"issuer"`
	Serial   string    `json:"serial"`
	NotAfter time.Time `json:"notAfter"`
	Acked    bool      `json:"acked,omitempty"`

	saved bool          // the file has it
	life  time.Duration // when it ends, on the table's clock
}

// trusts is a validation context of the trust domain that a consumer has.
type trusts struct {
	Name       string `json:"name"`
	Generation uint64 `json:"generation"`

	stray time.Time // since when no stream asks for it; zero while one does
}

// hexBytes are written in hex.
type hexBytes []byte

// MarshalText writes them.
func (b hexBytes) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(b)), nil }

// UnmarshalText reads them.
func (b *hexBytes) UnmarshalText(text []byte) (err error) {
	*b, err = hex.DecodeString(string(text))
	return err
}

func (b hexBytes) equal(o hexBytes) bool { return bytes.Equal(b, o) }

func (r *row) process() Process { return Process{r.UID, r.PID, r.Start} }

// find returns the place of an SVID; below 0 if it is not there.
func (r *row) find(name, version string) int {
	return slices.IndexFunc(r.SVIDs, func(h handed) bool { return h.Name == name && h.Version == version })
}

// moment is a point of time on two clocks: the wall's, and one that counts since the table was opened and is never set.
type moment struct {
	wall time.Time
	up   time.Duration
}

// ended reports whether an SVID has ended, by both clocks: one that is only set ahead for a while makes nobody forget what it has.
func (h *handed) ended(now moment) bool { return !now.wall.Before(h.NotAfter) && now.up >= h.life }

// drop gives up what has ended.
func (r *row) drop(now moment) (changed bool) {
	n := len(r.SVIDs)
	r.SVIDs = slices.DeleteFunc(r.SVIDs, func(h handed) bool { return h.ended(now) })
	return len(r.SVIDs) != n
}

// generation is the lowest that the consumer has acknowledged of all that it asks for; 0 if that is not known. A proxy that rejects
// some of what it was sent is not known to work with the rest: Envoy rejects what comes last of a certificate and a validation
// context that do not go together, and has acknowledged the other.
func (r *row) generation() uint64 {
	if len(r.Contexts) == 0 || len(r.Rejected) > 0 {
		return 0
	}
	return slices.MinFunc(r.Contexts, func(a, b trusts) int { return compare(a.Generation, b.Generation) }).Generation
}

func compare(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// merge takes another row in: of each issuer the SVID that ends last, and the lowest generation.
func (r *row) merge(o *row) {
	r.Count += max(o.Count, 1)
	r.Contexts[0].Generation = min(r.Contexts[0].Generation, o.generation())
	for _, h := range o.SVIDs {
		at := slices.IndexFunc(r.SVIDs, func(x handed) bool { return x.Issuer.equal(h.Issuer) })
		switch {
		case at < 0:
			r.SVIDs = append(r.SVIDs, h)
		case r.SVIDs[at].NotAfter.Before(h.NotAfter):
			r.SVIDs[at] = h
		}
	}
}

// name is for people.
func (r *row) name() string {
	if r.Count > 1 {
		return fmt.Sprintf("%d processes that are not connected, uid %d", r.Count, r.UID)
	}
	var b strings.Builder
	b.WriteString(r.API)
	if r.Node != "" {
		fmt.Fprintf(&b, " %s", r.Node)
	}
	fmt.Fprintf(&b, ", uid %d", r.UID)
	if r.PID > 0 {
		fmt.Fprintf(&b, ", pid %d", r.PID)
	}
	return b.String()
}

// check holds a row of a file against the bounds.
func (r *row) check() error {
	switch {
	case len(r.SVIDs) == 0 || len(r.SVIDs) > 2*maxSVIDs:
		return fmt.Errorf("it has %d SVIDs", len(r.SVIDs))
	case len(r.Contexts) > maxContexts+1:
		return fmt.Errorf("it has %d validation contexts", len(r.Contexts))
	case len(r.API) > maxNode || len(r.Node) > maxNode || len(r.Boot) > maxNode:
		return errors.New("one of its texts is too long")
	case len(r.Rejected) > maxRejected+1:
		return fmt.Errorf("it has %d rejections", len(r.Rejected))
	case r.Count < 1 || r.Count > 1<<30:
		return fmt.Errorf("its count is %d", r.Count)
	}
	for i := range r.SVIDs {
		if err := r.SVIDs[i].check(); err != nil {
			return err
		}
	}
	for _, x := range r.Rejected {
		if len(x.Name) > maxName || len(x.Words) > maxWords {
			return errors.New("a text of a rejection is too long")
		}
	}
	for _, x := range r.Contexts {
		if len(x.Name) > maxName {
			return errors.New("the name of a validation context is too long")
		}
	}
	return nil
}

func (h *handed) check() error {
	switch {
	case len(h.Name) > maxName || len(h.Version) > maxNode || len(h.Serial) > maxNode:
		return errors.New("a text of an SVID is too long")
	case len(h.Issuer) == 0 || len(h.Issuer) > 64:
		return fmt.Errorf("the issuer's key identifier of an SVID has %d bytes", len(h.Issuer))
	case h.NotAfter.IsZero():
		return errors.New("an SVID has no end")
	}
	return nil
}

// clip bounds a text and keeps it UTF-8.
func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "")
}
