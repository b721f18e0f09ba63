// Package pkcs11 owns keys in a hardware security module, or in SoftHSM, through PKCS#11. It works in builds with cgo and
// the tag pkcs11 only; in others Open says so.
//
// A token may restart, drop its sessions or vanish for a while: a signer opens the token again by itself, once for each
// loss, and signs. It refuses a PIN in the URI, to be used with a PIN that the token has refused once until the PIN's
// file changes (a token locks itself after a few attempts), and keys that it did not make.
package pkcs11

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/chancery-project/chancery/ca/keys"
)

// Config says which token to use.
type Config struct {
	URI    *URI
	Logger *slog.Logger
}

// Store is an open token.
type Store interface {
	keys.Store
	io.Closer
}

// URI names a token (RFC 7512).
type URI struct {
	path      map[string]string // of the attributes known
	pinSource string
}

// Files returns the vendor's library and the file of the PIN.
func (u *URI) Files() (module, pin string) { return u.path["module-path"], u.pinSource }

// known are the attributes that a URI may have, in the order in which they are handed on.
var known = []string{"module-path", "token", "serial", "slot-id", "max-sessions"}

// ParseURI reads pkcs11:module-path=FILE;token=LABEL?pin-source=FILE. Instead of token, serial or slot-id may be given;
// max-sessions bounds how many signatures are made at a time.
func ParseURI(s string) (*URI, error) {
	rest, ok := strings.CutPrefix(s, "pkcs11:")
	if !ok || len(s) > 4096 {
		return nil, errors.New("it should be like pkcs11:module-path=/usr/lib/softhsm/libsofthsm2.so;token=chancery?pin-source=/etc/chancery/pin")
	}
	path, query, _ := strings.Cut(rest, "?")
	u := &URI{path: map[string]string{}}
	for _, part := range []struct{ text, separator string }{{path, ";"}, {query, "&"}} {
		for attr := range strings.SplitSeq(part.text, part.separator) {
			if attr == "" {
				continue
			}
			if err := u.set(attr); err != nil {
				return nil, err
			}
		}
	}
	return u, u.check()
}

func (u *URI) set(attr string) error {
	name, raw, _ := strings.Cut(attr, "=")
	value, err := url.PathUnescape(raw)
	if name == "pin-value" {
		return errors.New("pin-value would put the PIN into the config; write it to a file with mode 0600 and name that as pin-source")
	}
	if err != nil || value == "" || strings.ContainsAny(value, ";?&=\x00\n") {
		return fmt.Errorf("the value of %q cannot be read", name)
	}
	if name == "pin-source" {
		u.pinSource = strings.TrimPrefix(value, "file:")
		return nil
	}
	for _, k := range known {
		if _, twice := u.path[k]; k == name && !twice {
			u.path[k] = value
			return nil
		}
	}
	return fmt.Errorf("attribute %q is not known, or there twice; use %s and pin-source", name, strings.Join(known, ", "))
}

func (u *URI) check() error {
	var tokens int
	for _, k := range []string{"token", "serial", "slot-id"} {
		if u.path[k] != "" {
			tokens++
		}
	}
	switch {
	case tokens != 1:
		return errors.New("one of token, serial and slot-id should say which token to use")
	case !filepath.IsAbs(u.path["module-path"]):
		return errors.New("module-path should be the absolute path of the PKCS#11 library of your token")
	case !filepath.IsAbs(u.pinSource):
		return errors.New("pin-source should be the absolute path of a file with the PIN, mode 0600")
	}
	for _, k := range []string{"slot-id", "max-sessions"} {
		if n, err := strconv.Atoi(u.path[k]); u.path[k] != "" && (err != nil || n < 0 || k == "max-sessions" && n < 2) {
			return fmt.Errorf("%s %q is no number that will do", k, u.path[k])
		}
	}
	return nil
}

// String returns the URI, which holds no secret.
func (u *URI) String() string {
	return u.token() + "?pin-source=" + url.PathEscape(u.pinSource)
}

// token returns the URI without where the PIN is.
func (u *URI) token() string {
	var attrs []string
	for _, k := range known {
		if v := u.path[k]; v != "" {
			attrs = append(attrs, k+"="+url.PathEscape(v))
		}
	}
	return "pkcs11:" + strings.Join(attrs, ";")
}
