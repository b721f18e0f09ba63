package agents

import (
	"bytes"
	"fmt"
	mrand "math/rand/v2"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// Roots and CRLs go to all agents at once. What is in no hurry is spread: ten thousand messages at one moment take the processors of a
// second or two, in which new pods would wait for their certificates.
const (
	// calmRate is how many streams a second are sent what only brings checkpoints.
	calmRate = 1000
	// toldWithin is what an agent is given to replace its SVIDs, where the moment at which it is told was drawn from the time for all.
	toldWithin = time.Second
)

// Publish makes a state known. It has neither version nor checkpoints: those are filled in. If it only asks in addition for SVIDs to
// be replaced, agents have nothing to acknowledge, and are told one by one over the time that it gives them; if it is what they have,
// they are sent nothing.
func (h *Hub) Publish(m *chanceryv1.SyncUpdate) error {
	r := m.GetReissue()
	m.Reissue = nil
	shared, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if m.Reissue = r; err != nil {
		return fmt.Errorf("encoding an update for agents: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if u := h.current; u != nil && bytes.Equal(u.shared, shared) {
		switch {
		case u.reissue == nil && r == nil || sameIssuers(u.reissue, r):
			return nil
		case u.reissue == nil:
			h.set(&update{u.version, u.content, u.shared, r})
			return nil
		}
	}
	h.news = time.Now()
	v := h.nextVersion()
	if h.current != nil && sameIssuers(h.current.reissue, r) { // the time that was given counts for those who have not been told
		r = h.current.reissue
	}
	h.set(&update{v, v, shared, r})
	return nil
}

func sameIssuers(a, b *chanceryv1.Reissue) bool {
	return a != nil && b != nil && slices.EqualFunc(a.GetIssuers(), b.GetIssuers(), bytes.Equal)
}

// turn is when a stream is sent what is in no hurry. Its fields belong to the hub's lock.
type turn struct {
	calm    time.Time           // when it is sent checkpoints; zero if it has the last
	reissue *chanceryv1.Reissue // that it is told of,
	due     time.Time           // when,
	told    bool                // and whether it has been,
	first   bool                // with the first update of the stream
}

// news is what a stream is sent.
type news struct {
	update  *update             // nil: naming alone
	reissue *chanceryv1.Reissue // what it is told of SVIDs to replace
	named   bool                // and of its services
}

// next returns what the stream is to be sent now; and else what is closed when there is something newer for all, and when to look
// again, for which s.look wakes it; zero for never.
func (h *Hub) next(s *stream, now time.Time) (n news, changed <-chan struct{}, again time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	u := h.current
	if u == nil {
		return news{}, h.changed, time.Time{}
	}
	due, again := h.turnOf(s, u, now)
	if n.named = s.named && !now.Before(s.paused); !due && !n.named {
		if s.named && (again.IsZero() || s.paused.Before(again)) {
			again = s.paused
		}
		if s.look.Stop(); !again.IsZero() {
			s.look.Reset(again.Sub(now))
		}
		return news{}, h.changed, again
	}
	if n.named {
		s.named, s.paused = false, now.Add(namingPause)
	}
	if !due {
		return n, nil, time.Time{}
	}
	n.update = u
	s.sent, s.turn.calm = u.version, time.Time{}
	if s.turn.reissue != nil && (s.turn.told || !now.Before(s.turn.due)) {
		s.turn.told, n.reissue = true, s.turn.reissue
		if !s.turn.first {
			n.reissue = &chanceryv1.Reissue{Issuers: n.reissue.GetIssuers(), Within: durationpb.New(min(n.reissue.GetWithin().AsDuration(), toldWithin))}
		}
	}
	return n, nil, time.Time{}
}

// turnOf reports whether a stream is to be sent an update now; and else when to look again, zero for never. Caller holds mu.
func (h *Hub) turnOf(s *stream, u *update, now time.Time) (due bool, again time.Time) {
	if u.reissue != s.turn.reissue {
		s.turn.reissue, s.turn.told, s.turn.first, s.turn.due = u.reissue, false, s.sent == 0, now
		if s.sent > 0 { // it is told of its turn; whoever comes now draws it himself
			s.turn.due = now.Add(mrand.N(max(u.reissue.GetWithin().AsDuration(), 0) + 1))
		}
	}
	if s.sent >= u.content && s.sent != u.version && s.turn.calm.IsZero() {
		s.turn.calm = now.Add(mrand.N(time.Duration(len(h.streams))*time.Second/calmRate + 1))
	}
	if s.sent < u.content || s.sent != u.version && !now.Before(s.turn.calm) || s.turn.untold() && !now.Before(s.turn.due) {
		return true, time.Time{}
	}
	if again = s.turn.calm; s.turn.untold() && (again.IsZero() || s.turn.due.Before(again)) {
		again = s.turn.due
	}
	return false, again
}

func (t *turn) untold() bool { return t.reissue != nil && !t.told }
