package sds

import (
	"context"
	"net"

	"github.com/chancery-project/chancery/sds/socket"
	"github.com/chancery-project/chancery/trust"
)

// View is all that one caller may see at one moment. It is immutable (invariant 6).
type View struct {
	// Identities of the caller; the first is its default. None means that the caller is known but nothing has been
	// issued to it yet: streams wait.
	Identities []*trust.Identity

	// Hints tells the identities apart for the workload (Workload API, "hint"); parallel to Identities or shorter.
	Hints []string

	// Bundles of all trusted domains with their CRLs, the caller's own first.
	Bundles []*trust.Bundle

	// Naming maps a service, "NS/NAME", to the identities that may serve it.
	Naming map[string][]trust.ID

	// Generation grows with each change of the view.
	Generation uint64
}

// Source yields a caller's current view and a channel that is closed once there is a newer one. It does not block,
// is safe for concurrent use, and never returns a nil view.
type Source func() (*View, <-chan struct{})

// Peer is the process at the other end of a connection.
type Peer = socket.Peer

// Listen opens the agent's socket; see socket.Listen.
func Listen(path string) (net.Listener, error) { return socket.Listen(path) }

// Attest says who a peer is and returns what it may see. It is asked once for each stream, when the stream opens. An
// error means PermissionDenied: its text is logged, and the caller is told only the reason of a *Refused.
type Attest func(ctx context.Context, p Peer) (Source, error)

// Refused is an error of Attest with a reason that may be told to the caller and counted: one of a few fixed words
// in snake_case, such as "uid_not_allowed".
type Refused struct {
	Reason string
	Err    error
}

// Error returns the reason and the details.
func (r *Refused) Error() string {
	if r.Err == nil {
		return r.Reason
	}
	return r.Reason + ": " + r.Err.Error()
}

// Unwrap returns the details.
func (r *Refused) Unwrap() error { return r.Err }

// own returns the bundle of the caller's own trust domain; nil if there is none yet.
func (v *View) own() *trust.Bundle {
	if len(v.Bundles) == 0 {
		return nil
	}
	return v.Bundles[0]
}

// bundleOf returns the bundle that an identity's peers verify it against.
func (v *View) bundleOf(id *trust.Identity) *trust.Bundle {
	for _, b := range v.Bundles {
		if b.Domain() == id.ID.Domain() {
			return b
		}
	}
	return id.Bundle
}

// hint returns the hint of the identity with this index. Hints must be unique in a response and at most 1,024 bytes
// (SPIFFE Workload API, section 5.2.1): the first holder keeps it, the others have none.
func (v *View) hint(i int) string {
	if i >= len(v.Hints) || len(v.Hints[i]) > 1024 {
		return ""
	}
	for _, earlier := range v.Hints[:i] {
		if earlier == v.Hints[i] {
			return ""
		}
	}
	return v.Hints[i]
}
