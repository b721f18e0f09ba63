package ca

import (
	"crypto/x509"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/trust"
)

// The bounds within which profiles may set lifetimes.
const (
	DefaultTTL      = time.Hour
	DefaultMaxTTL   = 24 * time.Hour
	DefaultBackdate = time.Minute
	MinTTL          = 5 * time.Second      // below it, renewal at half life outruns a slow network
	LeafTTLLimit    = 90 * 24 * time.Hour  // of a leaf, in any profile
	backdateLimit   = time.Hour            // of NotBefore
	maxNames        = 64                   // DNS names or IPs in one certificate
	maxTTLSeconds   = int64(1<<63-1) / 1e9 // a larger number of seconds overflows time.Duration
)

// ProfileConfig is a certificate profile as written in a config file. Every field has a usable zero value.
type ProfileConfig struct {
	// DefaultTTL is the lifetime of a certificate whose request names none, as a Go duration. Default 1h, or
	// MaxTTL if that is shorter.
	DefaultTTL string `json:"defaultTTL,omitempty"`
	// MaxTTL is the longest lifetime; longer requests are clamped to it (decision D20). Default 24h, at most 2160h.
	MaxTTL string `json:"maxTTL,omitempty"`
	// Backdate is how far NotBefore lies before signing, for clocks that run behind. Default 1m, at most 1h.
	Backdate string `json:"backdate,omitempty"`
	// KeyTypes lists the accepted types of the subject's key: p256, p384, ed25519, rsa. Default all.
	KeyTypes []string `json:"keyTypes,omitempty"`
	// IDPaths lists patterns of SPIFFE ID paths that may be issued, matched segment by segment; a segment "*" matches
	// any one segment. Default: /ns/*/sa/*.
	IDPaths []string `json:"idPaths,omitempty"`
	// KeyEncipherment adds that usage to RSA certificates, for TLS 1.2 peers with RSA key exchange. Default false.
	KeyEncipherment bool `json:"keyEncipherment,omitempty"`
}

// Profile is a validated set of rules for one kind of certificate. It is immutable.
type Profile struct {
	name                         string
	defaultTTL, maxTTL, backdate time.Duration
	keyTypes                     []KeyType
	paths                        [][]string
	keyEncipherment              bool
	names                        bool // DNS names and IPs may be asked for: only the server's own profile
	ca                           bool // signing certificates: only the root and issuer profiles
}

// NewProfile checks a profile; name goes into errors and the audit log.
func NewProfile(name string, c ProfileConfig) (*Profile, error) {
	p := &Profile{name: name, keyEncipherment: c.KeyEncipherment}
	var err error
	if p.maxTTL, err = duration(c.MaxTTL, DefaultMaxTTL); err != nil {
		return nil, fmt.Errorf("profile %s: maxTTL: %w", name, err)
	}
	if p.defaultTTL, err = duration(c.DefaultTTL, min(DefaultTTL, p.maxTTL)); err != nil {
		return nil, fmt.Errorf("profile %s: defaultTTL: %w", name, err)
	}
	if p.backdate, err = duration(c.Backdate, DefaultBackdate); err != nil {
		return nil, fmt.Errorf("profile %s: backdate: %w", name, err)
	}
	switch {
	case p.defaultTTL < MinTTL:
		return nil, fmt.Errorf("profile %s: defaultTTL %s is below %s", name, p.defaultTTL, MinTTL)
	case p.maxTTL > LeafTTLLimit:
		return nil, fmt.Errorf("profile %s: maxTTL %s is above %s", name, p.maxTTL, LeafTTLLimit)
	case p.defaultTTL > p.maxTTL:
		return nil, fmt.Errorf("profile %s: defaultTTL %s is above maxTTL %s", name, p.defaultTTL, p.maxTTL)
	case p.backdate < 0 || p.backdate > backdateLimit:
		return nil, fmt.Errorf("profile %s: backdate %s is not between 0s and %s", name, p.backdate, backdateLimit)
	}
	if p.keyTypes, err = parseKeyTypes(c.KeyTypes); err != nil {
		return nil, fmt.Errorf("profile %s: keyTypes: %w", name, err)
	}
	if p.paths, err = parsePaths(c.IDPaths); err != nil {
		return nil, fmt.Errorf("profile %s: idPaths: %w", name, err)
	}
	return p, nil
}

// ServerProfile returns the profile of Chancery's own server certificate: the ID spiffe://TD/chancery/server with the
// DNS names and IPs under which clients reach it (decision D15).
func ServerProfile() *Profile {
	return &Profile{
		name: "server", defaultTTL: DefaultMaxTTL, maxTTL: DefaultMaxTTL, backdate: DefaultBackdate,
		keyTypes: []KeyType{P256}, paths: [][]string{{"chancery", "server"}}, names: true,
	}
}

// Longest lifetimes of signing certificates.
const (
	RootTTLLimit   = 25 * 365 * 24 * time.Hour
	IssuerTTLLimit = 10 * 365 * 24 * time.Hour
)

// CeremonyProfile returns the profile of a signing certificate in a ceremony: root, or another kind.
func CeremonyProfile(kind string) *Profile {
	if kind == "root" {
		return signingProfile(kind, RootTTLLimit)
	}
	return signingProfile(kind, IssuerTTLLimit)
}

func rootProfile(ttl time.Duration) *Profile   { return signingProfile("root", ttl) }
func issuerProfile(ttl time.Duration) *Profile { return signingProfile("issuer", ttl) }

func signingProfile(name string, ttl time.Duration) *Profile {
	return &Profile{
		name: name, defaultTTL: ttl, maxTTL: ttl, backdate: DefaultBackdate,
		keyTypes: []KeyType{P256, P384, Ed25519, RSA, MLDSA65}, ca: true,
	}
}

// Name returns the profile's name.
func (p *Profile) Name() string { return p.name }

// DefaultTTL returns the lifetime of a certificate whose request names none.
func (p *Profile) DefaultTTL() time.Duration { return p.defaultTTL }

// MaxTTL returns the longest lifetime that the profile gives.
func (p *Profile) MaxTTL() time.Duration { return p.maxTTL }

// Backdate returns how far NotBefore lies before signing.
func (p *Profile) Backdate() time.Duration { return p.backdate }

// Lifetime returns the lifetime for a requested one: the default for none, the maximum for too much (decision D20), and
// MinTTL for what would be over before it arrives.
func (p *Profile) Lifetime(asked time.Duration) time.Duration {
	if asked <= 0 {
		return p.defaultTTL
	}
	return min(max(asked, MinTTL), p.maxTTL)
}

// Seconds converts a requested lifetime in seconds; what overflows is an error (decision D20).
func Seconds(n int64) (time.Duration, error) {
	if n > maxTTLSeconds {
		return 0, fmt.Errorf("lifetime of %d seconds is out of range", n)
	}
	return time.Duration(max(n, 0)) * time.Second, nil
}

// allows says why the profile does not give what is asked for a key of this type, as ErrKey or ErrName; nil if it does.
func (p *Profile) allows(r *Request, kt KeyType) error {
	if p.ca != (r.CA != nil) {
		return fmt.Errorf("%w: profile %s cannot be used for this kind of certificate", ErrName, p.name)
	}
	if !slices.Contains(p.keyTypes, kt) {
		return fmt.Errorf("%w: profile %s does not accept %s keys; it accepts %v", ErrKey, p.name, kt, p.keyTypes)
	}
	if p.ca {
		return nil
	}
	if r.ID.IsZero() {
		return fmt.Errorf("%w: no SPIFFE ID given", ErrName)
	}
	if !slices.ContainsFunc(p.paths, func(pat []string) bool { return matchPath(pat, r.ID.Path()) }) {
		return fmt.Errorf("%w: profile %s does not issue the ID %s; allowed paths are %s", ErrName, p.name, r.ID, p.pathList())
	}
	if n := len(r.DNSNames) + len(r.IPs); n > 0 && !p.names || n > maxNames {
		return fmt.Errorf("%w: profile %s does not issue %d DNS names and IPs", ErrName, p.name, n)
	}
	return nil
}

// AllowsPath reports whether the profile issues an ID of this path, whatever its trust domain.
func (p *Profile) AllowsPath(id trust.ID) bool {
	return !id.IsZero() && id.Path() != "" && slices.ContainsFunc(p.paths, func(pat []string) bool { return matchPath(pat, id.Path()) })
}

func (p *Profile) pathList() string {
	var out []string
	for _, pat := range p.paths {
		out = append(out, "/"+strings.Join(pat, "/"))
	}
	return strings.Join(out, ", ")
}

func matchPath(pattern []string, path string) bool {
	segs := strings.Split(path[1:], "/")
	return slices.EqualFunc(pattern, segs, func(p, s string) bool { return p == "*" || p == s })
}

func parsePaths(in []string) ([][]string, error) {
	if len(in) == 0 {
		return [][]string{{"ns", "*", "sa", "*"}}, nil
	}
	var out [][]string
	for _, s := range in {
		if !strings.HasPrefix(s, "/") {
			return nil, fmt.Errorf("pattern %q does not start with a slash; write it like /ns/*/sa/*", s)
		}
		// "*" is no legal ID character, so a pattern is legal if the path with a letter in its place is.
		id, err := trust.ParseID("spiffe://td" + strings.ReplaceAll(s, "*", "a"))
		if err != nil {
			return nil, fmt.Errorf("pattern %q: %w", s, err)
		}
		if id.Reserved() {
			return nil, fmt.Errorf("pattern %q: paths under /chancery/ are reserved", s)
		}
		segs := strings.Split(s[1:], "/")
		for i, seg := range segs {
			if strings.Contains(seg, "*") && seg != "*" {
				return nil, fmt.Errorf("pattern %q: segment %q mixes * with text; * stands for one whole segment", s, seg)
			}
			if i == 0 && seg == "*" {
				return nil, fmt.Errorf("pattern %q: the first segment may not be *, it would cover the reserved /chancery/", s)
			}
		}
		out = append(out, segs)
	}
	return out, nil
}

func parseKeyTypes(in []string) ([]KeyType, error) {
	if len(in) == 0 {
		return []KeyType{P256, P384, Ed25519, RSA}, nil
	}
	var out []KeyType
	for _, s := range in {
		t, err := ParseKeyType(s)
		if err != nil {
			return nil, err
		}
		switch {
		case t == MLDSA65:
			return nil, fmt.Errorf("%q is for roots and issuers only, since proxies make no handshake with such leaves; use p256, p384, ed25519 or rsa", s)
		case slices.Contains(out, t):
			return nil, fmt.Errorf("%q is listed twice", s)
		}
		out = append(out, t)
	}
	return out, nil
}

func duration(s string, def time.Duration) (time.Duration, error) {
	if s == "" {
		return def, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration; write it like 90s, 15m or 24h", s)
	}
	return d, nil
}

// Request asks for one certificate.
type Request struct {
	ID        trust.ID
	PublicKey any           // from the CSR; TypeOf says which are accepted
	TTL       time.Duration // 0 or less: the profile's default

	DNSNames []string     // only under the server profile
	IPs      []netip.Addr // only under the server profile
	CA       *CARequest   // set for signing certificates, under the root and issuer profiles

	Attestation *Attestation    // copied into the certificate (decision D16); nil for none
	Requester   audit.Requester // who asked, for the audit log
}

// CARequest holds what only signing certificates have.
type CARequest struct {
	Domain     trust.Domain // the SPIFFE ID of a signing certificate has no path (X509-SVID section 3.2)
	CommonName string       // made unique with the key's hash
	PathLen    int          // how many CA certificates may follow; 0 = only leaves, below 0 = no bound

	// Of ceremonies, which fix what others leave to the profile:
	NotBefore time.Time         // zero: the profile's backdate before now
	NotAfter  time.Time         // not cut, but refused if the issuer's chain ends before; zero: the profile's lifetime, cut
	Existing  *x509.Certificate // of an authority that gets a cross-certificate: its subject and key, whose ID is kept
}
