package checkup

import "time"

// Federated is a foreign trust domain that has a bundle here, or shall have one.
type Federated struct {
	TrustDomain string     `json:"trustDomain"`
	Since       *time.Time `json:"since,omitempty"` // when its bundle was taken over; absent: there is none yet
	Roots       int        `json:"roots"`
	URL         string     `json:"url,omitempty"`                // of its endpoint; empty where the config names none
	RefreshHint float64    `json:"refreshHintSeconds,omitempty"` // that the bundle has
	LastSuccess *time.Time `json:"lastSuccess,omitempty"`        // of a fetch by this server
	LastTry     *time.Time `json:"lastTry,omitempty"`
	NextTry     *time.Time `json:"nextTry,omitempty"` // absent: another server does
	Error       string     `json:"error,omitempty"`   // of the last try
}

// BundleEndpoint is where others get the roots.
type BundleEndpoint struct {
	Listen   string     `json:"listen"`
	Error    string     `json:"error,omitempty"`    // why its certificate could not be read again
	NotAfter *time.Time `json:"notAfter,omitempty"` // of its certificate; absent: it shows the server's own
}

// The thresholds. A bundle is fetched at its refresh hint, within the bounds of trust/federation.
const (
	refreshDefault  = 5 * time.Minute
	refreshShortest = time.Minute
	refreshLongest  = time.Hour
	lateRefreshes   = 3 // a new root is shown for so many periods at the least before it signs
	endingWeb       = 24 * time.Hour
)

// judgeFederation looks at foreign bundles that are not kept up to date, and at the endpoint that shows ours.
func (s *State) judgeFederation() (all []Finding) {
	for i := range s.Federation {
		f := &s.Federation[i]
		subject := "trust domain " + f.TrustDomain
		switch since := s.Time.Sub(f.lastSuccess(s)); {
		case f.Error == "" || s.young():
		case f.Since == nil:
			all = append(all, Found("federation.failing", Warning, subject, "is federated and has no bundle yet: %s", f.Error))
		case since > lateRefreshes*f.every():
			all = append(all, Found("federation.failing", Warning, subject, "is federated and its bundle was not fetched for %s: %s", Span(since), f.Error))
		}
	}
	e := s.BundleEndpoint
	if e == nil {
		return all
	}
	subject := "bundle endpoint " + e.Listen
	switch {
	case e.NotAfter != nil && !s.Time.Before(*e.NotAfter):
		all = append(all, Found("bundle-endpoint.failing", Critical, subject, "shows a certificate that ended at %s%s", stamp(*e.NotAfter), because(e.Error)))
	case e.Error != "":
		all = append(all, Found("bundle-endpoint.failing", Warning, subject, "goes on with its last certificate: %s", e.Error))
	case e.NotAfter != nil && e.NotAfter.Sub(s.Time) < endingWeb:
		all = append(all, Found("bundle-endpoint.failing", Warning, subject, "shows a certificate that ends in %s, at %s", Span(e.NotAfter.Sub(s.Time)), stamp(*e.NotAfter)))
	}
	return all
}

// lastSuccess is when the bundle was fetched last, or the server started to try.
func (f *Federated) lastSuccess(s *State) time.Time {
	if f.LastSuccess != nil {
		return *f.LastSuccess
	}
	return s.startedOr(s.Time)
}

func (f *Federated) every() time.Duration {
	hint := time.Duration(f.RefreshHint * float64(time.Second))
	if hint == 0 {
		hint = refreshDefault
	}
	return min(max(hint, refreshShortest), refreshLongest)
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}
