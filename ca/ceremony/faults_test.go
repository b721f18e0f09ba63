package ceremony

import (
	"bytes"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/trust"
)

// outcome holds what a ceremony left to what it said: the folder is there complete, or not at all; it is there if it ended without
// an error, and not there if it ended with one; and the audit log has the intent of each certificate in it.
func outcome(t *testing.T, name, dir string, ended bool, err error) {
	t.Helper()
	made := filepath.Join(dir, "made")
	entries, readErr := os.ReadDir(made)
	if errors.Is(readErr, fs.ErrNotExist) {
		if ended && err == nil {
			t.Errorf("%s: it ended well, and nothing is there", name)
		}
		return
	} else if readErr != nil {
		t.Fatal(readErr)
	}
	if ended && err != nil {
		t.Errorf("%s: it failed (%v), and its results are there", name, err)
	}
	intents := intentsIn(t, filepath.Join(dir, "audit.jsonl"))
	if len(entries) != 5 {
		t.Errorf("%s: %d of 5 results", name, len(entries))
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(made, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		block, rest := pem.Decode(data)
		if block == nil || len(rest) > 0 {
			t.Fatalf("%s: %s is cut off: %q", name, e.Name(), data)
		}
		switch block.Type {
		case "CERTIFICATE":
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				t.Fatalf("%s: %s: %v", name, e.Name(), err)
			}
			if !slices.Contains(intents, hex.EncodeToString(cert.SerialNumber.Bytes())) {
				t.Errorf("%s: the audit log has no intent of %s", name, e.Name())
			}
		case "X509 CRL":
			if _, err := x509.ParseRevocationList(block.Bytes); err != nil {
				t.Errorf("%s: %s: %v", name, e.Name(), err)
			}
		default:
			if _, err := trust.ParseKey(data); err != nil {
				t.Errorf("%s: %s: %v", name, e.Name(), err)
			}
		}
	}
}

func intentsIn(t *testing.T, path string) (serials []string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var r audit.Record
		if json.Unmarshal(line, &r) == nil && r.Event == audit.Intent {
			serials = append(serials, r.Serial)
		}
	}
	return serials
}

// TestCeremonyFaultsAtEachStep fails each step of a ceremony in each way, and has process and machine end after each.
func TestCeremonyFaultsAtEachStep(t *testing.T) {
	text := soon(crashing)
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		d := durabletest.Watch(t, dir)
		log, err := audit.Open(filepath.Join(dir, "audit.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		p, err := NewPlan(config(t, text), Options{Dir: dir, Actor: "unix:tester", Log: log})
		if err != nil {
			t.Fatal(err)
		}
		before := d.Steps()
		if n >= 0 {
			d.FailAt(before+n, mode)
		}
		err = p.Sign(t.Context())
		outcome(t, fmt.Sprintf("%s (%v)", d.Failed(), err), d.Copy(), !d.Dead(), err)
		return d.Steps() - before
	}
	total := one(t, -1, "")
	if total < 25 {
		t.Errorf("only %d steps were seen", total)
	}
	for n := range total {
		for _, mode := range durabletest.Modes {
			t.Run(fmt.Sprint(n, " ", mode), func(t *testing.T) { one(t, n, mode) })
		}
	}

	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	if _, err := hold(t, dir, text, true); err != nil {
		t.Fatal(err)
	}
	d.Mark("ended")
	d.Crashes(1, func(_ bool, left *durabletest.Left) {
		outcome(t, left.String(), left.Dir, len(left.Marks) > 0, nil)
	})
}
