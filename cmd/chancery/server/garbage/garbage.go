// Package garbage owns how much memory the server lets become garbage before it is collected.
//
// It refuses to let garbage grow along with what is in use. Alone a server uses a few MB, and at Go's default the collector would run
// every few hundred requests: three times as much garbage costs little and gives a tenth of the processor. With the streams of ten
// thousand agents, three times as much would be a gigabyte for nothing.
package garbage

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// most is how much of it there should be, as long as the collector is not kept too busy by that.
	most = 64 << 20
	// rare and often are percentages of what is in use: a small server collects no more seldom than by the first, a large one no more
	// often than by the second: with half of that, new pods waited for 0.3 s while ten thousand SVIDs were reissued.
	rare, often = 300, 100
	// look is how often what is in use is looked at. That is known anew after each collection.
	look = time.Second
)

// Bound bounds it until ctx ends. Who sets GOGC knows better.
func Bound(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	set := percent(0)
	debug.SetGCPercent(set)
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		// Setting it stops the world for a moment: not for little.
		if p := percent(inUse()); p < set*9/10 || p > set*11/10 {
			set = p
			debug.SetGCPercent(p)
		}
	}
}

// percent returns how much garbage there may be for what is in use.
func percent(used uint64) int {
	if used <= most*100/rare {
		return rare
	}
	return max(often, int(most*100/used))
}

// inUse returns what the collector takes percentages of: what it found in use on the heap, and the stacks.
func inUse() uint64 {
	samples := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/stack:bytes"}, {Name: "/gc/scan/globals:bytes"}}
	metrics.Read(samples)
	sum := uint64(0)
	for _, s := range samples {
		if s.Value.Kind() == metrics.KindUint64 {
			sum += s.Value.Uint64()
		}
	}
	return sum
}
