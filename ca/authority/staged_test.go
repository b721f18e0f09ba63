package authority

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// TestD22IssuerIsPreparedBeforeItSigns: at half of an issuer's life its successor is made; it signs once everybody who has
// a valid leaf can have its CRL, or sooner where there is no time left.
func TestD22IssuerIsPreparedBeforeItSigns(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	first := k.issuer.Load()
	begin := first.Chain()[0].NotBefore
	const day = 24 * time.Hour
	at := func(since time.Duration, want document.AuthorityState, signers int) {
		t.Helper()
		k.mindIssuer(t.Context(), begin.Add(since))
		next := k.Document().Prepared(c.Domain)
		switch {
		case want == "" && next != nil, want == StatePrepared && next == nil:
			t.Errorf("after %s the document has the prepared issuer %+v", since, next)
		case want == StateActive && (next != nil || k.issuer.Load().SKI() == first.SKI()):
			t.Errorf("after %s the old issuer signs", since)
		case want != StateActive && k.issuer.Load() != first:
			t.Errorf("after %s another issuer signs", since)
		}
		all, err := k.CRLSigners(t.Context())
		if err != nil || len(all) != signers {
			t.Errorf("after %s there are %d CRL signers (%v), want %d", since, len(all), err, signers)
		}
		for _, s := range all {
			if s.Issuer == nil {
				t.Errorf("after %s issuer %s signs no CRL: %v", since, s.ID, s.Why)
			}
		}
	}
	at(3*day, "", 1)
	at(4*day, StatePrepared, 2)
	prepared := k.Document().Prepared(c.Domain).ID
	at(2*time.Minute, StatePrepared, 2) // it was created now, whatever mindIssuer was told
	if again := k.Document().Prepared(c.Domain).ID; again != prepared {
		t.Error("another one was prepared")
	}
	k = driving(t, c) // a restart in between
	first = k.issuer.Load()
	if k.due(k.Document().Prepared(c.Domain), first.Certificate(), time.Now().Add(23*time.Hour)) || !k.due(k.Document().Prepared(c.Domain), first.Certificate(), time.Now().Add(25*time.Hour)) {
		t.Error("it should sign a day after it was prepared, which is the longest life of a leaf")
	}
	k.running = time.Now().Add(25*time.Hour - time.Minute)
	if created := time.Now(); k.due(k.Document().Prepared(c.Domain), first.Certificate(), created.Add(25*time.Hour)) || !k.due(k.Document().Prepared(c.Domain), first.Certificate(), created.Add(25*time.Hour+2*time.Minute)) {
		t.Error("a day after it was prepared, and a minute after a start, it should wait for agents to be back")
	}
	k.running = time.Time{}
	announced, trouble := "", errors.New("the issuance log cannot be read")
	k.Announce(func(context.Context) error { announced = k.issuer.Load().SKI(); return trouble })
	k.mindIssuer(t.Context(), time.Now().Add(25*time.Hour))
	if k.issuer.Load() != first {
		t.Error("it signs, though its CRL is not out")
	}
	at(6*day+12*time.Hour, StateActive, 2) // now there is no time left
	if announced != first.SKI() {
		t.Errorf("its CRL should be announced while the former issuer signs; announced %q", announced)
	}
	if k.issuer.Load().SKI() != prepared {
		t.Error("it is not the one that was prepared")
	}
	if again := open(t, c); again.issuer.Load().SKI() != prepared {
		t.Error("after a restart another issuer is in use")
	}
}

// TestCRLNumbersNeverGoBack, whoever asks; who has not seen the last document gets none.
func TestCRLNumbersNeverGoBack(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	var last uint64
	for range 3 {
		k := open(t, c)
		for range 2 {
			seen := k.Document()
			at := time.Now().UTC().Truncate(time.Second)
			if err := k.TakeCRL(t.Context(), seen, document.CRL{Number: 1, Time: at, Until: at.Add(time.Hour), Content: "x"}); err != nil {
				t.Fatal(err)
			}
			crl := k.Document().State(c.Domain).LastCRL()
			if crl.Number <= last || !crl.Time.Equal(at) || crl.Content != "x" {
				t.Fatalf("%+v follows %d", crl, last)
			}
			last = crl.Number
			if err := k.TakeCRL(t.Context(), seen, document.CRL{}); !errors.Is(err, ErrMoved) {
				t.Errorf("by a document that is over: %v", err)
			}
		}
	}
}

// TestIssuerRetiredByAnOlderVersion has no key for a CRL; it needs one only until its leaves have ended.
func TestIssuerRetiredByAnOlderVersion(t *testing.T) {
	c := setup(t, t.TempDir())
	if _, err := Init(t.Context(), c, "test"); err != nil {
		t.Fatal(err)
	}
	k := driving(t, c)
	if err := k.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		renewed time.Duration // ago
		signers int
	}{{time.Hour, 2}, {25 * time.Hour, 1}} {
		err := k.Change(t.Context(), func(next *Document) error {
			as := next.Domains["cluster.local"].Authorities
			for i := range as {
				switch {
				case as[i].State == StateRetiring:
					as[i].Retired, as[i].Key, as[i].Created = nil, nil, time.Now().Add(-50*time.Hour)
				case as[i].Kind == KindIssuer:
					as[i].Created = time.Now().Add(-tc.renewed)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		k.held.LetGo(func(string) bool { return false })
		all, err := k.CRLSigners(t.Context())
		if err != nil || len(all) != tc.signers {
			t.Fatalf("renewed %s ago: %d signers, %v; want %d", tc.renewed, len(all), err, tc.signers)
		}
		if len(all) > 1 && (all[1].Issuer != nil || all[1].Why == nil) {
			t.Errorf("it has no key, and signs: %+v", all[1])
		}
	}
}
