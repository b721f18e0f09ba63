package checkup

import (
	"fmt"
	"time"
)

// The thresholds of stores. The document is looked at each 10 s and replicas write at least once a minute.
const (
	lateStore    = 30 * time.Second // as long as decision D4 lets a replica go without
	downStore    = 5 * time.Minute  // nothing can be revoked all that time; as long as CRLs may fail
	lateReplica  = 3 * time.Minute
	lostReplica  = time.Hour
	behindAfter  = 2 * time.Minute // a replica takes over a change within seconds
	clockReplica = time.Minute     // how far its clock may be ahead of ours
)

// judgeStore looks at a store that does not answer, and at servers on it that are gone or behind.
func (s *State) judgeStore() (all []Finding) {
	st := s.Store
	if st == nil {
		return nil
	}
	if f, found := s.judgeFresh(st); found {
		all = append(all, f)
	}
	for i := range st.Replicas {
		if r := &st.Replicas[i]; !r.Own {
			all = append(all, s.judgeReplica(st, r)...)
		}
	}
	return all
}

// judgeFresh judges how long the store has not confirmed the document. While it does not, nothing is revoked and no issuer renewed: so
// it is critical once that has been due, or for longer than revocations may take.
func (s *State) judgeFresh(st *Store) (Finding, bool) {
	since := s.Time.Sub(s.startedOr(s.Time))
	if st.Confirmed != nil {
		since = s.Time.Sub(*st.Confirmed)
	}
	subject := "store " + st.Place
	if since <= lateStore && st.Error == "" {
		return Finding{}, false
	}
	why := st.Error
	if why == "" {
		why = "it does not answer"
	}
	severity := Warning
	if since > downStore || s.renewalDue() {
		severity = Critical
	}
	return Found("store.down", severity, subject, "has not confirmed the authority document for %s: %s", Span(since), why), true
}

func (s *State) startedOr(t time.Time) time.Time {
	if s.Started != nil {
		return *s.Started
	}
	return t
}

// renewalDue reports whether the issuer in use is past half of its life.
func (s *State) renewalDue() bool {
	for i := range s.Certs {
		if c := &s.Certs[i]; c.Kind == KindIssuer && c.InUse && s.Time.After(c.NotBefore.Add(c.life()/2)) {
			return true
		}
	}
	return false
}

func (s *State) judgeReplica(st *Store, r *Replica) (all []Finding) {
	subject := "replica " + r.Name
	if r.Trouble != "" {
		all = append(all, Found("replica.refused", Warning, subject, "tells what cannot be used: %s", r.Trouble))
	}
	if r.DeclaredDead != nil {
		return all
	}
	if s.young() { // what others tell may not have been read yet
		return all
	}
	switch {
	case r.Seen == nil:
		all = append(all, Found("replica.gone", Warning, subject, "is listed and has told nothing of itself"))
	case s.Time.Sub(*r.Seen) > lateReplica:
		severity := Warning
		if s.Time.Sub(*r.Seen) > lostReplica && s.renewalDue() {
			severity = Critical
		}
		all = append(all, Found("replica.gone", severity, subject, "was last heard of %s ago", Span(s.Time.Sub(*r.Seen))))
	case r.Seen.Sub(s.Time) > clockReplica:
		all = append(all, Found("clock.behind", Warning, "clock", "is at %s, and %s wrote at %s", stamp(s.Time), subject, stamp(*r.Seen)))
	case s.Document != nil && r.Acknowledged < s.Document.Version && s.documentOlder(st, behindAfter):
		all = append(all, Found("replica.behind", Warning, subject, "%s", behind(r.Acknowledged, s.Document.Version)))
	}
	return all
}

func behind(has, want uint64) string {
	if has == 0 {
		return fmt.Sprintf("has not taken over version %d of the document", want)
	}
	return fmt.Sprintf("works by version %d of the document, and the newest is %d", has, want)
}

// documentOlder reports whether the document in use has been the newest for so long, as far as is known.
func (s *State) documentOlder(st *Store, d time.Duration) bool {
	return st.Changed != nil && s.Time.Sub(*st.Changed) > d
}
