package san

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"strings"
	"testing"
)

func with(value []byte) *x509.Certificate {
	return &x509.Certificate{Extensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 15}, Value: []byte{1}}, {Id: oidSAN, Value: value}}}
}

func TestURI(t *testing.T) {
	uri := func(s string) string { return "\x86" + string(rune(len(s))) + s }
	sequence := func(s string) string { return "\x30" + string(rune(len(s))) + s }
	for name, tc := range map[string]struct{ value, want, err string }{
		"one":              {sequence(uri("SPIFFE://a/b#")), "SPIFFE://a/b#", ""},
		"beside a host":    {sequence("\x82\x01x" + uri("spiffe://a/b")), "spiffe://a/b", ""},
		"two":              {sequence(uri("a:b") + uri("a:b")), "", "2 URI SANs"},
		"none":             {sequence("\x82\x01x"), "", "0 URI SANs"},
		"cut off":          {"\x30\x05\x86\x04ab", "", "do not parse"},
		"something behind": {sequence(uri("a:b")) + "x", "", "do not parse"},
		"a name cut off":   {sequence("\x86\x05ab"), "", "do not parse"},
	} {
		got, err := URI(with([]byte(tc.value)))
		if got != tc.want || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if _, err := URI(new(x509.Certificate)); err == nil {
		t.Error("a certificate without names has a URI")
	}
}

func FuzzURI(f *testing.F) {
	f.Add([]byte("\x30\x05\x86\x03a:b"))
	f.Add([]byte("\x30\x0a\x86\x03a:b\x86\x03a:c"))
	f.Fuzz(func(t *testing.T, value []byte) {
		uri, err := URI(with(value))
		if err == nil && !strings.Contains(string(value), uri) {
			t.Errorf("%q is not in %q", uri, value)
		}
	})
}
