package doctor

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/trust"
)

// pluggedFiles makes a CA in the layout of Istio's cacerts.
func pluggedFiles(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(t.TempDir(), "audit.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	made, err := ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log, IssuerKey: key})
	if err != nil {
		t.Fatal(err)
	}
	pem, err := trust.EncodeKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"ca-cert.pem": trust.EncodeCertificates(made.Issuer), "ca-key.pem": pem, "cert-chain.pem": nil, "root-cert.pem": trust.EncodeCertificates(made.Root),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
