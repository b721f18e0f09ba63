package rotate

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

func TestPause(t *testing.T) {
	down := errors.New("down")
	busy := func(d time.Duration) error { return fmt.Errorf("asking: %w", askedToWait{d}) }
	for _, tc := range []struct {
		name          string
		err           error
		backoff, left time.Duration
		least, most   time.Duration
	}{
		{"first failure", down, firstBackoff, time.Hour, 400 * time.Millisecond, 600 * time.Millisecond},
		{"long down", down, maxBackoff, time.Hour, 48 * time.Second, 72 * time.Second},
		{"no SVID", down, maxBackoff, 0, 48 * time.Second, 72 * time.Second},
		{"an ended SVID", down, maxBackoff, -time.Minute, 48 * time.Second, 72 * time.Second},
		{"the SVID ends in a minute", down, maxBackoff, time.Minute, 15 * time.Second, 15 * time.Second},
		{"the SVID ends now", down, maxBackoff, 100 * time.Millisecond, time.Second, time.Second},
		{"never longer than else", down, firstBackoff, 100 * time.Millisecond, 400 * time.Millisecond, 600 * time.Millisecond},
		{"asked to wait, no SVID", busy(5 * time.Second), firstBackoff, 0, 5 * time.Second, 6 * time.Second},
		{"asked to wait, half an hour left", busy(5 * time.Second), firstBackoff, 30 * time.Minute, 36 * time.Second, 43200 * time.Millisecond},
		{"asked to wait, a day left", busy(5 * time.Second), firstBackoff, 24 * time.Hour, time.Minute, 72 * time.Second},
		{"asked to wait, three minutes left", busy(5 * time.Second), firstBackoff, 3 * time.Minute, 5 * time.Second, 6 * time.Second},
		{"asked to wait, little left", busy(5 * time.Second), firstBackoff, 8 * time.Second, 2 * time.Second, 2 * time.Second},
		{"asked to wait for an hour", busy(time.Hour), firstBackoff, time.Hour, time.Minute, 72 * time.Second},
		{"asked for less than the backoff", busy(time.Millisecond), maxBackoff, 0, time.Minute, 72 * time.Second},
	} {
		seen := map[time.Duration]bool{}
		for range 200 { // of random draws
			var asked patience
			errors.As(tc.err, &asked)
			wait := pause(asked, tc.backoff, tc.left)
			if wait < tc.least || wait > tc.most {
				t.Fatalf("%s: waits %s, want %s to %s", tc.name, wait, tc.least, tc.most)
			}
			seen[wait] = true
		}
		if tc.most > tc.least && len(seen) < 100 {
			t.Errorf("%s: only %d different waits: is the jitter gone?", tc.name, len(seen))
		}
	}
}

// Failures double the pause, up to a minute. A server that asks for patience after none had answered is back: the pause begins
// anew, and doubles again if it goes on asking for little.
func TestTriesBeginAnewWhenAServerIsBack(t *testing.T) {
	down, busy := errors.New("down"), fmt.Errorf("asking: %w", askedToWait{time.Millisecond})
	var tries Tries
	want := func(step string, err error, most time.Duration) {
		t.Helper()
		if wait := tries.Pause(err, 0); wait < most*6/10 || wait > most {
			t.Errorf("%s: waits %s; want about %s", step, wait, most*8/10)
		}
	}
	const all = 1200 * time.Millisecond // of a second, with the most jitter
	for i, s := range []time.Duration{500, 1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000} {
		want(fmt.Sprint("down ", i), down, s*all/1000)
	}
	for i, s := range []time.Duration{500, 1000, 2000} {
		want(fmt.Sprint("busy ", i), busy, s*all/1000)
	}
	want("down again", down, 4*all)
	want("busy again", busy, all/2)
}

// TestRenewUrges: what may issue has changed, so a keeper that waits after a failure, or for half of its SVID's life, does not wait
// on. It keeps to the time that it is given.
func TestRenewUrges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t, time.Hour)
		a.set(errors.New("no issuer"), false)
		k := startKeeper(t, a, nil)
		time.Sleep(10 * time.Minute) // the backoff is a minute by now
		a.set(nil, false)
		k.Renew(0)
		synctest.Wait()
		first, _ := k.Current()
		if first == nil {
			t.Fatal("urged after a failure, the keeper waits on")
		}
		k.Renew(time.Minute)
		start := time.Now()
		_, changed := k.Current()
		<-changed
		if took := time.Since(start); took == 0 || took > time.Minute {
			t.Errorf("the SVID was replaced after %s, want within a minute", took)
		}
		time.Sleep(time.Minute)
		if n := len(a.times()); n > 3 {
			t.Errorf("%d SVIDs were issued", n)
		}
	})
}
