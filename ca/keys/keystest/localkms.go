package keystest

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// LocalKMS is a server that speaks the protocol of AWS KMS, github.com/nsmithuk/local-kms.
type LocalKMS struct {
	Endpoint string // its URL, the same over all starts

	path, port, dir string
	cmd             *exec.Cmd
}

// StartLocalKMS starts the pinned tool local-kms until the test ends. Without it the test is skipped, or fails when CI=true.
func StartLocalKMS(t testing.TB) *LocalKMS {
	t.Helper()
	k := &LocalKMS{path: tool(t, "local-kms"), dir: t.TempDir()}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, k.port, _ = net.SplitHostPort(l.Addr().String())
	l.Close()
	k.Endpoint = "http://127.0.0.1:" + k.port
	k.Start(t)
	t.Cleanup(k.Kill)
	return k
}

// Start starts it again after a Kill, with the keys that it had.
func (k *LocalKMS) Start(t testing.TB) {
	t.Helper()
	log := filepath.Join(k.dir, "log")
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	k.cmd = exec.Command(k.path)
	k.cmd.Env = []string{"PORT=" + k.port, "KMS_DATA_PATH=" + filepath.Join(k.dir, "data"), "KMS_REGION=eu-central-1", "KMS_SEED_PATH=/nonexistent"}
	k.cmd.Stdout, k.cmd.Stderr = out, out
	if err := k.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get(k.Endpoint)
		if err == nil {
			resp.Body.Close()
			return
		}
		if time.Now().After(deadline) {
			text, _ := os.ReadFile(log)
			t.Fatal(errors.Join(fmt.Errorf("local-kms does not answer: %s", text), err))
		}
	}
}

// Use makes the AWS library of this process talk to it until the test ends, as an operator would: by environment.
func (k *LocalKMS) Use(t testing.TB) {
	t.Helper()
	for name, value := range map[string]string{
		"AWS_ENDPOINT_URL_KMS": k.Endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true",
		"AWS_CONFIG_FILE": os.DevNull, "AWS_SHARED_CREDENTIALS_FILE": os.DevNull,
	} {
		t.Setenv(name, value)
	}
}

// Kill ends it at once.
func (k *LocalKMS) Kill() {
	k.cmd.Process.Kill()
	k.cmd.Wait()
}
