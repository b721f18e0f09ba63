package checkup

import (
	"slices"
	"testing"
	"time"
)

func TestFederation(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*State, *Federated)
		want   []string
	}{
		{"fetched in time", func(*State, *Federated) {}, nil},
		{"one failure", func(s *State, f *Federated) { f.Error = "refused" }, nil},
		{"late by the default", func(s *State, f *Federated) {
			f.Error, f.LastSuccess = "refused", new(s.Time.Add(-15*time.Minute-time.Second))
		}, []string{"warning federation.failing"}},
		{"not late by its hint", func(s *State, f *Federated) {
			f.Error, f.LastSuccess, f.RefreshHint = "refused", new(s.Time.Add(-29*time.Minute)), 600
		}, nil},
		{"late whatever its hint", func(s *State, f *Federated) {
			f.Error, f.RefreshHint, f.LastSuccess = "refused", 365*day.Seconds(), new(s.Time.Add(-181*time.Minute))
		}, []string{"warning federation.failing"}},
		{"not since the start", func(s *State, f *Federated) { f.Error, f.LastSuccess = "refused", nil }, []string{"warning federation.failing"}},
		{"never", func(s *State, f *Federated) { f.Error, f.LastSuccess, f.Since = "refused", nil, nil }, []string{"warning federation.failing"}},
		{"not yet", func(s *State, f *Federated) {
			s.Started = new(s.Time.Add(-time.Second))
			f.Error, f.LastSuccess, f.Since = "refused", nil, nil
		}, nil},
		{"by another server", func(s *State, f *Federated) { f.LastSuccess, f.LastTry = nil, nil }, nil},
		{"imported", func(s *State, f *Federated) {
			*f = Federated{TrustDomain: "b.example", Since: new(s.Time.Add(-1000 * day)), Roots: 1}
		}, nil},
		{"an endpoint that is well", func(s *State, _ *Federated) {
			s.BundleEndpoint = &BundleEndpoint{Listen: ":1", NotAfter: new(s.Time.Add(25 * time.Hour))}
		}, nil},
		{"an endpoint with our own", func(s *State, _ *Federated) { s.BundleEndpoint = &BundleEndpoint{Listen: ":1"} }, nil},
		{"an endpoint that does not read", func(s *State, _ *Federated) {
			s.BundleEndpoint = &BundleEndpoint{Listen: ":1", NotAfter: new(s.Time.Add(25 * time.Hour)), Error: "no such file"}
		}, []string{"warning bundle-endpoint.failing"}},
		{"an endpoint whose certificate ends", func(s *State, _ *Federated) {
			s.BundleEndpoint = &BundleEndpoint{Listen: ":1", NotAfter: new(s.Time.Add(23 * time.Hour))}
		}, []string{"warning bundle-endpoint.failing"}},
		{"an endpoint whose certificate has ended", func(s *State, _ *Federated) {
			s.BundleEndpoint = &BundleEndpoint{Listen: ":1", NotAfter: new(s.Time), Error: "no such file"}
		}, []string{"critical bundle-endpoint.failing"}},
	} {
		s := caWith(t, RenewedByServer)
		s.Federation = []Federated{{
			TrustDomain: "b.example", Since: new(s.Time.Add(-time.Hour)), Roots: 1, URL: "https://b.example/", LastSuccess: new(s.Time.Add(-time.Minute)), LastTry: new(s.Time.Add(-time.Second)),
		}}
		c.change(s, &s.Federation[0])
		if got := judged(t, s); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
