//go:build pkcs11 && cgo

package server

import (
	"fmt"
	"testing"

	p11 "github.com/miekg/pkcs11"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/keystest"
)

// TestSoftHSMServer runs a server whose keys lie in SoftHSM: made there by init, and of use after its sessions were closed
// behind its back.
func TestSoftHSMServer(t *testing.T) {
	hsm := keystest.SoftHSM(t)
	srv, stop := started(t, fmt.Sprintf("keys: {pkcs11: %q}\n", hsm.URI))
	defer stop()
	lib := p11.New(hsm.Module)
	lib.Initialize() // it is already
	slots, err := lib.GetSlotList(true)
	if err != nil {
		t.Fatal(err)
	}
	if err := lib.CloseAllSessions(slots[0]); err != nil {
		t.Fatal(err)
	}
	for _, w := range srv.authority.Keys() {
		key, err := w.Open(t.Context())
		if err == nil {
			err = keys.Check(key)
		}
		if err != nil {
			t.Errorf("%s after its sessions were closed: %v", w.Name, err)
		}
	}
	if err := srv.ready(); err != nil {
		t.Error(err)
	}
	resp, err := srv.report.Status("unix:root")
	if err != nil || len(resp.GetKeys()) != 2 {
		t.Fatalf("status: %v, %v", resp, err)
	}
	for _, k := range resp.GetKeys() {
		if k.GetStore() != "token" || k.GetError() != "" {
			t.Errorf("status says of a key in the token: %v", k)
		}
	}
}
