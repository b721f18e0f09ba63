package vault

import (
	"encoding/json"
	"testing"

	"github.com/chancery-project/chancery/trust"
)

// FuzzAnswer: whatever an engine answers, reading it gives certificates or an error.
func FuzzAnswer(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"data": {"certificate": "x", "ca_chain": ["", "y"], "issuing_ca": "z"}}`, `{"data": {"ca_chain": "no list"}}`, `[]`,
		`{"data": {"certificate": "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var a answer
		if json.Unmarshal(data, &a) != nil {
			return
		}
		chain, err := chainOf(&a)
		if err == nil && len(chain) == 0 || len(chain) > trust.MaxCertificates {
			t.Errorf("%d certificates, %v", len(chain), err)
		}
	})
}
