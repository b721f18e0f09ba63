package e2e

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/chancery-project/chancery/ca"
)

// cfsslConfig has profiles that import-profile takes.
const cfsslConfig = `{"signing": {
  "default": {"expiry": "8760h"},
  "profiles": {
    "mesh": {"usages": ["signing", "key encipherment", "server auth", "client auth"], "expiry": "24h", "backdate": "1m",
      "CSRWhitelist": {"PublicKey": true, "PublicKeyAlgorithm": true, "SignatureAlgorithm": true}},
    "short": {"usages": ["digital signature", "client auth", "server auth"], "expiry": "15m", "copy_extensions": false}
  }
}}`

// TestCFSSLProfiles: what import-profile takes is what a real cfssl 1.7.1 takes, and the imported profile grants no more than
// the certificate that cfssl makes with it. What cfssl itself offers as a start is refused, by name.
func TestCFSSLProfiles(t *testing.T) {
	t.Parallel()
	Tool(t, "cfssl")
	dir := t.TempDir()
	config := filepath.Join(dir, "config.json")
	writeFile(t, config, cfsslConfig, 0o600)
	writeFile(t, filepath.Join(dir, "csr.json"), `{"CN": "test CA", "key": {"algo": "ecdsa", "size": 256}}`, 0o600)
	made := cfssl(t, dir, "gencert", "-initca", "csr.json")
	writeFile(t, filepath.Join(dir, "ca.pem"), made["cert"], 0o600)
	writeFile(t, filepath.Join(dir, "ca-key.pem"), made["key"], 0o600)

	for _, name := range []string{"mesh", "short"} {
		cert := parsePEMCert(t, []byte(cfssl(t, dir, "gencert", "-config", "config.json", "-profile", name, "-ca", "ca.pem", "-ca-key", "ca-key.pem",
			"-hostname", "spiffe://cluster.local/ns/a/sa/b", "csr.json")["cert"]))
		var imported struct {
			Profile ca.ProfileConfig `json:"profile"`
		}
		if err := yaml.UnmarshalStrict([]byte(MustRun(t, "authority", "import-profile", "--profile", name, config)), &imported); err != nil {
			t.Fatal(err)
		}
		profile, err := ca.NewProfile(name, imported.Profile)
		if err != nil {
			t.Fatal(err)
		}
		if theirs := cert.NotAfter.Sub(cert.NotBefore); profile.MaxTTL() > theirs {
			t.Errorf("profile %s: %s here, %s in cfssl", name, profile.MaxTTL(), theirs)
		}
		encipherment := cert.KeyUsage&x509.KeyUsageKeyEncipherment != 0
		if cert.KeyUsage&x509.KeyUsageDigitalSignature == 0 || imported.Profile.KeyEncipherment && !encipherment || cert.IsCA ||
			!slices.Contains(cert.ExtKeyUsage, x509.ExtKeyUsageServerAuth) || !slices.Contains(cert.ExtKeyUsage, x509.ExtKeyUsageClientAuth) {
			t.Errorf("profile %s: cfssl's certificate has usages %b and %v, and CA %v", name, cert.KeyUsage, cert.ExtKeyUsage, cert.IsCA)
		}
	}

	// As cfssl prints it, for a web server and a client that live a year.
	out, err := cfsslCommand(t, dir, "print-defaults", "config").Output()
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "defaults.json"), string(out), 0o600)
	_, stderr, err := Run(t, "", "authority", "import-profile", filepath.Join(dir, "defaults.json"))
	for _, want := range []string{
		"profile www: expiry: 8760h0m0s is above the limit", `profile www: usages: certificates here always have "client auth"`,
		"profile client: expiry", `profile client: usages: certificates here always have "server auth"`,
	} {
		if err == nil || !strings.Contains(stderr, want) {
			t.Errorf("want %q: %v\n%s", want, err, stderr)
		}
	}
}

func cfsslCommand(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, Tool(t, "cfssl"), args...)
	cmd.Dir = dir
	return cmd
}

// cfssl runs a command of cfssl and returns what it prints as JSON.
func cfssl(t *testing.T, dir string, args ...string) map[string]string {
	t.Helper()
	cmd := cfsslCommand(t, dir, args...)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("cfssl %s: %v", strings.Join(args, " "), err)
	}
	var made map[string]string
	if err := json.Unmarshal(out, &made); err != nil {
		t.Fatalf("cfssl %s: %v", strings.Join(args, " "), err)
	}
	return made
}
