package dev

import (
	"strings"
	"testing"

	"github.com/chancery-project/chancery/sds"
)

// TestAccountNames: names are those of service accounts, and no two users share one.
func TestAccountNames(t *testing.T) {
	for _, c := range []struct{ user, uid, want string }{
		{"root", "0", "root"},
		{"www-data", "33", "www-data"},
		{"Root", "1", "uid-1"},
		{"", "2", "uid-2"},
		{"-x", "3", "uid-3"},
		{"x-", "4", "uid-4"},
		{"a.b", "5", "uid-5"},
		{"jürgen", "6", "uid-6"},
		{"uid-0", "7", "uid-7"},
		{strings.Repeat("a", 64), "8", "uid-8"},
	} {
		if got := accountName(c.user, c.uid); got != c.want {
			t.Errorf("user %q is %q, want %q", c.user, got, c.want)
		}
	}
}

func TestUsersAreBounded(t *testing.T) {
	u := newUsers(usersConfig{})
	for uid := range uint32(maxUsers) {
		if _, err := u.attest(t.Context(), sds.Peer{UID: 100000 + uid}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := u.attest(t.Context(), sds.Peer{UID: 1}); err == nil || !strings.Contains(err.Error(), "too_many_users") {
		t.Errorf("got %v", err)
	}
	if _, err := u.attest(t.Context(), sds.Peer{UID: 100000}); err != nil {
		t.Errorf("a known user is refused: %v", err)
	}
}

func TestHold(t *testing.T) {
	dir := t.TempDir()
	first, err := hold(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hold(dir); err == nil || !strings.Contains(err.Error(), "(pid ") || !strings.Contains(err.Error(), "--dir") {
		t.Errorf("got %v", err)
	}
	first.Close()
	again, err := hold(dir)
	if err != nil {
		t.Fatalf("the folder is still held: %v", err)
	}
	again.Close()
}
