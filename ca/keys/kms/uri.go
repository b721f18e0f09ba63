// Package kms owns keys in the key management service of a cloud: AWS KMS, Google Cloud KMS, Azure Key Vault. The service
// makes each key and never gives it out; a signature is a call to it.
//
// Each service works in builds with its tag only (awskms, gcpkms, azurekms), since their libraries would be most of the
// binary; in others Open says so. Credentials come from where the service's own library looks for them: the workload's
// identity, the environment, or the file that the URI names.
//
// It refuses credentials in the URI, and keys that lie elsewhere than in the region, key ring or vault that the URI names.
package kms

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// URI says which service holds the keys, and where in it.
type URI struct {
	scheme string
	attrs  map[string]string
}

// attribute says what a value may look like; place marks the one that is required.
type attribute struct {
	form  *regexp.Regexp
	place bool
	like  string
}

var file = attribute{like: "an absolute path"}

// schemes are the services, and what their URIs may say.
var schemes = map[string]map[string]attribute{
	"awskms": {
		"region":           {regexp.MustCompile(`^[a-z]{2}[a-z0-9-]{2,28}[0-9]$`), true, "a region, such as eu-central-1"},
		"profile":          {regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`), false, "a profile of the shared config files"},
		"credentials-file": file,
	},
	"gcpkms": {
		"ring":             {ringForm, true, "projects/PROJECT/locations/LOCATION/keyRings/RING"},
		"protection-level": {regexp.MustCompile(`^(software|hsm)$`), false, "software or hsm"},
		"credentials-file": file,
	},
	"azurekms": {
		"vault": {regexp.MustCompile(`^[A-Za-z][A-Za-z0-9-]{1,22}[A-Za-z0-9]$`), true, "the name of a Key Vault"},
		"hsm":   {regexp.MustCompile(`^(true|false)$`), false, "true or false"},
	},
}

var ringForm = regexp.MustCompile(`^projects/[a-z0-9:.-]{4,63}/locations/[a-zA-Z0-9_-]{1,63}/keyRings/[a-zA-Z0-9_-]{1,63}$`)

const examples = "awskms:region=eu-central-1, gcpkms:ring=projects/P/locations/L/keyRings/R or azurekms:vault=NAME"

// ParseURI reads SCHEME:NAME=VALUE;NAME=VALUE.
func ParseURI(s string) (*URI, error) {
	scheme, rest, ok := strings.Cut(s, ":")
	known := schemes[scheme]
	if !ok || known == nil || len(s) > 1024 {
		return nil, errors.New("it should be like " + examples)
	}
	u := &URI{scheme, map[string]string{}}
	for part := range strings.SplitSeq(rest, ";") {
		name, value, _ := strings.Cut(part, "=")
		a, ok := known[name]
		if _, twice := u.attrs[name]; !ok || twice {
			return nil, fmt.Errorf("attribute %.40q is not known, or there twice; %s has %s", name, scheme, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
		if a.form != nil && !a.form.MatchString(value) || a.form == nil && (!filepath.IsAbs(value) || strings.ContainsAny(value, "\x00\n")) {
			return nil, fmt.Errorf("%s should be %s", name, a.like)
		}
		u.attrs[name] = value
	}
	for name, a := range known {
		if a.place && u.attrs[name] == "" {
			return nil, fmt.Errorf("%s is missing; it should be %s", name, a.like)
		}
	}
	return u, nil
}

// String returns the URI, which holds no secret.
func (u *URI) String() string {
	parts := make([]string, 0, len(u.attrs))
	for _, name := range slices.Sorted(maps.Keys(u.attrs)) {
		parts = append(parts, name+"="+u.attrs[name])
	}
	return u.scheme + ":" + strings.Join(parts, ";")
}
