package ceremony

import (
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

// The kinds of steps.
const (
	kindRoot   = "root"
	kindIssuer = "issuer"
	kindCross  = "cross"
	kindCRL    = "crl"
)

// Bounds of one ceremony: somebody should read it.
const (
	maxSteps   = 64
	maxRevoked = 10_000
)

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

// reasons of RFC 5280 section 5.3.1 that a full CRL has; certificateHold is not offered, since nothing lifts it here.
var reasons = map[string]int{
	"": 0, "keyCompromise": 1, "cACompromise": 2, "affiliationChanged": 3, "superseded": 4, "cessationOfOperation": 5,
	"privilegeWithdrawn": 9, "aACompromise": 10,
}

// step is a StepConfig with its values read.
type step struct {
	StepConfig
	field                  string // its path in the file
	keyType                ca.KeyType
	notBefore, notAfter    time.Time
	thisUpdate, nextUpdate time.Time
	revoked                []x509.RevocationListEntry
	made                   // filled in by the plan
}

// parse checks all that needs no other file.
func parse(c *Config) (trust.Domain, []*step, error) {
	td, err := trust.ParseDomain(c.TrustDomain)
	if err != nil {
		return td, nil, fmt.Errorf("trustDomain: %w; a ceremony is for exactly one (D10)", err)
	}
	switch {
	case c.AuditLog == "":
		return td, nil, errors.New("auditLog is missing; name a file, such as ceremony.jsonl")
	case c.Output == "":
		return td, nil, errors.New("output is missing; name a folder that does not exist yet")
	case len(c.Steps) == 0:
		return td, nil, errors.New("steps is empty; it should list what to make")
	case len(c.Steps)+len(c.Existing) > maxSteps:
		return td, nil, fmt.Errorf("steps: at most %d steps and existing authorities fit into one ceremony", maxSteps)
	}
	taken := map[string]bool{}
	for i, e := range c.Existing {
		field := fmt.Sprintf("existing[%d]", i)
		if err := takeName(taken, e.Name); err != nil {
			return td, nil, fmt.Errorf("%s.name: %w", field, err)
		}
		if e.Certificate == "" {
			return td, nil, fmt.Errorf("%s.certificate is missing; name a PEM file", field)
		}
	}
	var steps []*step
	for i, s := range c.Steps {
		p := &step{StepConfig: s, field: fmt.Sprintf("steps[%d]", i)}
		if err := takeName(taken, s.Name); err != nil {
			return td, nil, fmt.Errorf("%s.name: %w", p.field, err)
		}
		if err := p.parse(); err != nil {
			return td, nil, fmt.Errorf("%s (%s): %w", p.field, s.Name, err)
		}
		steps = append(steps, p)
	}
	return td, steps, nil
}

// takeName checks a name and keeps the names of its files for it.
func takeName(taken map[string]bool, name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("%q should be 1 to 40 lower-case letters, digits and dashes", name)
	}
	if taken[name] || taken[name+"-key"] {
		return fmt.Errorf("%q, or the name of its key's file, is taken already", name)
	}
	taken[name], taken[name+"-key"] = true, true
	return nil
}

func (s *step) parse() error {
	set := map[string]bool{
		"by": s.By != "", "of": s.Of != "", "key": s.Key != nil, "notBefore": s.NotBefore != "", "notAfter": s.NotAfter != "",
		"pathLen": s.PathLen != nil, "number": s.Number != 0, "thisUpdate": s.ThisUpdate != "", "nextUpdate": s.NextUpdate != "",
		"revoked": len(s.Revoked) > 0,
	}
	fields, known := map[string]string{ // required, then optional ones
		kindRoot:   "key notAfter|notBefore pathLen",
		kindIssuer: "by key notAfter|notBefore pathLen",
		kindCross:  "by of notAfter|notBefore pathLen",
		kindCRL:    "by number nextUpdate|thisUpdate revoked",
	}[s.Kind]
	if !known {
		return fmt.Errorf("kind: %q is not known; use root, issuer, cross or crl", s.Kind)
	}
	required, optional, _ := strings.Cut(fields, "|")
	for _, f := range slices.Sorted(maps.Keys(set)) {
		must := slices.Contains(strings.Fields(required), f)
		switch {
		case must && !set[f]:
			return fmt.Errorf("%s is missing; a %s needs %s", f, s.Kind, strings.ReplaceAll(required, " ", ", "))
		case set[f] && !must && !slices.Contains(strings.Fields(optional), f):
			return fmt.Errorf("%s is not for a %s", f, s.Kind)
		}
	}
	return errors.Join(s.parseTimes(), s.parseKey(), s.parseNumbers(), s.parseRevoked())
}

func (s *step) parseTimes() error {
	for _, t := range []struct {
		name, text string
		into       *time.Time
	}{
		{"notBefore", s.NotBefore, &s.notBefore}, {"notAfter", s.NotAfter, &s.notAfter},
		{"thisUpdate", s.ThisUpdate, &s.thisUpdate}, {"nextUpdate", s.NextUpdate, &s.nextUpdate},
	} {
		if t.text == "" {
			continue
		}
		var err error
		if *t.into, err = parseTime(t.text); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}
	return nil
}

func parseTime(text string) (time.Time, error) {
	t, err := time.Parse("2006-01-02T15:04:05Z", text)
	if err != nil || t.Nanosecond() != 0 {
		return t, fmt.Errorf("%q should be a time in UTC, to the second, like 2026-11-30T00:00:00Z", text)
	}
	return t, nil
}

func (s *step) parseKey() (err error) {
	switch k := s.Key; {
	case k == nil:
		return nil
	case (k.Generate == "") == (k.File == ""):
		return errors.New("key: set one of generate and file")
	case k.Generate != "":
		if s.keyType, err = ca.ParseKeyType(k.Generate); err != nil {
			return fmt.Errorf("key.generate: %w", err)
		}
	}
	return nil
}

func (s *step) parseNumbers() error {
	if s.PathLen != nil && (*s.PathLen < -1 || *s.PathLen > 10) {
		return fmt.Errorf("pathLen: %d should be 0 to 10, or -1 for any number", *s.PathLen)
	}
	if s.Number < 0 {
		return fmt.Errorf("number: %d should be 1 or more", s.Number)
	}
	return nil
}

func (s *step) parseRevoked() error {
	if len(s.Revoked) > maxRevoked {
		return fmt.Errorf("revoked: %d entries; at most %d fit", len(s.Revoked), maxRevoked)
	}
	for i, r := range s.Revoked {
		serial, ok := new(big.Int).SetString(r.Serial, 16)
		if !ok || len(r.Serial) > 40 || serial.Sign() <= 0 {
			return fmt.Errorf("revoked[%d].serial: %q should be a serial number in hex, as `chancery inspect` prints it", i, r.Serial)
		}
		at, err := parseTime(r.Time)
		if err != nil {
			return fmt.Errorf("revoked[%d].time: %w", i, err)
		}
		reason, known := reasons[r.Reason]
		if !known {
			return fmt.Errorf("revoked[%d].reason: %q is not known; use %s", i, r.Reason, strings.Join(slices.Sorted(maps.Keys(reasons))[1:], ", "))
		}
		s.revoked = append(s.revoked, x509.RevocationListEntry{SerialNumber: serial, RevocationTime: at, ReasonCode: reason})
	}
	return nil
}

// Check reports what is wrong with a ceremony's file by itself, without reading any other.
func Check(c *Config) error {
	_, _, err := parse(c)
	return err
}
