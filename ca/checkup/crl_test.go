package checkup

import (
	"slices"
	"testing"
	"time"
)

// TestCRLs: what is found of revocation, from what a server says.
func TestCRLs(t *testing.T) {
	healthy := func(s *State) *CRLs {
		ends, published := s.Time.Add(3*day+12*time.Hour), s.Time.Add(-time.Hour)
		return &CRLs{Ends: &ends, Published: &published, Agents: 3, Acknowledged: 3}
	}
	for _, c := range []struct {
		name   string
		change func(*State, *CRLs)
		want   []string
	}{
		{"healthy", func(*State, *CRLs) {}, nil},
		{"off", func(_ *State, c *CRLs) { c.Off, c.Ends = []string{"no cRLSign"}, nil }, []string{"warning crl.off"}},
		{"off, with CRLs that run out unseen", func(s *State, c *CRLs) { c.Off = []string{"x"}; *c.Ends = s.Time }, []string{"warning crl.off"}},
		{"lacking", func(_ *State, c *CRLs) { c.Stale = []string{"lacks 1"} }, []string{"warning crl.incomplete"}},
		{"failing for a moment", func(s *State, c *CRLs) { at := s.Time.Add(-4 * time.Minute); c.Error, c.Failing = "x", &at }, nil},
		{"failing", func(s *State, c *CRLs) { at := s.Time.Add(-5 * time.Minute); c.Error, c.Failing = "x", &at }, []string{"critical crl.stale"}},
		{"less than three days", func(s *State, c *CRLs) { *c.Ends = s.Time.Add(3*day - time.Minute) }, []string{"warning crl.stale"}},
		{"less than a day", func(s *State, c *CRLs) { *c.Ends = s.Time.Add(day - time.Minute) }, []string{"critical crl.stale"}},
		{"ended", func(s *State, c *CRLs) { *c.Ends = s.Time.Add(-time.Minute) }, []string{"critical crl.stale"}},
		{"ends with its issuer", func(s *State, c *CRLs) {
			old := certificate(t, "retired", s.Time.Add(-6*day), 7*day, true)
			s.Certs = append(s.Certs, NewCertificate(KindIssuer, "retiring", false, old, s.Time))
			*c.Ends = old.NotAfter
		}, nil},
		{"an agent is behind", func(_ *State, c *CRLs) { c.Acknowledged = 2 }, []string{"warning crl.unacknowledged"}},
		{"an agent is behind for a moment", func(s *State, c *CRLs) { *c.Published = s.Time.Add(-time.Minute); c.Acknowledged = 2 }, nil},
		{"counts that make no sense", func(_ *State, c *CRLs) { c.Acknowledged = 9 }, nil},
		{"nothing was published", func(_ *State, c *CRLs) { c.Published, c.Ends, c.Acknowledged = nil, nil, 0 }, nil},
	} {
		s := caWith(t, RenewedByServer)
		s.CRLs = healthy(s)
		c.change(s, s.CRLs)
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
