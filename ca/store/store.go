// Package store owns where the authority document lies: one value that changes by compare-and-swap only, with notes of
// the replicas beside it and a lease for the one that drives changes. It holds the contract, and the embedded store.
//
// The store is trusted for availability, not for content: the document carries its own authentication code and its
// keys are sealed, so who can write the store can at most roll it back or delete it; see docs/security.md.
//
// It refuses to create what it is asked to open (invariant 11). The embedded store refuses to be opened by two processes
// at a time; the shared ones (packages store/kube, store/postgres) are made for several.
package store

import (
	"context"
	"errors"
	"io"
	"time"
)

// Errors that callers tell apart.
var (
	ErrMissing  = errors.New("there is no document")
	ErrConflict = errors.New("the document was changed by somebody else")
	ErrLocked   = errors.New("the store is in use by another process")
	ErrClosed   = errors.New("the store was closed")
)

// Bounds of what a store takes, in bytes and in number. One whose engine takes less (Kubernetes) says so in its package.
const (
	MaxDocument = 16 << 20
	MaxVersion  = 1 << 62
	MaxNote     = 1 << 20 // of one replica
	MaxNotes    = 256
	MaxName     = 253 // of a replica or of who holds the lease: a DNS name, in lower case
)

// Store is one place for one document. All methods are safe for concurrent use, by several processes where the store is
// shared, and end when their context does; those of a shared store also after a time of their own (10 s), so that a store
// that hangs keeps nobody for ever. Errors name the store. But for those above they say nothing about whether a change
// happened: Load tells; and where a call was given up, it may happen still, which compare-and-swap takes care of.
//
// Close ends all calls, and Watch; what is called after it gives ErrClosed. It may be called twice. The lease is not
// given up, but in the embedded store, whose lease ends with the process that holds the store.
type Store interface {
	Document
	Lease
	Notes
	// Watch calls changed after each change of document or notes by anybody, this process included, and whenever one may have
	// been missed, so also once it has begun, until ctx ends; then it returns nil. Several changes may come as one call. Calls
	// come one after the other. It tries again by itself what fails, and so returns an error only if it never can work: ErrClosed
	// after Close.
	Watch(ctx context.Context, changed func()) error
	io.Closer
}

// Document is the value.
type Document interface {
	// Load returns the document's bytes and version; ErrMissing if none was created. It is never older than what was confirmed, to
	// anybody, before the call.
	Load(ctx context.Context) (data []byte, version uint64, err error)
	// Create stores the first document; ErrConflict if there is one. The version is above 0 and at most MaxVersion.
	Create(ctx context.Context, version uint64, data []byte) error
	// Replace stores data as version next, which is above old, if the stored version is old; else ErrConflict.
	Replace(ctx context.Context, old, next uint64, data []byte) error
}

// Lease names the one replica that drives changes. It keeps two from doing the same work; what it does not do is keep a
// holder from writing that was paused: compare-and-swap does.
type Lease interface {
	// Hold takes the lease for holder, or keeps it, for a time from now on (1 s to 1 min). It is free if nobody has it, if it was
	// given up, or if its time is over. Held says whether holder has it now; if not, by is who has.
	Hold(ctx context.Context, holder string, life time.Duration) (held bool, by string, err error)
	// GiveUp lets another take the lease at once. It does nothing if holder does not have it.
	GiveUp(ctx context.Context, holder string) error
}

// Notes are what each replica tells the others: one value for each name, which only its own replica writes.
type Notes interface {
	// PutNote stores a replica's note, at most MaxNote bytes. An error if there are MaxNotes of others already.
	PutNote(ctx context.Context, replica string, data []byte) error
	// Notes returns all notes, by replica. Never some of them: an error if there are more, or larger ones, than PutNote lets be.
	Notes(ctx context.Context) (map[string][]byte, error)
	// DropNote deletes a note. It does nothing if there is none.
	DropNote(ctx context.Context, replica string) error
}
