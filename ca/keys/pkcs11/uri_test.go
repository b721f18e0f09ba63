package pkcs11

import (
	"strings"
	"testing"
)

func TestParseURI(t *testing.T) {
	const module = "pkcs11:module-path=/usr/lib/softhsm/libsofthsm2.so;"
	for in, want := range map[string]string{
		module + "token=chancery?pin-source=/etc/pin":           "pkcs11:module-path=%2Fusr%2Flib%2Fsofthsm%2Flibsofthsm2.so;token=chancery?pin-source=%2Fetc%2Fpin",
		module + "token=two%20words?pin-source=file:/etc/pin":   "token=two%20words?pin-source=%2Fetc%2Fpin",
		module + "slot-id=5;max-sessions=4?pin-source=/etc/pin": "slot-id=5;max-sessions=4",
		module + "token=a?pin-value=1234":                       "error: pin-value would put the PIN into the config",
		module + "token=a;serial=b?pin-source=/p":               "error: one of token, serial and slot-id",
		module + "?pin-source=/p":                               "error: one of token, serial and slot-id",
		module + "token=a":                                      "error: pin-source should be the absolute path",
		module + "token=a?pin-source=pin":                       "error: pin-source should be the absolute path",
		module + "token=a;token=b?pin-source=/p":                "error: attribute \"token\"",
		module + "token=a;colour=b?pin-source=/p":               "error: attribute \"colour\"",
		module + "token=a%3Bslot-id=3?pin-source=/p":            "error: the value of \"token\"",
		module + "slot-id=x?pin-source=/p":                      "error: slot-id \"x\"",
		module + "token=a;max-sessions=1?pin-source=/p":         "error: max-sessions \"1\"",
		"pkcs11:token=a?pin-source=/p":                          "error: module-path should be the absolute path",
		"pkcs11:module-path=softhsm.so;token=a?pin-source=/p":   "error: module-path should be the absolute path",
		"":                        "error: it should be like",
		"awskms:key-id=a":         "error: it should be like",
		strings.Repeat("a", 5000): "error: it should be like",
	} {
		u, err := ParseURI(in)
		got := ""
		if err != nil {
			got = "error: " + err.Error()
		} else {
			got = u.String()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%.80s: got %s, want %s", in, got, want)
		}
		if strings.Contains(got, "1234") {
			t.Errorf("%s: the PIN is in the error: %s", in, got)
		}
		if err == nil {
			if again, err := ParseURI(got); err != nil || again.String() != got {
				t.Errorf("%s reads back as %v, %v", got, again, err)
			}
		}
	}
}
