package garbage

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"
)

// A small server collects seldom, a large one has little garbage for what it is, and none collects all the time.
func TestPercent(t *testing.T) {
	for used, want := range map[uint64]int{0: 300, 5 << 20: 300, 20 << 20: 300, 64 << 20: 100, 128 << 20: 100, 256 << 20: 100, 1 << 30: 100, 1 << 50: 100} {
		if got := percent(used); got != want {
			t.Errorf("%d MB are in use: got %d %%, want %d %%", used>>20, got, want)
		}
	}
	for used := uint64(22 << 20); used < 64<<20; used += 1 << 20 {
		if garbage := used * uint64(percent(used)) / 100; garbage > most {
			t.Errorf("%d MB are in use: %d MB of garbage", used>>20, garbage>>20)
		}
	}
}

// collecting returns the percentage at which the collector runs.
func collecting() int {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	return int(sample[0].Value.Uint64())
}

// The collector of this very process follows what is in use, up and down.
func TestBoundFollows(t *testing.T) {
	if os.Getenv("GOGC") != "" {
		t.Skip("GOGC is set, and counts")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); Bound(ctx) }()
	defer func() { cancel(); <-done }()
	await := func(what string, is func(percent int) bool) {
		t.Helper()
		for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			runtime.GC()
			p := collecting()
			if is(p) {
				return
			}
			if time.Since(begun) > time.Minute {
				t.Fatalf("%s: the collector runs at %d %%", what, p)
			}
		}
	}
	await("a few MB", func(p int) bool { return p == rare })
	held := make([][]byte, 200)
	for i := range held {
		held[i] = make([]byte, 1<<20)
	}
	await("200 MB", func(p int) bool { return p == often })
	runtime.KeepAlive(held)
	held = nil
	await("a few MB again", func(p int) bool { return p == rare })
}
