package keystest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// PIN is that of the tokens that SoftHSM makes.
const PIN = "48151623"

// Token is a token of SoftHSM in a folder of the test's.
type Token struct {
	URI     string // with module-path, token and pin-source
	Module  string // the library
	PINFile string
	Dir     string // where the token's objects lie
}

// SoftHSM makes a token, with the pinned tool softhsm2. Without that the test is skipped, or fails when CI=true.
func SoftHSM(t testing.TB) Token {
	t.Helper()
	util := tool(t, "softhsm2")
	dir := t.TempDir()
	token := Token{Dir: filepath.Join(dir, "tokens"), PINFile: filepath.Join(dir, "pin")}
	conf := filepath.Join(dir, "softhsm2.conf")
	for path, text := range map[string]string{
		conf: "directories.tokendir = " + token.Dir + "\nobjectstore.backend = file\nlog.level = ERROR\n", token.PINFile: PIN + "\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(token.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SOFTHSM2_CONF", conf) // the library reads it when it is started
	out, err := exec.Command(util, "--init-token", "--free", "--label", "chancery", "--so-pin", "1234567890", "--pin", PIN).CombinedOutput()
	if err != nil {
		t.Fatalf("making a token: %v\n%s", err, out)
	}
	module, err := filepath.EvalSymlinks(filepath.Join(filepath.Dir(util), "softhsm2.so"))
	if err != nil {
		t.Fatal(err)
	}
	token.Module = module
	token.URI = fmt.Sprintf("pkcs11:module-path=%s;token=chancery?pin-source=%s", module, token.PINFile)
	return token
}
