package ca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/zlint"
	"github.com/chancery-project/chancery/trust"
)

// newIssuer makes a real root, issuer and audit log for a test.
func newIssuer(t testing.TB, c CreateConfig) (*Issuer, *Created, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	log, err := audit.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	if c.Domain.IsZero() {
		c.Domain = domain(t, "cluster.local")
	}
	c.Log, c.LogID = log, MinLogID+7
	made, err := Create(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := trust.NewBundle(c.Domain, 1, []*x509.Certificate{made.Root})
	if err != nil {
		t.Fatal(err)
	}
	i, err := NewIssuer(IssuerConfig{
		Domain: c.Domain, Key: made.IssuerKey, Chain: []*x509.Certificate{made.Issuer}, Bundle: bundle, LogID: c.LogID, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	return i, made, path
}

func domain(t testing.TB, s string) trust.Domain {
	t.Helper()
	d, err := trust.ParseDomain(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func id(t testing.TB, s string) trust.ID {
	t.Helper()
	id, err := trust.ParseID(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func profile(t testing.TB, c ProfileConfig) *Profile {
	t.Helper()
	p, err := NewProfile("workload", c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func publicKey(t testing.TB, kt KeyType) any {
	t.Helper()
	key, err := GenerateKey(kt)
	if err != nil {
		t.Fatal(err)
	}
	return key.Public()
}

// issue runs both steps.
func issue(t testing.TB, i *Issuer, p *Profile, r Request) (*x509.Certificate, error) {
	t.Helper()
	token, err := i.Prepare(p, r)
	if err != nil {
		return nil, err
	}
	c, err := i.Issue(t.Context(), token)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(c.DER)
	if err != nil {
		t.Fatal(err)
	}
	return cert, nil
}

func readLog(t *testing.T, path string) []audit.Record {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var out []audit.Record
	for line := range strings.Lines(string(data)) {
		var r audit.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		out = append(out, r)
	}
	return out
}

// intents counts them; results follow by themselves, some milliseconds later.
func intents(t *testing.T, path string) (n int) {
	t.Helper()
	for _, r := range readLog(t, path) {
		if r.Event == audit.Intent {
			n++
		}
	}
	return n
}

// Every key type of issuer and of subject gives a certificate that verifies and passes zlint's RFC subset.
func TestEveryKeyTypeVerifiesAndPassesZlint(t *testing.T) {
	for _, issuing := range []KeyType{P256, P384, Ed25519, RSA, MLDSA65} {
		t.Run("issuer "+string(issuing), func(t *testing.T) {
			t.Parallel()
			i, made, _ := newIssuer(t, CreateConfig{KeyType: issuing})
			p := profile(t, ProfileConfig{KeyEncipherment: true})
			if err := i.SelfCheck(p, ServerProfile()); err != nil {
				t.Fatal(err)
			}
			for _, c := range []*x509.Certificate{made.Root, made.Issuer} {
				if err := zlint.Certificate(c.Raw); err != nil {
					t.Errorf("%s: %v", c.Subject, err)
				}
			}
			want := id(t, "spiffe://cluster.local/ns/foo/sa/web")
			for _, kt := range []KeyType{P256, P384, Ed25519, RSA} {
				cert, err := issue(t, i, p, Request{ID: want, PublicKey: publicKey(t, kt)})
				if err != nil {
					t.Fatalf("%s: %v", kt, err)
				}
				chain := append([]*x509.Certificate{cert}, i.Chain()...)
				got, _, err := trust.Verify(chain, trust.Only(i.Bundle()), time.Now())
				if err != nil || got != want {
					t.Errorf("%s: verified as %q, error %v", kt, got, err)
				}
				if err := zlint.Certificate(cert.Raw); err != nil {
					t.Errorf("%s: %v", kt, err)
				}
			}
		})
	}
}

// TestDomainsThatCannotBeIssued: the standard's names that no certificate can have are refused before there is an authority for one.
func TestDomainsThatCannotBeIssued(t *testing.T) {
	for name, fine := range map[string]bool{
		"cluster.local": true, "mesh_a.example": true, "127.0.0.1": true, strings.Repeat("a", 63) + ".example": true,
		"mesh": true, "mesh.1": true, "-a.example": true, "a-.example": true, strings.Repeat("a", 255): true, "a..example": false, "a.": false, ".a": false,
	} {
		td, err := trust.ParseDomain(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := CheckDomain(td); (err == nil) != fine {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestInvariant1TokenIsOneShot(t *testing.T) {
	i, _, _ := newIssuer(t, CreateConfig{})
	other, _, _ := newIssuer(t, CreateConfig{})
	token, err := i.Prepare(profile(t, ProfileConfig{}), Request{ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, P256)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Issue(t.Context(), token); err == nil || !strings.Contains(err.Error(), "another issuer") {
		t.Errorf("another issuer took the token: %v", err)
	}
	if _, err := i.Issue(t.Context(), token); err != nil {
		t.Fatal(err)
	}
	if _, err := i.Issue(t.Context(), token); err == nil || !strings.Contains(err.Error(), "used before") {
		t.Errorf("the token was redeemed twice: %v", err)
	}
}

func TestInvariant3LeafEndsWithItsChainAndProfile(t *testing.T) {
	short, _, _ := newIssuer(t, CreateConfig{IssuerTTL: 10 * time.Minute, RootTTL: 20 * time.Minute})
	long, _, _ := newIssuer(t, CreateConfig{})
	p := profile(t, ProfileConfig{DefaultTTL: "2h", MaxTTL: "4h"})
	for _, tc := range []struct {
		name string
		i    *Issuer
		ask  time.Duration
		want time.Duration
	}{
		{"default", long, 0, 2 * time.Hour},
		{"negative takes the default (D20)", long, -time.Hour, 2 * time.Hour},
		{"as asked", long, time.Hour, time.Hour},
		{"no shorter than sensible", long, time.Second, MinTTL},
		{"clamped to the profile (D20)", long, 100 * time.Hour, 4 * time.Hour},
		{"clamped to the chain", short, time.Hour, 10 * time.Minute},
	} {
		cert, err := issue(t, tc.i, p, Request{ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, P256), TTL: tc.ask})
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		if got := time.Until(cert.NotAfter); got > tc.want || got < tc.want-5*time.Second {
			t.Errorf("%s: lives %s, want %s", tc.name, got, tc.want)
		}
	}
}

func TestInvariant10NoLogNoSignature(t *testing.T) {
	i, made, path := newIssuer(t, CreateConfig{})
	before := intents(t, path)
	full, err := audit.Open("/dev/full") // each write fails: no space left on device
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	broken, err := NewIssuer(IssuerConfig{
		Domain: i.domain, Key: signCounter{made.IssuerKey, t}, Chain: i.chain, Bundle: i.bundle, LogID: i.logID, Log: full,
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = broken.Prepare(profile(t, ProfileConfig{}), Request{ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, P256)})
	if !errors.Is(err, ErrNotReady) {
		t.Errorf("Prepare gave %v; want ErrNotReady", err)
	}
	if n := intents(t, path); n != before {
		t.Errorf("the other log grew from %d to %d intents", before, n)
	}
}

func TestLogHasIntentAndResult(t *testing.T) {
	i, _, path := newIssuer(t, CreateConfig{})
	cert, err := issue(t, i, profile(t, ProfileConfig{}), Request{
		ID: id(t, "spiffe://cluster.local/ns/a/sa/b"), PublicKey: publicKey(t, P256), TTL: 1000 * time.Hour, Requester: audit.Requester{Node: "n1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	i.log.Close()
	records := readLog(t, path)
	intent, result := records[len(records)-2], records[len(records)-1]
	if intent.Event != audit.Intent || result.Event != audit.Issued || intent.Serial != result.Serial {
		t.Fatalf("last two records are %+v and %+v", intent, result)
	}
	if !intent.Clamped || intent.SPIFFEID != cert.URIs[0].String() || intent.Issuer != i.SKI() || intent.TBSHash == "" || intent.Requester.Node != "n1" {
		t.Errorf("intent is incomplete: %+v", intent)
	}
}

// A chain that verifies as it stands, but under which no leaf would, is refused before it is used.
func TestIssuerBelowAPathLengthOfZeroIsRefused(t *testing.T) {
	i, made, _ := newIssuer(t, CreateConfig{})
	key, err := GenerateKey(P256)
	if err != nil {
		t.Fatal(err)
	}
	template := *made.Issuer
	template.MaxPathLen, template.MaxPathLenZero, template.SubjectKeyId, template.AuthorityKeyId = -1, false, []byte{1}, nil
	template.Subject.CommonName = "below"
	der, err := x509.CreateCertificate(rand.Reader, &template, made.Issuer, key.Public(), made.IssuerKey)
	if err != nil {
		t.Fatal(err)
	}
	below, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	_, err = NewIssuer(IssuerConfig{
		Domain: i.domain, Key: key, Chain: []*x509.Certificate{below, made.Issuer}, Bundle: i.bundle, LogID: MinLogID, Log: i.log,
	})
	if err == nil || !strings.Contains(err.Error(), "path length") {
		t.Errorf("an issuer below one that allows none: %v", err)
	}
}

func TestRequestsRefused(t *testing.T) {
	i, _, _ := newIssuer(t, CreateConfig{})
	p := profile(t, ProfileConfig{KeyTypes: []string{"p256"}})
	good := id(t, "spiffe://cluster.local/ns/a/sa/b")
	p224, err := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	//lint:ignore SA1019 only the raw coordinates can hold what the parsers refuse
	offCurve := ecdsa.PublicKey{Curve: elliptic.P256(), X: big.NewInt(1), Y: big.NewInt(1)}
	for _, tc := range []struct {
		name string
		r    Request
		want error
	}{
		{"no key", Request{ID: good}, ErrKey},
		{"point not on the curve", Request{ID: good, PublicKey: &offCurve}, ErrKey},
		{"P-224", Request{ID: good, PublicKey: &p224.PublicKey}, ErrKey},
		{"key type not in profile", Request{ID: good, PublicKey: publicKey(t, RSA)}, ErrKey},
		{"no ID", Request{PublicKey: publicKey(t, P256)}, ErrName},
		{"another trust domain (D10)", Request{ID: id(t, "spiffe://other/ns/a/sa/b"), PublicKey: publicKey(t, P256)}, ErrName},
		{"reserved path (D15)", Request{ID: trust.SystemID(i.domain, "server"), PublicKey: publicKey(t, P256)}, ErrName},
		{"path outside the profile", Request{ID: id(t, "spiffe://cluster.local/x"), PublicKey: publicKey(t, P256)}, ErrName},
		{"DNS name", Request{ID: good, PublicKey: publicKey(t, P256), DNSNames: []string{"a.b"}}, ErrName},
		{"signing certificate", Request{ID: good, PublicKey: publicKey(t, P256), CA: &CARequest{}}, ErrName},
	} {
		if _, err := i.Prepare(p, tc.r); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v; want %v", tc.name, err, tc.want)
		}
	}
}

func TestD13SerialsHaveLogIDAndAreUnique(t *testing.T) {
	i, _, _ := newIssuer(t, CreateConfig{})
	seen := map[string]bool{}
	for range 1000 {
		s := i.serial()
		if len(s) != 20 || s[0]&0x80 != 0 || s[0] == 0 || s[3] != 7 || seen[string(s)] {
			t.Fatalf("serial %x", s)
		}
		seen[string(s)] = true
	}
}

// signCounter is a key that must not be used.
type signCounter struct {
	crypto.Signer
	t *testing.T
}

func (s signCounter) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) {
	s.t.Error("the key was used")
	return nil, errors.New("not to be used")
}
