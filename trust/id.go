package trust

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Limits of SPIFFE-ID section 2.1 and 2.3, in bytes.
const (
	MaxDomainLen = 255
	MaxIDLen     = 2048
)

const scheme = "spiffe://"

// reservedPath is the first path segment of Chancery's own identities (decision D15): never derived from a
// credential, never impersonated.
const reservedPath = "/chancery/"

// Domain is a trust domain name, such as "cluster.local". The zero value is no domain.
type Domain struct{ name string }

// ParseDomain reads a trust domain name: 1 to 255 bytes of a-z, 0-9, '.', '-', '_' (SPIFFE-ID section 2.1).
func ParseDomain(s string) (Domain, error) {
	switch {
	case s == "":
		return Domain{}, errors.New("trust domain is empty; it should be a name like cluster.local")
	case len(s) > MaxDomainLen:
		return Domain{}, fmt.Errorf("trust domain is %d bytes long; at most %d are allowed", len(s), MaxDomainLen)
	case strings.HasPrefix(s, scheme):
		return Domain{}, fmt.Errorf("trust domain %.80q carries the scheme; give the name alone, like cluster.local", s)
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; !isLower(c) && !isDigit(c) && c != '.' && c != '-' && c != '_' {
			return Domain{}, fmt.Errorf("trust domain %.80q has the character %q; only a-z, 0-9, '.', '-' and '_' are allowed", s, c)
		}
	}
	return Domain{s}, nil
}

// String returns the bare name.
func (d Domain) String() string { return d.name }

// IsZero reports whether d is the zero value.
func (d Domain) IsZero() bool { return d.name == "" }

// URI returns "spiffe://" and the name, the ID of the trust domain itself.
func (d Domain) URI() string { return scheme + d.name }

// ID is a SPIFFE ID with a path, such as spiffe://cluster.local/ns/foo/sa/web. It is comparable; the zero value is
// no ID. An ID without a path names a trust domain, not a workload: see Domain.
type ID struct {
	uri   string
	slash int // index of the path in uri
}

// ParseID reads a SPIFFE ID strictly: lower-case scheme and domain, at least one path segment, no empty, "." or ".."
// segment, no query, fragment, port, user or percent-encoding, at most 2,048 bytes (SPIFFE-ID section 2).
func ParseID(s string) (ID, error) {
	if len(s) > MaxIDLen {
		return ID{}, fmt.Errorf("SPIFFE ID is %d bytes long; at most %d are allowed", len(s), MaxIDLen)
	}
	rest, ok := strings.CutPrefix(s, scheme)
	if !ok {
		return ID{}, fmt.Errorf("%.80q is not a SPIFFE ID; it should start with spiffe://", s)
	}
	name, _, ok := strings.Cut(rest, "/")
	if !ok {
		return ID{}, fmt.Errorf("SPIFFE ID %.80q has no path; a workload's ID is like spiffe://cluster.local/ns/NS/sa/SA", s)
	}
	if _, err := ParseDomain(name); err != nil {
		return ID{}, fmt.Errorf("SPIFFE ID %.80q: %w", s, err)
	}
	slash := len(scheme) + len(name)
	if err := checkPath(s[slash:]); err != nil {
		return ID{}, fmt.Errorf("SPIFFE ID %.80q: %w", s, err)
	}
	return ID{s, slash}, nil
}

func checkPath(path string) error {
	for seg := range strings.SplitSeq(path[1:], "/") {
		switch seg {
		case "":
			return errors.New("the path has an empty segment or a trailing slash")
		case ".", "..":
			return fmt.Errorf("the path has the segment %q; relative segments are not allowed", seg)
		}
		for i := 0; i < len(seg); i++ {
			c := seg[i]
			if !isLower(c) && !isDigit(c) && (c < 'A' || c > 'Z') && c != '.' && c != '-' && c != '_' {
				return fmt.Errorf("the path has the character %q; only letters, digits, '.', '-' and '_' are allowed", c)
			}
		}
	}
	return nil
}

func isLower(c byte) bool { return c >= 'a' && c <= 'z' }
func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// WorkloadID returns spiffe://TD/ns/NAMESPACE/sa/ACCOUNT, the ID of a Kubernetes service account.
func WorkloadID(d Domain, namespace, account string) (ID, error) {
	if d.IsZero() {
		return ID{}, errors.New("no trust domain given")
	}
	if strings.Contains(namespace, "/") || strings.Contains(account, "/") {
		return ID{}, fmt.Errorf("namespace %.80q or service account %.80q has a slash", namespace, account)
	}
	return ParseID(d.URI() + "/ns/" + namespace + "/sa/" + account)
}

// SystemID returns spiffe://TD/chancery/NAME, an identity of Chancery's own, such as NAME "server" (decision D15).
func SystemID(d Domain, name string) ID {
	return ID{d.URI() + reservedPath + name, len(d.URI())}
}

// String returns the whole URI.
func (id ID) String() string { return id.uri }

// IsZero reports whether id is the zero value.
func (id ID) IsZero() bool { return id.uri == "" }

// Domain returns the trust domain.
func (id ID) Domain() Domain {
	if id.IsZero() {
		return Domain{}
	}
	return Domain{id.uri[len(scheme):id.slash]}
}

// Path returns the path with its leading slash.
func (id ID) Path() string { return id.uri[id.slash:] }

// Workload returns namespace and service account of an ID of the form /ns/NS/sa/SA; ok is false for any other.
func (id ID) Workload() (namespace, account string, ok bool) {
	rest, found := strings.CutPrefix(id.Path(), "/ns/")
	if !found {
		return "", "", false
	}
	namespace, rest, found = strings.Cut(rest, "/")
	if !found {
		return "", "", false
	}
	account, found = strings.CutPrefix(rest, "sa/")
	if !found || account == "" || strings.Contains(account, "/") {
		return "", "", false
	}
	return namespace, account, true
}

// Reserved reports whether the ID lies under /chancery/, which only Chancery itself may hold (decision D15).
func (id ID) Reserved() bool {
	return strings.HasPrefix(id.Path(), reservedPath) || id.Path() == strings.TrimSuffix(reservedPath, "/")
}

// WithDomain returns the same path in another trust domain.
func (id ID) WithDomain(d Domain) ID { return ID{d.URI() + id.Path(), len(d.URI())} }

// URL returns the ID as the URI SAN of a certificate template.
func (id ID) URL() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: id.Domain().String(), Path: id.Path()}
}
