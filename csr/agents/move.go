package agents

import (
	mrand "math/rand/v2"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// How long streams live, and how soon their agents come again.
const (
	// DefaultMaxAge is how old a connection gets: then its owner opens another one, with the credentials of that moment and
	// to any server, so that servers that came later get their share.
	DefaultMaxAge = 30 * time.Minute
	// leeway is how long a stream may outlive its credential: clocks differ, and the agent is about to have another one.
	leeway = time.Minute
	// moveSpread and stopSpread bound the pause before the next stream, drawn for each stream. Streams that grow old end at
	// different times already; those of a server that stops end all at once, and the others should not meet them all at once.
	moveSpread = time.Second
	stopSpread = 5 * time.Second
)

// ReasonMove is the reason in the status of a stream that the server ended for no fault of anybody: open another one.
const ReasonMove = "MOVE"

// moved ends a stream.
type moved struct {
	message string
	spread  time.Duration
}

// Error says why.
func (m *moved) Error() string { return m.message }

// GRPCStatus says when to come again.
func (m *moved) GRPCStatus() *status.Status {
	st, err := status.New(codes.Unavailable, m.message).WithDetails(
		&errdetails.ErrorInfo{Reason: ReasonMove, Domain: "chancery"}, &errdetails.RetryInfo{RetryDelay: durationpb.New(mrand.N(m.spread))})
	if err != nil { // only for code OK
		return status.New(codes.Unavailable, m.message)
	}
	return st
}

// life returns how long a stream that begins now may live. It is drawn, so that streams that began together do not end
// together, and below the age at which the server closes connections, so that agents are told.
func (c Caller) life(now time.Time) time.Duration {
	age := c.MaxAge
	if age <= 0 {
		age = DefaultMaxAge
	}
	life := time.Duration(float64(age) * (0.7 + 0.2*mrand.Float64()))
	if !c.Ends.IsZero() {
		life = min(life, max(0, c.Ends.Sub(now))+leeway+mrand.N(leeway))
	}
	return life
}
