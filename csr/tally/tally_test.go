package tally

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New()
		if got := c.Counts(); len(got) != 0 {
			t.Errorf("a new tally has %v", got)
		}
		for i, step := range []struct {
			after time.Duration
			add   int
			want  Count // after it
		}{
			{0, 3, Count{3, 3, 3}},
			{30 * time.Second, 2, Count{5, 5, 5}},
			{29 * time.Second, 0, Count{5, 5, 5}}, // 59 s after the first
			{2 * time.Second, 0, Count{2, 5, 5}},
			{time.Minute, 1, Count{1, 6, 6}},
			{57 * time.Minute, 4, Count{4, 10, 10}},
			{2 * time.Minute, 0, Count{0, 5, 10}},  // the first minute is out of the hour
			{2 * time.Hour, 0, Count{0, 0, 10}},    // longer than either window
			{30 * time.Second, 1, Count{1, 1, 11}}, // and its slots are used again
		} {
			time.Sleep(step.after)
			for range step.add {
				c.Add("ok")
			}
			if got := c.Counts()["ok"]; got != step.want {
				t.Errorf("step %d: %+v, want %+v", i, got, step.want)
			}
		}
		c.Add("BUSY")
		if got := c.Counts(); len(got) != 2 || got["BUSY"] != (Count{1, 1, 1}) || got["ok"].Total != 11 {
			t.Errorf("two outcomes: %v", got)
		}
	})
}

// TestEverySecondCounts holds the sums against what was added, second by second, over more than an hour.
func TestEverySecondCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New()
		for s := 1; s <= 4000; s++ {
			c.Add("ok")
			got := c.Counts()["ok"]
			minute := uint64(min(s, 60))
			// The oldest minute is counted whole or not at all.
			if got.Minute != minute || got.Total != uint64(s) || got.Hour > uint64(min(s, 3600)) || got.Hour < uint64(min(s, 3540)) {
				t.Fatalf("after %d s: %+v", s, got)
			}
			time.Sleep(time.Second)
		}
	})
}

func TestConcurrent(t *testing.T) {
	c := New()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				c.Add("ok")
				c.Counts()
			}
		})
	}
	wg.Wait()
	if got := c.Counts()["ok"].Total; got != 8000 {
		t.Errorf("%d of 8000 counted", got)
	}
}

func BenchmarkAdd(b *testing.B) {
	c := New()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			c.Add("ok")
		}
	})
}
