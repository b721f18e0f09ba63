package trust

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
)

// What docs/spiffe.md says of go-spiffe 2.9 is so: it authenticates a peer whose ID has no path, which a validator must refuse (X509-SVID section 5.2). What
// both must refuse, both refuse.
func TestGoSPIFFEVerifiesLess(t *testing.T) {
	c := newTestCA(t, "root")
	theirs := x509bundle.FromX509Authorities(spiffeid.RequireTrustDomainFromString("td"), []*x509.Certificate{c.cert})
	for name, tc := range map[string]struct {
		uri          string
		change       func(*x509.Certificate)
		ours, theirs bool
	}{
		"an SVID":             {"spiffe://td/a", nil, true, true},
		"no path":             {"spiffe://td", nil, false, true},
		"no digitalSignature": {"spiffe://td/a", func(x *x509.Certificate) { x.KeyUsage = x509.KeyUsageKeyAgreement }, false, true},
		"a CA":                {"spiffe://td/a", func(x *x509.Certificate) { x.IsCA = true }, false, false},
		"cRLSign":             {"spiffe://td/a", func(x *x509.Certificate) { x.KeyUsage |= x509.KeyUsageCRLSign }, false, false},
		"another domain":      {"spiffe://other/a", nil, false, false},
	} {
		cert, _ := c.leaf(t, tc.uri, tc.change)
		chain := []*x509.Certificate{cert}
		if _, _, err := Verify(chain, Only(c.bundle(t, "td")), time.Now()); (err == nil) != tc.ours {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := x509svid.Verify(chain, theirs); (err == nil) != tc.theirs {
			t.Errorf("%s: go-spiffe says %v; docs/spiffe.md says otherwise", name, err)
		}
	}
}
