//go:build pkcs11 && cgo

package pkcs11

import (
	"context"
	"crypto"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	p11 "github.com/miekg/pkcs11"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/keystest"
)

func openToken(t testing.TB, uri string) *token {
	t.Helper()
	s, err := tryToken(uri)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func tryToken(uri string) (*token, error) {
	u, err := ParseURI(uri)
	if err != nil {
		return nil, err
	}
	s, err := Open(context.Background(), Config{URI: u, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	return s.(*token), nil
}

var tokenTypes = []ca.KeyType{ca.P256, ca.P384, ca.RSA}

func TestSoftHSMContract(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	keystest.Run(t, keystest.Config{
		Open: func(t *testing.T) keystest.Store { return openToken(t, hsm.URI) }, Types: tokenTypes,
	})
}

func TestSoftHSMHasNoEd25519(t *testing.T) {
	s := openToken(t, keystest.SoftHSM(t).URI)
	if _, err := s.Generate(t.Context(), ca.Ed25519); err == nil || !strings.Contains(err.Error(), "p256, p384 and rsa") {
		t.Errorf("got %v", err)
	}
}

// library is a second handle on the PKCS#11 library that the token uses, as another part of the same program might have.
func library(t *testing.T, hsm keystest.Token) (*p11.Ctx, uint) {
	t.Helper()
	lib := p11.New(hsm.Module)
	if lib == nil {
		t.Fatal("the library does not load")
	}
	if err := lib.Initialize(); err != nil && !errors.Is(err, p11.Error(p11.CKR_CRYPTOKI_ALREADY_INITIALIZED)) {
		t.Fatal(err)
	}
	slots, err := lib.GetSlotList(true)
	if err != nil || len(slots) == 0 {
		t.Fatal(slots, err)
	}
	return lib, slots[0]
}

// The token itself says that the key cannot be taken out.
func TestSoftHSMKeyIsSensitive(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	s := openToken(t, hsm.URI)
	keystest.New(t, s, ca.P256)
	lib, slot := library(t, hsm)
	session, err := lib.OpenSession(slot, p11.CKF_SERIAL_SESSION)
	if err != nil {
		t.Fatal(err)
	}
	if err := lib.FindObjectsInit(session, []*p11.Attribute{p11.NewAttribute(p11.CKA_CLASS, p11.CKO_PRIVATE_KEY)}); err != nil {
		t.Fatal(err)
	}
	found, _, err := lib.FindObjects(session, 10)
	if err != nil || len(found) != 1 {
		t.Fatalf("%d private keys: %v", len(found), err)
	}
	attrs, err := lib.GetAttributeValue(session, found[0], []*p11.Attribute{
		p11.NewAttribute(p11.CKA_SENSITIVE, nil), p11.NewAttribute(p11.CKA_EXTRACTABLE, nil), p11.NewAttribute(p11.CKA_NEVER_EXTRACTABLE, nil),
	})
	if err != nil || attrs[0].Value[0] != 1 || attrs[1].Value[0] != 0 || attrs[2].Value[0] != 1 {
		t.Errorf("sensitive, extractable, never extractable: %v, %v", attrs, err)
	}
	if v, err := lib.GetAttributeValue(session, found[0], []*p11.Attribute{p11.NewAttribute(p11.CKA_VALUE, nil)}); err == nil {
		t.Errorf("the token gives out the key, %d bytes", len(v[0].Value))
	}
}

// Sessions that are closed behind our back, as HSMs do to idle ones: the signer opens the token again by itself, also
// with many callers at once, and logs in once for it.
func TestSoftHSMSessionLoss(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	s := openToken(t, hsm.URI)
	_, key := keystest.New(t, s, ca.P256)
	lib, slot := library(t, hsm)
	for range 3 {
		before := s.logins
		if err := lib.CloseAllSessions(slot); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				if err := keys.Check(key); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if s.logins-before > 2 {
			t.Errorf("%d logins after one loss", s.logins-before)
		}
	}
	if err := lib.CloseAllSessions(slot); err != nil {
		t.Fatal(err)
	}
	keystest.New(t, s, ca.P384) // Generate and Open recover as well
}

// A token that goes away and comes back: errors while it is away, signatures afterwards, all with the same signer.
func TestSoftHSMRestart(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	s := openToken(t, hsm.URI)
	_, key := keystest.New(t, s, ca.P256)
	lib, slot := library(t, hsm)
	away := hsm.Dir + ".away"
	if err := os.Rename(hsm.Dir, away); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(hsm.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := lib.CloseAllSessions(slot); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := keys.Check(key); err == nil || !strings.Contains(err.Error(), "opening token pkcs11:") {
			t.Errorf("without its token: %v", err)
		}
	}
	if err := os.Remove(hsm.Dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(away, hsm.Dir); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.retry = s.retry.Add(-reopenPause) // as if a second had passed
	s.mu.Unlock()
	if err := keys.Check(key); err != nil {
		t.Errorf("after its token came back: %v", err)
	}
}

// A wrong PIN is tried once, not again and again until the token locks itself.
func TestSoftHSMWrongPIN(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	s := openToken(t, hsm.URI)
	_, key := keystest.New(t, s, ca.P256)
	writePIN(t, hsm, "00000000")
	lib, slot := library(t, hsm)
	if err := lib.CloseAllSessions(slot); err != nil {
		t.Fatal(err)
	}
	before := s.logins
	for range 5 {
		err := keys.Check(key)
		if err == nil || !strings.Contains(err.Error(), "PIN") || !strings.Contains(err.Error(), hsm.PINFile) || strings.Contains(err.Error(), "00000000") {
			t.Errorf("with a wrong PIN: %v", err)
		}
		s.mu.Lock()
		s.retry = s.retry.Add(-reopenPause)
		s.mu.Unlock()
	}
	if n := s.logins - before; n != 1 {
		t.Errorf("the wrong PIN was tried %d times", n)
	}
	writePIN(t, hsm, keystest.PIN)
	if err := keys.Check(key); err != nil {
		t.Errorf("with the right PIN again: %v", err)
	}
	s.Close()
	writePIN(t, hsm, "00000000")
	if _, err := tryToken(hsm.URI); err == nil || !strings.Contains(err.Error(), "refuses the PIN in "+hsm.PINFile) {
		t.Errorf("opening with a wrong PIN: %v", err)
	}
	if err := os.Chmod(hsm.PINFile, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := tryToken(hsm.URI); err == nil || !strings.Contains(err.Error(), "should be 0600") {
		t.Errorf("with a PIN that all may read: %v", err)
	}
}

// writePIN writes a PIN; files written within one tick of the clock still tell apart, since their sizes differ.
func writePIN(t *testing.T, hsm keystest.Token, pin string) {
	t.Helper()
	if err := os.WriteFile(hsm.PINFile, []byte(pin+strings.Repeat("\n", 1+int(pinWrites.Add(1)))), 0o600); err != nil {
		t.Fatal(err)
	}
}

var pinWrites atomic.Int64

// What is wrong with the token is said as such.
func TestSoftHSMThatIsNotThere(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	for uri, want := range map[string]string{
		strings.Replace(hsm.URI, "token=chancery", "token=other", 1):                "could not find PKCS#11 token",
		strings.Replace(hsm.URI, "module-path="+hsm.Module, "module-path=/x.so", 1): "failed to open module",
	} {
		if _, err := tryToken(uri); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "opening token pkcs11:") {
			t.Errorf("%s: %v", uri, err)
		}
	}
}

// A key that another tool removed is an error that says so, and not a reason to open the token again and again.
func TestSoftHSMKeyThatIsGone(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	s := openToken(t, hsm.URI)
	ref, key := keystest.New(t, s, ca.P256)
	other := openToken(t, hsm.URI)
	if err := other.Delete(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if err := keys.Check(key); !errors.Is(err, keys.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if s.logins > 3 {
		t.Errorf("%d logins", s.logins)
	}
}

var _ crypto.Signer = (*signer)(nil)

func BenchmarkSoftHSM(b *testing.B) {
	keystest.Benchmark(b, "softhsm2 p256", openToken(b, keystest.SoftHSM(b).URI))
}
