package kube

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/signers"
)

// TestWhatIsTrouble: a request that waits for a minute is trouble of ours, unless its pod is gone or its identity is revoked.
func TestWhatIsTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := func(reason string) error { return &signers.Refusal{Reason: reason, Detail: "so it is"} }
		for name, c := range map[string]struct {
			err     error
			trouble string
		}{
			"pod gone":           {refused(csr.ReasonPodGone), ""},
			"identity revoked":   {refused(csr.ReasonRevoked), ""},
			"no issuer":          {refused(csr.ReasonNotReady), csr.ReasonNotReady},
			"status not written": {errors.New("no right"), "no right"},
			"not tried yet":      {nil, "faster than they are signed"},
		} {
			r := &request{namespace: "shop", name: "web", since: time.Now(), err: c.err}
			l := &line{requests: map[string]*request{r.key(): r}}
			if err := l.late(); err != nil {
				t.Errorf("%s: at once: %v", name, err)
			}
			time.Sleep(troubling)
			if err := l.late(); (err != nil) != (c.trouble != "") || err != nil && !strings.Contains(err.Error(), c.trouble) {
				t.Errorf("%s: %v, want %q", name, err, c.trouble)
			}
		}
	})
}

// TestMessageIsText: what is cut is cut between letters; an API server takes no half of one.
func TestMessageIsText(t *testing.T) {
	for n := range 4 {
		if got := message(strings.Repeat("x", n) + strings.Repeat("ü", 1000)); !utf8.ValidString(got) || len(got) > 1003 || len(got) < 990 {
			t.Errorf("%d bytes, valid %t", len(got), utf8.ValidString(got))
		}
	}
}
