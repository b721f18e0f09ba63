package checkup

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// TestStores: what is found of a store, and of the servers on it.
func TestStores(t *testing.T) {
	ago := func(s *State, d time.Duration) *time.Time { at := s.Time.Add(-d); return &at }
	pastHalf := func(s *State) {
		c := certificate(t, "past half", s.Time.Add(-85*time.Hour), 7*day, true)
		s.Certs = slices.DeleteFunc(s.Certs, func(c Certificate) bool { return c.Kind == KindIssuer })
		s.Certs = append(s.Certs, NewCertificate(KindIssuer, "active", true, c, s.Time))
	}
	for _, c := range []struct {
		name   string
		change func(*State, *Store)
		want   []string
	}{
		{"healthy", func(*State, *Store) {}, nil},
		{"a call that failed", func(_ *State, st *Store) { st.Error = "connection refused" }, []string{"warning store.down"}},
		{"silent for half a minute", func(s *State, st *Store) { st.Confirmed = ago(s, 31*time.Second) }, []string{"warning store.down"}},
		{"down for 5 minutes", func(s *State, st *Store) { st.Confirmed, st.Error = ago(s, 301*time.Second), "x" }, []string{"critical store.down"}},
		{"down while the issuer is due", func(s *State, st *Store) { pastHalf(s); st.Error = "x" }, []string{"critical store.down"}},
		{"never confirmed, long after the start", func(_ *State, st *Store) { st.Confirmed = nil }, []string{"critical store.down"}},
		{"never confirmed, after the start", func(s *State, st *Store) { s.Started, st.Confirmed = ago(s, time.Second), nil }, nil},
		{"a replica that is quiet", func(s *State, st *Store) { st.Replicas[1].Seen = ago(s, 170*time.Second) }, nil},
		{"a replica that is gone", func(s *State, st *Store) { st.Replicas[1].Seen = ago(s, 181*time.Second) }, []string{"warning replica.gone"}},
		{"a replica that is gone for long", func(s *State, st *Store) { st.Replicas[1].Seen = ago(s, 2*time.Hour) }, []string{"warning replica.gone"}},
		{"a replica that is gone and waited for", func(s *State, st *Store) { pastHalf(s); st.Replicas[1].Seen = ago(s, 2*time.Hour) }, []string{"critical replica.gone"}},
		{"a replica that never was there", func(_ *State, st *Store) { st.Replicas[1].Seen = nil }, []string{"warning replica.gone"}},
		{"a replica that is declared dead", func(s *State, st *Store) { st.Replicas[1].Seen, st.Replicas[1].DeclaredDead = nil, ago(s, 0) }, nil},
		{"others were not read yet", func(s *State, st *Store) { s.Started, st.Replicas[1].Seen = ago(s, time.Second), nil }, nil},
		{"a replica that is behind", func(_ *State, st *Store) { st.Replicas[1].Acknowledged = 4 }, []string{"warning replica.behind"}},
		{"a replica that knows nothing yet", func(_ *State, st *Store) { st.Replicas[1].Acknowledged = 0 }, []string{"warning replica.behind"}},
		{"a replica that is behind for a moment", func(s *State, st *Store) { st.Replicas[1].Acknowledged, st.Changed = 4, ago(s, time.Second) }, nil},
		{"a replica that is ahead", func(_ *State, st *Store) { st.Replicas[1].Acknowledged = 6 }, nil},
		{"a replica of another key", func(_ *State, st *Store) { st.Replicas[1].Trouble = "it was changed" }, []string{"warning replica.refused"}},
		{"a replica whose clock is ahead", func(s *State, st *Store) { st.Replicas[1].Seen = ago(s, -2*time.Minute) }, []string{"warning clock.behind"}},
		{"ourselves, by nobody's word", func(_ *State, st *Store) { st.Replicas[0].Seen, st.Replicas[0].Acknowledged = nil, 0 }, nil},
	} {
		s := caWith(t, RenewedByServer)
		s.Document.Version = 5
		s.Store = &Store{Kind: StorePostgres, Place: "db", Replica: "a", Confirmed: ago(s, 9*time.Second), Changed: ago(s, time.Hour), Driver: "a", Replicas: []Replica{
			{Name: "a", Own: true, Drives: true}, {Name: "b", Seen: ago(s, time.Second), Acknowledged: 5},
		}}
		c.change(s, s.Store)
		var got []string
		for _, f := range judged(t, s) {
			if f != "warning requests.busy" {
				got = append(got, f)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestReplicaThatIsBehindIsToldWithNumbers, so that one sees how far.
func TestReplicaThatIsBehindIsToldWithNumbers(t *testing.T) {
	if got := behind(3, 7); !strings.Contains(got, "version 3") || !strings.Contains(got, "newest is 7") {
		t.Error(got)
	}
	if got := behind(0, 7); strings.Contains(got, "version 0") || !strings.Contains(got, "version 7") {
		t.Error(got)
	}
}
