// Package federation owns how bundles of foreign trust domains are got from their bundle endpoints (SPIFFE Federation): the relationships
// that an admin set up, one fetch over HTTPS within bounds, and when the next one is due.
//
// It refuses to infer a relationship, to follow a redirect to what would be no endpoint's URL, and to judge what came by anything but the
// profile that was configured. It keeps no bundle and knows of no order among them: who takes a bundle says whether it is newer.
package federation

import (
	"errors"
	"fmt"
	"net/url"

	"github.com/chancery-project/chancery/trust"
)

// Profile is how an endpoint proves who it is (SPIFFE Federation section 5).
type Profile string

// Profiles. A client has both (section 5).
const (
	// Web is by a certificate for the host name of the URL.
	Web Profile = "https_web"
	// SPIFFE is by an X509-SVID for a SPIFFE ID that was configured.
	SPIFFE Profile = "https_spiffe"
)

// MaxRelationships bounds those of one server.
const MaxRelationships = 100

// maxURL bounds a URL, in bytes.
const maxURL = 2048

// Relationship says where the bundle of a foreign trust domain is got. The three that are required, domain, URL and profile, are never
// inferred from one another (section 5.1).
type Relationship struct {
	Domain     trust.Domain
	URL        string
	Profile    Profile
	EndpointID trust.ID // of SPIFFE only: who the endpoint must be
}

// Check refuses a relationship that is not whole. The error begins with the field.
func (r *Relationship) Check() error {
	if r.Domain.IsZero() {
		return errors.New("trustDomain is missing; name the foreign trust domain")
	}
	if _, err := parseURL(r.URL); err != nil {
		return fmt.Errorf("url: %w", err)
	}
	switch {
	case r.Profile == "":
		return fmt.Errorf("profile is missing; it is %s if the endpoint has a certificate for its host name, %s if it has an SVID", Web, SPIFFE)
	case r.Profile != Web && r.Profile != SPIFFE:
		return fmt.Errorf("profile: %.40q is not known; it should be %s or %s", r.Profile, Web, SPIFFE)
	case r.Profile == SPIFFE && r.EndpointID.IsZero():
		return fmt.Errorf("endpointID is missing; with %s, name the SPIFFE ID that the endpoint must prove", SPIFFE)
	case r.Profile == Web && !r.EndpointID.IsZero():
		return fmt.Errorf("endpointID: with %s the endpoint is verified by its host name; leave it out, or use %s", Web, SPIFFE)
	}
	return nil
}

// SelfServing reports whether the endpoint proves itself by an SVID of the very domain whose bundle it serves (section 5.2.2).
func (r *Relationship) SelfServing() bool {
	return r.Profile == SPIFFE && r.EndpointID.Domain() == r.Domain
}

// parseURL reads the URL of an endpoint (section 5.1): https, a host, no user information.
func parseURL(s string) (*url.URL, error) {
	if s == "" {
		return nil, errors.New("it is missing; an endpoint's URL is like https://spire.example:8443/bundle")
	}
	if len(s) > maxURL {
		return nil, fmt.Errorf("it has %d bytes; at most %d are allowed", len(s), maxURL)
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, fmt.Errorf("%.80q is no URL; an endpoint's URL is like https://spire.example:8443/bundle", s)
	}
	return u, checkURL(u)
}

func checkURL(u *url.URL) error {
	switch {
	case u.User != nil: // not printed: it may be a password
		return errors.New("it has user information before the host, which an endpoint's URL must not have")
	case u.Scheme != "https":
		return fmt.Errorf("%.200q should begin with https://", u.Redacted())
	case u.Hostname() == "":
		return fmt.Errorf("%.200q names no host", u.Redacted())
	case u.Fragment != "":
		return fmt.Errorf("%.200q has a fragment, which is never sent; leave out what begins with #", u.Redacted())
	}
	return nil
}
