package spiffebundle

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/mldsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"fmt"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	gospiffe "github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/chancery-project/chancery/trust"
)

func domain(t testing.TB, name string) trust.Domain {
	t.Helper()
	td, err := trust.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	return td
}

func root(t testing.TB, name string, key crypto.Signer) *x509.Certificate {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, URIs: []*url.URL{{Scheme: "spiffe", Host: "td"}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func ecRoot(t testing.TB, name string) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return root(t, name, key)
}

func b64(c *x509.Certificate) string { return base64.StdEncoding.EncodeToString(c.Raw) }

// x5c returns an entry with these members more.
func x5c(members string, certs ...*x509.Certificate) string {
	var all []string
	for _, c := range certs {
		all = append(all, `"`+b64(c)+`"`)
	}
	return `{"kty":"EC","use":"x509-svid","x5c":[` + strings.Join(all, ",") + `]` + members + `}`
}

func keys(entries ...string) string { return `{"keys":[` + strings.Join(entries, ",") + `]}` }

// What a consumer must read, and what it must ignore (Trust Domain and Bundle section 4, X509-SVID section 6.2).
func TestParse(t *testing.T) {
	a, b := ecRoot(t, "a"), ecRoot(t, "b")
	const jwt = `{"kty":"EC","use":"jwt-svid","kid":"k1","crv":"P-256","x":"AA","y":"AA"}`
	for name, tc := range map[string]struct {
		data    string
		roots   []*x509.Certificate
		keys    int
		ignored string // part of what is said of the entry that is ignored
	}{
		"no keys":                      {keys(), nil, 0, ""},
		"two roots":                    {keys(x5c("", a), x5c("", b)), []*x509.Certificate{a, b}, 0, ""},
		"one root twice":               {keys(x5c("", a), x5c("", a)), []*x509.Certificate{a}, 0, ""},
		"a key type that is not known": {keys(`{"kty":"XYZ","use":"x509-svid","x5c":17}`, x5c("", a)), []*x509.Certificate{a}, 0, `"XYZ" is not known`},
		"symmetric":                    {keys(`{"kty":"oct","use":"jwt-svid","kid":"k","k":"AA"}`), nil, 0, `"oct" is not known`},
		"no key type":                  {keys(`{"use":"x509-svid"}`, x5c("", a)), []*x509.Certificate{a}, 0, "no key type"},
		"key type is no string":        {keys(`{"kty":1,"use":"x509-svid"}`), nil, 0, "no key type"},
		"a use that is not known":      {keys(`{"kty":"EC","use":"sig"}`, x5c("", a)), []*x509.Certificate{a}, 0, `"sig" is not known`},
		"use in capitals":              {keys(`{"kty":"EC","use":"X509-SVID","x5c":[]}`), nil, 0, "not known"},
		"no use":                       {keys(`{"kty":"EC"}`, x5c("", a)), []*x509.Certificate{a}, 0, "no use"},
		"no x5c":                       {keys(`{"kty":"EC","use":"x509-svid"}`, x5c("", a)), []*x509.Certificate{a}, 0, "no certificate"},
		"x5c empty":                    {keys(`{"kty":"EC","use":"x509-svid","x5c":[]}`, x5c("", a)), []*x509.Certificate{a}, 0, "no certificate"},
		"x5c null":                     {keys(`{"kty":"EC","use":"x509-svid","x5c":null}`), nil, 0, "no certificate"},
		"x5c of two":                   {keys(x5c("", a, b)), []*x509.Certificate{a}, 0, ""},
		"x5c with junk behind":         {keys(`{"kty":"EC","use":"x509-svid","x5c":["` + b64(a) + `",null,7]}`), []*x509.Certificate{a}, 0, ""},
		"a root with a key ID":         {keys(x5c(`,"kid":"k"`, a)), []*x509.Certificate{a}, 0, ""},
		"members nobody knows":         {`{"keys":[` + x5c(`,"tainted":true,"key_ops":[]`, a) + `],"x":{"y":[1,null]},"Keys":3}`, []*x509.Certificate{a}, 0, ""},
		"authorities of JWT and WIT":   {keys(jwt, strings.ReplaceAll(strings.ReplaceAll(jwt, "jwt", "wit"), "k1", "k2")), nil, 2, ""},
		"of a JWT without an ID":       {keys(`{"kty":"EC","use":"jwt-svid"}`), nil, 0, "no key ID"},
	} {
		got, err := Parse(domain(t, "td"), []byte(tc.data))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		slices.SortFunc(tc.roots, func(x, y *x509.Certificate) int { return bytes.Compare(x.Raw, y.Raw) })
		if !slices.EqualFunc(got.Roots, tc.roots, (*x509.Certificate).Equal) || len(got.Keys) != tc.keys {
			t.Errorf("%s: %d roots, %d keys", name, len(got.Roots), len(got.Keys))
		}
		if all := strings.Join(got.Ignored, "; "); (tc.ignored == "") != (all == "") || !strings.Contains(all, tc.ignored) {
			t.Errorf("%s: ignored %q; want %q", name, all, tc.ignored)
		}
		if got.HasSequence || got.RefreshHint != 0 || got.Domain.String() != "td" {
			t.Errorf("%s: sequence, refresh hint or domain out of nowhere", name)
		}
		// A bundle without keys that can be used is empty: it trusts nobody.
		if own, err := got.Trust(); err != nil || len(own.Roots()) != len(tc.roots) {
			t.Errorf("%s: as what is trusted: %v", name, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	a, b := ecRoot(t, "a"), ecRoot(t, "b")
	notCA := *a
	leaf := func() string {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true}
		if notCA.Raw, err = x509.CreateCertificate(rand.Reader, template, template, key.Public(), key); err != nil {
			t.Fatal(err)
		}
		return x5c("", &notCA)
	}
	const jwt = `{"kty":"EC","use":"jwt-svid","kid":"k"}`
	var many, manyKeys []string
	for i := range MaxEntries + 1 {
		many = append(many, `{"kty":"none"}`)
		if i <= MaxKeys {
			manyKeys = append(manyKeys, fmt.Sprintf(`{"kty":"EC","use":"jwt-svid","kid":"%d"}`, i))
		}
	}
	for name, tc := range map[string]struct{ data, want string }{
		"nothing":                         {"", "JSON object"},
		"null":                            {"null", "JSON object"},
		"an array":                        {"[]", "JSON object"},
		"no keys":                         {`{"spiffe_sequence":1}`, "no array of keys"},
		"keys null":                       {`{"keys":null}`, "no array of keys"},
		"keys in capitals":                {`{"KEYS":[]}`, "no array of keys"},
		"keys an object":                  {`{"keys":{}}`, "no array of keys"},
		"keys twice":                      {`{"keys":[],"keys":[]}`, "duplicate"},
		"kty twice":                       {keys(`{"kty":"EC","kty":"RSA"}`), "duplicate"},
		"a name twice, deep in":           {`{"keys":[],"x":[{"a":{"b":1,"b":2}}]}`, "duplicate"},
		"a name twice, escaped":           {`{"keys":[],"\u006beys":[]}`, "duplicate"},
		"not UTF-8":                       {"{\"keys\":[],\"x\":\"\xff\"}", "UTF-8"},
		"something behind":                {`{"keys":[]} {}`, "after top-level value"},
		"cut off":                         {`{"keys":[]`, "EOF"},
		"an entry that is no object":      {keys(`"EC"`), "keys[0]: it should be a JSON object"},
		"a sequence below 0":              {`{"keys":[],"spiffe_sequence":-1}`, "spiffe_sequence is -1"},
		"a sequence with a fraction":      {`{"keys":[],"spiffe_sequence":1.5}`, "spiffe_sequence is 1.5"},
		"a sequence of a string":          {`{"keys":[],"spiffe_sequence":"1"}`, "spiffe_sequence"},
		"a sequence of null":              {`{"keys":[],"spiffe_sequence":null}`, "spiffe_sequence"},
		"a sequence of 65 bits":           {`{"keys":[],"spiffe_sequence":18446744073709551616}`, "spiffe_sequence"},
		"a refresh hint below 0":          {`{"keys":[],"spiffe_refresh_hint":-5}`, "spiffe_refresh_hint"},
		"a refresh hint with a unit":      {`{"keys":[],"spiffe_refresh_hint":"5m"}`, "spiffe_refresh_hint"},
		"a certificate that is none":      {keys(`{"kty":"EC","use":"x509-svid","x5c":["AAAA"]}`), "x5c[0]"},
		"a certificate that is no base64": {keys(`{"kty":"EC","use":"x509-svid","x5c":["?"]}`), "in base64"},
		"base64 with line breaks":         {keys(`{"kty":"EC","use":"x509-svid","x5c":["` + b64(a)[:64] + `\u0020` + b64(a)[64:] + `"]}`), "in base64"},
		"an empty certificate":            {keys(`{"kty":"EC","use":"x509-svid","x5c":[""]}`), "in base64"},
		"x5c a string":                    {keys(`{"kty":"EC","use":"x509-svid","x5c":"` + b64(a) + `"}`), "an array"},
		"a leaf":                          {keys(leaf()), "not a CA certificate"},
		"the type of another key":         {keys(strings.Replace(x5c("", a), "EC", "RSA", 1)), "its key type is RSA"},
		"another key":                     {keys(x5c(`,"x":"`+string(encode(b.Raw[:32]))+`"`, a)), "its x is not that"},
		"another curve":                   {keys(x5c(`,"crv":"P-384"`, a)), "its crv is not that"},
		"a private key":                   {keys(`{"kty":"EC","use":"jwt-svid","kid":"k","d":"AA"}`), "a part of a private key"},
		"a root's private key":            {keys(x5c(`,"d":"AA"`, a)), "a part of a private key"},
		"a key ID twice":                  {keys(jwt, jwt), "occurs twice"},
		"a key ID for JWT and WIT":        {keys(jwt, strings.Replace(jwt, "jwt", "wit", 1)), "occurs twice"},
		"too many entries":                {keys(many...), "at most 1000"},
		"too many keys":                   {keys(manyKeys...), "at most 100"},
		"too many bytes":                  {`{"keys":[]` + strings.Repeat(" ", MaxBytes) + `}`, "at most 1048576"},
	} {
		got, err := Parse(domain(t, "td"), []byte(tc.data))
		if err == nil || got != nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v; want something about %q", name, err, tc.want)
		}
		if err != nil && len(err.Error()) > 400 {
			t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
		}
	}
	if _, err := Parse(trust.Domain{}, []byte(keys())); err == nil {
		t.Error("a bundle of no trust domain was read")
	}
}

// Roots of each kind of key that we make survive, in go-spiffe's eyes, too.
func TestMarshalIsStableAndRead(t *testing.T) {
	ec, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	ml, err := mldsa.GenerateKey(mldsa.MLDSA65())
	if err != nil {
		t.Fatal(err)
	}
	classic := []*x509.Certificate{root(t, "ec", ec), root(t, "ed", ed), root(t, "rsa", rsaKey)}
	for name, roots := range map[string][]*x509.Certificate{"none": nil, "classic": classic, "with ML-DSA": append(slices.Clone(classic), root(t, "ml", ml))} {
		own, err := trust.NewBundle(domain(t, "td"), 1<<63+5, roots)
		if err != nil {
			t.Fatal(err)
		}
		b := FromTrust(own, 5*time.Minute+time.Millisecond)
		data, err := b.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(data, []byte(`"kid"`)) {
			t.Errorf("%s: a root has a key ID: %s", name, data)
		}
		again, err := Parse(b.Domain, data)
		if err != nil {
			t.Fatalf("%s: %v in %s", name, err, data)
		}
		if !again.Same(b) || again.Sequence != 1<<63+5 || !again.HasSequence || again.RefreshHint != 5*time.Minute || again.Ignored != nil {
			t.Errorf("%s: read again: %+v", name, again)
		}
		if same, err := again.Marshal(); err != nil || !bytes.Equal(same, data) {
			t.Errorf("%s: written again it differs: %s, %s", name, data, same)
		}
		back, err := again.Trust()
		if err != nil || !back.SameRoots(own) || back.Generation() != own.Generation() {
			t.Errorf("%s: as what is trusted: %v", name, err)
		}
		if name == "with ML-DSA" { // go-spiffe 2.9 refuses the whole bundle for a key type that it does not know
			continue
		}
		theirs, err := gospiffe.Parse(spiffeid.RequireTrustDomainFromString("td"), data)
		if err != nil || len(theirs.X509Authorities()) != len(roots) {
			t.Errorf("%s: go-spiffe: %v", name, err)
		}
	}
}

// What go-spiffe writes is read, and its keys for JWTs survive.
func TestParseReadsGoSPIFFE(t *testing.T) {
	a := ecRoot(t, "a")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	theirs := gospiffe.New(spiffeid.RequireTrustDomainFromString("td"))
	theirs.AddX509Authority(a)
	theirs.SetSequenceNumber(7)
	theirs.SetRefreshHint(time.Minute)
	if err := theirs.AddJWTAuthority("jwt<1>", key.Public()); err != nil {
		t.Fatal(err)
	}
	data, err := theirs.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	b, err := Parse(domain(t, "td"), data)
	if err != nil {
		t.Fatal(err)
	}
	if len(b.Roots) != 1 || len(b.Keys) != 1 || b.Keys[0].ID != "jwt<1>" || b.Sequence != 7 || b.RefreshHint != time.Minute || b.Ignored != nil {
		t.Errorf("read as %+v", b)
	}
	out, err := b.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	again, err := gospiffe.Parse(spiffeid.RequireTrustDomainFromString("td"), out)
	if err != nil || !again.Equal(theirs) {
		t.Errorf("what came back differs: %v, %s", err, out)
	}
}

func TestParseBoundsTheRefreshHint(t *testing.T) {
	for text, want := range map[string]time.Duration{"0": 0, "1": time.Second, "300": 5 * time.Minute, "18446744073709551615": MaxRefreshHint} {
		b, err := Parse(domain(t, "td"), []byte(`{"keys":[],"spiffe_refresh_hint":`+text+`}`))
		if err != nil || b.RefreshHint != want {
			t.Errorf("%s: %v, %v", text, b, err)
		}
	}
}

func TestParsePEM(t *testing.T) {
	a, b := ecRoot(t, "a"), ecRoot(t, "b")
	got, err := ParsePEM(domain(t, "td"), trust.EncodeCertificates(a, b, a))
	if err != nil || len(got.Roots) != 2 || got.HasSequence {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := ParsePEM(domain(t, "td"), []byte("hello")); err == nil {
		t.Error("no PEM was read")
	}
}

// Trust Domain and Bundle section 5.
func TestBundleMap(t *testing.T) {
	a, b := ecRoot(t, "a"), ecRoot(t, "b")
	one := &Bundle{Domain: domain(t, "one"), Roots: []*x509.Certificate{a}, Sequence: 3, HasSequence: true, RefreshHint: time.Minute}
	two := &Bundle{Domain: domain(t, "two"), Roots: []*x509.Certificate{b}}
	data, err := MarshalMap(two, one)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(data, []byte("refresh_hint")) {
		t.Errorf("a refresh hint in a map: %s", data)
	}
	got, err := ParseMap(data)
	if err != nil || len(got) != 2 || !got[0].Same(one) || got[0].Sequence != 3 || !got[1].Same(two) {
		t.Errorf("read as %+v, %v", got, err)
	}
	if got, err := ParseMap([]byte(`{"trust_domains":{"td":{"keys":[],"spiffe_refresh_hint":9}},"more":1}`)); err != nil || len(got) != 1 || got[0].RefreshHint != 0 {
		t.Errorf("a single bundle's refresh hint counts: %+v, %v", got, err)
	}
	if got, err := ParseMap([]byte(`{"trust_domains":{}}`)); err != nil || len(got) != 0 {
		t.Errorf("an empty map: %v, %v", got, err)
	}
	if _, err := MarshalMap(one, one); err == nil {
		t.Error("one trust domain was written twice")
	}
	var many []string
	for i := range MaxMapDomains + 1 {
		many = append(many, fmt.Sprintf(`"td%d":{"keys":[]}`, i))
	}
	for name, tc := range map[string]struct{ data, want string }{
		"a trust domain twice":          {`{"trust_domains":{"td":{"keys":[]},"td":{"keys":[]}}}`, "duplicate"},
		"a trust domain twice, escaped": {`{"trust_domains":{"td":{"keys":[]},"\u0074d":{"keys":[]}}}`, "duplicate"},
		"one bundle of two is wrong":    {`{"trust_domains":{"td":{"keys":[]},"other":{}}}`, "other"},
		"no trust_domains":              {`{}`, "trust_domains"},
		"trust_domains null":            {`{"trust_domains":null}`, "trust_domains"},
		"a name in capitals":            {`{"trust_domains":{"TD":{"keys":[]}}}`, "TD"},
		"a name with the scheme":        {`{"trust_domains":{"spiffe://td":{"keys":[]}}}`, "scheme"},
		"no object":                     {`[]`, "JSON object"},
		"too many":                      {`{"trust_domains":{` + strings.Join(many, ",") + `}}`, "at most 1000"},
		"too large":                     {`{"trust_domains":{}` + strings.Repeat(" ", MaxMapBytes) + `}`, "at most"},
	} {
		if got, err := ParseMap([]byte(tc.data)); err == nil || got != nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, %v; want something about %q", name, got, err, tc.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	a, b := ecRoot(f, "a"), ecRoot(f, "b")
	f.Add([]byte(keys(x5c("", a), x5c(`,"kid":"x"`, b), `{"kty":"EC","use":"jwt-svid","kid":"<k>","x":"AA"}`)))
	f.Add([]byte(`{"keys":[{"kty":"OKP"}],"spiffe_sequence":18446744073709551615,"spiffe_refresh_hint":5}`))
	f.Add([]byte(`{"keys":[],"keys":[]}`))
	td := domain(f, "td")
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := Parse(td, data)
		if err != nil {
			return
		}
		out, err := b.Marshal()
		if err != nil {
			t.Fatalf("was read and cannot be written: %v", err)
		}
		again, err := Parse(td, out)
		if err != nil {
			t.Fatalf("%s was written and cannot be read: %v", out, err)
		}
		if !again.Same(b) || again.Sequence != b.Sequence || again.HasSequence != b.HasSequence || again.RefreshHint != b.RefreshHint || again.Ignored != nil {
			t.Errorf("%+v came back as %+v", b, again)
		}
		if same, err := again.Marshal(); err != nil || !bytes.Equal(same, out) {
			t.Errorf("%s, then %s", out, same)
		}
	})
}

func FuzzParseMap(f *testing.F) {
	a := ecRoot(f, "a")
	f.Add([]byte(`{"trust_domains":{"td":` + keys(x5c("", a)) + `,"other":{"keys":[],"spiffe_sequence":4}}}`))
	f.Add([]byte(`{"trust_domains":{"td":{"keys":[]},"\u0074d":{"keys":[]}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, err := ParseMap(data)
		if err != nil {
			return
		}
		out, err := MarshalMap(all...)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseMap(out)
		if err != nil || !slices.EqualFunc(all, again, (*Bundle).Same) {
			t.Errorf("%s came back as %v, %v", out, again, err)
		}
	})
}

// What docs/spiffe.md says of go-spiffe 2.9 is so: it refuses whole bundles for entries that a client must ignore.
func TestGoSPIFFERefusesWhatMustBeIgnored(t *testing.T) {
	a, b := ecRoot(t, "a"), ecRoot(t, "b")
	for name, entry := range map[string]string{
		"a key type that is not known": `{"kty":"XYZ","use":"x509-svid"}`, "x5c empty": `{"kty":"EC","use":"x509-svid","crv":"P-256","x":"AA","y":"AA","x5c":[]}`, "x5c of two": x5c("", a, b),
	} {
		data := []byte(keys(x5c(`,"crv":"P-256"`+ecPoint(t, b), b), entry))
		if got, err := Parse(domain(t, "td"), data); err != nil || len(got.Roots) == 0 {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := gospiffe.Parse(spiffeid.RequireTrustDomainFromString("td"), data); err == nil {
			t.Errorf("%s: go-spiffe takes it; docs/spiffe.md says otherwise", name)
		}
	}
	if _, err := gospiffe.Parse(spiffeid.RequireTrustDomainFromString("td"), []byte(keys(x5c(`,"crv":"P-256"`+ecPoint(t, b), b)))); err != nil {
		t.Errorf("go-spiffe refuses it for another reason: %v", err)
	}
	if data, err := gospiffe.New(spiffeid.RequireTrustDomainFromString("td")).Marshal(); err != nil || !bytes.Contains(data, []byte(`"keys":null`)) {
		t.Errorf("an empty bundle of go-spiffe: %s, %v; docs/spiffe.md says that its keys are null", data, err)
	}
}

func ecPoint(t *testing.T, c *x509.Certificate) string {
	t.Helper()
	j, err := publicKey(c.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	return `,"x":"` + j.X + `","y":"` + j.Y + `"`
}
