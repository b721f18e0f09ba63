package cfssl

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
)

func TestImport(t *testing.T) {
	data, err := os.ReadFile("testdata/good.json")
	if err != nil {
		t.Fatal(err)
	}
	got, err := Import(data, "")
	if err != nil {
		t.Fatal(err)
	}
	want := []Profile{
		{"mesh", ca.ProfileConfig{DefaultTTL: "24h0m0s", MaxTTL: "24h0m0s", Backdate: "1m0s", KeyEncipherment: true}, []string{
			"CSRWhitelist is left out: nothing but the public key is ever taken from a CSR",
			"auth_key is left out: who asks proves itself with a token or a certificate",
		}},
		{"short", ca.ProfileConfig{DefaultTTL: "15m0s", MaxTTL: "15m0s"}, nil},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if one, err := Import(data, "short"); err != nil || !reflect.DeepEqual(one, want[1:]) {
		t.Errorf("one by name: %+v, %v", one, err)
	}
	if _, err := Import(data, "shrt"); err == nil || !strings.Contains(err.Error(), `no profile "shrt"; there are mesh, short`) {
		t.Errorf("an unknown name: %v", err)
	}
	if _, err := Import(data, "default"); err == nil || !strings.Contains(err.Error(), "profile default: usages: it is missing") {
		t.Errorf("signing.default: %v", err)
	}
}

const usual = `"usages": ["signing", "server auth", "client auth"], "expiry": "1h"`

// Every field that cfssl has is known here, and each unsafe value is refused by its name.
func TestUnsafeFieldsAreRefusedByName(t *testing.T) {
	tried := map[string]bool{"usages": true, "expiry": true}
	for _, tc := range []struct{ field, value, want string }{
		{"ca_constraint", `{"is_ca": true}`, "ca_constraint.is_ca: it makes CAs"},
		{"ca_constraint", `{"max_path_len_zero": true}`, "ca_constraint"},
		{"ca_constraint", `{"isca": true}`, "there is no field /isca"},
		{"copy_extensions", `true`, "it takes extensions over from the CSR"},
		{"allowed_extensions", `["1.2.3"]`, "takes extensions over"},
		{"not_before", `"2026-01-01T00:00:00Z"`, "fixed date"},
		{"not_after", `"2027-01-01T00:00:00Z"`, "fixed date"},
		{"name_whitelist", `"example"`, "idPaths"},
		{"remote", `"r"`, "remote signer"},
		{"auth_remote", `{"remote": "r", "auth_key": "k"}`, "remote signer"},
		{"issuer_urls", `["http://a"]`, "authority information"},
		{"ocsp_url", `"http://a"`, "OCSP"},
		{"ocsp_no_check", `true`, "OCSP"},
		{"crl_url", `"http://a"`, "CRL"},
		{"ct_log_servers", `["http://a"]`, "Transparency"},
		{"cert_store", `"db"`, "database"},
		{"ignored_lints", `["a"]`, "no lint can be switched off"},
		{"ignored_lint_sources", `["a"]`, "no lint can be switched off"},
		{"ClientProvidesSerialNumbers", `true`, "serial numbers"},
		{"Policies", `[{"ID": "1.2.3"}]`, "policies"},
		{"policies", `[{"ID": "1.2.3"}]`, "policies"},
		{"backdate", `"2h"`, "backdate 2h0m0s is not between"},
		{"backdate", `"-1m"`, "not a duration"},
		{"CSRWhitelist", `{"URIs": true}`, "CSR's public key"},
		{"auth_key", `7`, "JSON type"},
		{"prev_auth_key", `7`, "JSON type"},
		{"lint_error_level", `3`, ""}, // only noted
		{"expiries", `"1h"`, "misspelt"},
		{"Expiry", `"1h"`, "misspelt"},
	} {
		tried[tc.field] = true
		_, err := Import(fmt.Appendf(nil, `{"signing": {"profiles": {"p": {%s, %q: %s}}}}`, usual, tc.field, tc.value), "")
		if tc.want == "" {
			if err != nil {
				t.Errorf("%s %s: %v", tc.field, tc.value, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "profile p: "+tc.field) && !strings.Contains(err.Error(), "backdate 2h") {
			t.Errorf("%s %s: %v; want its name and %q", tc.field, tc.value, err, tc.want)
		}
	}
	for field := range fields {
		if !tried[field] {
			t.Errorf("no unsafe value of %s is tried", field)
		}
	}
}

func TestUsagesAndExpiry(t *testing.T) {
	for _, tc := range []struct{ usages, expiry, want string }{
		{`["signing", "server auth"]`, `"1h"`, `always have "client auth"`},
		{`["server auth", "client auth"]`, `"1h"`, `always have "digital signature"`},
		{`["signing", "server auth", "client auth", "cert sign"]`, `"1h"`, `"cert sign" makes a CA`},
		{`["signing", "server auth", "client auth", "any"]`, `"1h"`, `"any" allows every use`},
		{`["signing", "server auth", "client auth", "code signing"]`, `"1h"`, `"code signing" is not issued here`},
		{`["singing", "server auth", "client auth"]`, `"1h"`, `"singing" is not issued here`},
		{`"signing"`, `"1h"`, "JSON type"},
		{`["signing", "server auth", "client auth"]`, `"8760h"`, "expiry: 8760h0m0s is above the limit of 2160h0m0s"},
		{`["signing", "server auth", "client auth"]`, `"1s"`, "below 5s"},
		{`["signing", "server auth", "client auth"]`, `"1 hour"`, "not a duration"},
		{`["signing", "server auth", "client auth"]`, `3600`, "JSON type"},
	} {
		_, err := Import(fmt.Appendf(nil, `{"signing": {"profiles": {"p": {"usages": %s, "expiry": %s}}}}`, tc.usages, tc.expiry), "")
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s, %s: %v; want %q", tc.usages, tc.expiry, err, tc.want)
		}
	}
}

// Errors name places, and never show values: a config of cfssl holds keys.
func TestBrokenFilesAreRefusedWithoutSecrets(t *testing.T) {
	const secret = "5ec7e75ec7e7"
	for _, text := range []string{
		``, `x`, `[]`, `{}`, `{"signing": {}}`, `{"signing": {"profiles": {}}}`, `{"signing": 1}`, `{"singing": {}}`,
		`{"signing": {"profiles": {"p": 1}}}`, `{"signing": {"profiles": {"p": {}}}}`, `{"signing": {"profiles": {"p": {` + usual + `}}}} x`,
		`{"signing": {"profiles": {"p": {` + usual + `}, "p": {` + usual + `}}}}`,
		`{"signing": {"profiles": {"p": {` + usual + `, "expiry": "2h"}}}}`,
		`{"auth_keys": {"a": {"type": "standard", "key": "` + secret + `", "ky": 1}}}`,
		`{"auth_keys": {"a": "` + secret + `"}}`, `{"auth_keys": {"a": {"key": "` + secret + `}}}`,
		strings.Repeat(" ", MaxBytes+1),
	} {
		p, err := Import([]byte(text), "")
		if err == nil {
			t.Errorf("%.60s was imported as %+v", text, p)
		} else if strings.Contains(err.Error(), secret) {
			t.Errorf("a secret in: %v", err)
		}
	}
}

// What is imported makes a valid profile, with no longer a life than cfssl's.
func FuzzImport(f *testing.F) {
	data, err := os.ReadFile("testdata/good.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"signing": {"profiles": {"p": {` + usual + `, "ca_constraint": {"is_ca": true}}}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		profiles, err := Import(data, "")
		if err != nil {
			return
		}
		for _, p := range profiles {
			made, err := ca.NewProfile(p.Name, p.Config)
			if err != nil || made.MaxTTL() > 90*24*time.Hour {
				t.Errorf("%+v: %v", p, err)
			}
		}
	})
}
