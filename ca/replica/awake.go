package replica

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// This file is about a process that did not run for a while: it was stopped, or its machine was. It cannot know what has come meanwhile,
// maybe that it was declared dead and that the root it signs under has left every bundle (decision D4). So it asks the store first,
// before it signs anything. A store that is away is another matter: then nothing is held up.

const (
	pulseEvery = time.Second
	// doze is how long a process may not have run, and need not ask.
	doze = 30 * time.Second
)

// ErrWoken: this process did not run for a while, and has not asked the store since.
var ErrWoken = errors.New("this server did not run for a while, and has not asked the store yet what has come meanwhile")

// keepPulse notes that the process runs, until ctx ends.
func (h *Hold) keepPulse(ctx context.Context) {
	ticker := time.NewTicker(pulseEvery)
	defer ticker.Stop()
	for {
		h.pulse(time.Now())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (h *Hold) pulse(now time.Time) {
	at := now.UnixNano()
	if last := h.beat.Load(); last != 0 && at-last > int64(doze) {
		h.woke.Store(at) // before the beat: in between nobody may take it for awake
		h.config.Logger.Warn("this process did not run for a while; nothing is signed until it has asked the store", "since", time.Unix(0, last).UTC())
		h.Wake()
	}
	h.beat.Store(at)
}

// asked ends what pulse began: the store was asked since, whatever it said.
func (h *Hold) asked(begun time.Time) {
	if woke := h.woke.Load(); woke != 0 && begun.UnixNano() >= woke {
		h.woke.CompareAndSwap(woke, 0)
	}
}

// awake returns an error while this process may have slept and not asked. The clock is that of the wall: the other one may have slept, too.
func (h *Hold) awake(now time.Time) error {
	last := h.beat.Load()
	if last == 0 || h.woke.Load() == 0 && now.UnixNano()-last <= int64(doze) {
		return nil
	}
	return fmt.Errorf("%w; it ran last before %s", ErrWoken, time.Unix(0, last).UTC().Format(time.RFC3339))
}
