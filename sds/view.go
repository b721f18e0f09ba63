package sds

import (
	"context"
	"net"

	"github.com/chancery-project/chancery/sds/socket"
	"github.com/chancery-project/chancery/sds/view"
)

// View is all that one caller may see at one moment. It is immutable (invariant 6).
type View = view.View

// Names of resources that every caller may ask for, and prefixes of families of names.
const (
	NameDefault    = view.NameDefault
	NameRoots      = view.NameRoots
	NameAll        = view.NameAll
	PrefixService  = view.PrefixService
	PrefixFileCert = view.PrefixFileCert
	PrefixFileRoot = view.PrefixFileRoot
)

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
