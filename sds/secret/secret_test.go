package secret

import (
	"errors"
	"testing"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"

	"github.com/chancery-project/chancery/trust"
)

func TestEmptyBundleTrustsNobody(t *testing.T) {
	d, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	empty, err := trust.NewBundle(d, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	roots := Roots(nil, nil, nil).GetValidationContext().GetTrustedCa().GetInlineBytes()
	certs, err := trust.ParseCertificates(roots) // Envoy verifies nothing if trusted_ca is empty
	if err != nil || len(certs) != 1 || !certs[0].IsCA {
		t.Fatalf("roots of an empty bundle: %v, %v", certs, err)
	}
	all, err := RootsByDomain([]*trust.Bundle{empty}, nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := new(tlsv3.SPIFFECertValidatorConfig)
	if err := all.GetValidationContext().GetCustomValidatorConfig().GetTypedConfig().UnmarshalTo(cfg); err != nil {
		t.Fatal(err)
	}
	if got := cfg.GetTrustDomains()[0].GetTrustBundle().GetInlineBytes(); string(got) != string(roots) {
		t.Errorf("the SPIFFE validator's roots of an empty bundle are %q", got)
	}
}

func TestCacheMakesOnce(t *testing.T) {
	var c Cache
	made := 0
	build := func() (*tlsv3.Secret, error) { made++; return Nobody(), nil }
	first, err := c.Get("a", "1", build)
	if err != nil {
		t.Fatal(err)
	}
	again, err := c.Get("a", "1", build)
	if err != nil || again != first || made != 1 {
		t.Errorf("made %d times, err %v", made, err)
	}
	for _, key := range []cacheKey{{"b", "1"}, {"a", "2"}} {
		other, err := c.Get(key.name, key.version, build)
		if err != nil || other == first || other.Name != key.name || other.Version != key.version {
			t.Errorf("%v: got %v, %v", key, other, err)
		}
	}
	if _, err := c.Get("c", "1", func() (*tlsv3.Secret, error) { return nil, errors.New("no") }); err == nil {
		t.Error("a failure to build was hidden")
	}
	if _, err := c.Get("c", "1", build); err != nil {
		t.Errorf("a failure was remembered: %v", err)
	}
}

func TestVersionSeparatesParts(t *testing.T) {
	seen := make(map[string]bool)
	for _, v := range []string{
		Version("x", []byte("ab"), []byte("c")), Version("x", []byte("a"), []byte("bc")), Version("x", []byte("abc")), Version("y", []byte("abc")), Version("x"),
	} {
		if seen[v] || len(v) != 32 {
			t.Errorf("version %q occurs twice or has the wrong length", v)
		}
		seen[v] = true
	}
}
