package agents

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// Bounds of all streams together, and of one agent's report.
const (
	maxAgents      = 20_000
	maxOfOnePlace  = 256 // many agents may share one identity and one address; none needs that many
	maxServed      = 1000
	maxKept        = 200_000 // SVIDs reported by all
	maxWords       = 20      // lines of what cannot enforce CRLs
	maxWord        = 200
	maxHolders     = 10_000
	checkpointTime = 10 * time.Second
	// checkpointBytes is how much an update may have for each checkpointTime that passes between two of them which only
	// bring checkpoints.
	checkpointBytes = 64 << 10
)

// Config is what a Hub is made of.
type Config struct {
	// Checkpoints returns the last checkpoint of each issuance log; nil for none. It is called for each message, since an
	// agent that saw a later one elsewhere would take an earlier one for a log that went back.
	Checkpoints func() []string
	Metrics     prometheus.Registerer
}

// Hub sends updates to agents. Its methods are safe for concurrent use.
type Hub struct {
	config Config
	start  time.Time
	gone   prometheus.Counter
	ending chan struct{} // closed by Close
	end    sync.Once     // of ending

	mu      sync.Mutex // guards all below
	current *update    // nil before the first Publish
	changed chan struct{}
	streams map[*stream]struct{}
	places  map[string]int
	kept    int       // SVIDs in reports
	pushed  time.Time // when the checkpoints below were pushed,
	last    []string  // the last ones that all were woken for

	issuedMu sync.Mutex           // guards issued; apart from mu, since each certificate takes it
	issued   map[holder]time.Time // when the last certificate of a holder ends
	forgot   time.Time            // when ended ones were last forgotten
}

// holder is an identity with certificates of one API.
type holder struct{ api, id string }

// update is one state of all that agents are sent.
type update struct {
	message *chanceryv1.SyncUpdate
	content uint64 // the version at which anything but checkpoints changed last
}

// stream is one connected agent.
type stream struct {
	id, remote, place  string
	sent, acknowledged uint64
	refused            string
	served             []*chanceryv1.ServedSvid
	omitted            uint64 // SVIDs of the report that were not kept
	notEnforcing       []string
}

// New returns a hub that has nothing to send yet.
func New(c Config) *Hub {
	if c.Checkpoints == nil {
		c.Checkpoints = func() []string { return nil }
	}
	h := &Hub{
		config: c, start: time.Now(), ending: make(chan struct{}), changed: make(chan struct{}), streams: map[*stream]struct{}{}, places: map[string]int{},
		issued: map[holder]time.Time{},
	}
	if c.Metrics != nil {
		h.register(c.Metrics)
	}
	return h
}

// Close ends all streams, so that a server that stops need not wait for agents that would stay for ever.
func (h *Hub) Close() { h.end.Do(func() { close(h.ending) }) }

// Publish makes a new state known. Version and checkpoints of the message are filled in.
func (h *Hub) Publish(m *chanceryv1.SyncUpdate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m.Version = h.nextVersion()
	h.set(&update{m, m.Version})
}

// nextVersion returns a version above all before. Caller holds mu.
func (h *Hub) nextVersion() uint64 {
	if h.current == nil {
		return uint64(h.start.UnixMicro())
	}
	return h.current.message.Version + 1
}

// set wakes all streams. Caller holds mu.
func (h *Hub) set(u *update) {
	h.current = u
	close(h.changed)
	h.changed = make(chan struct{})
}

// PushCheckpoints has the checkpoints sent, if they are new. Alone they make an update every 10 s at most, and more seldom
// where updates are large. It is called every second or so.
func (h *Hub) PushCheckpoints(now time.Time) {
	all := h.config.Checkpoints()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.current == nil || slices.Equal(h.last, all) {
		return
	}
	size := 0
	for _, c := range h.current.message.Crls {
		size += len(c)
	}
	if now.Sub(h.pushed) < checkpointTime*time.Duration(1+size/checkpointBytes) {
		return
	}
	h.pushed, h.last = now, all
	old := h.current.message
	h.set(&update{&chanceryv1.SyncUpdate{Version: h.nextVersion(), Bundle: old.Bundle, Crls: old.Crls, Issuers: old.Issuers}, h.current.content})
}

// Counts returns how many agents are connected, and how many of them have acknowledged the last bundle and CRLs.
func (h *Hub) Counts() (agents, acknowledged int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.counts()
}

func (h *Hub) counts() (agents, acknowledged int) {
	for s := range h.streams {
		if h.current != nil && s.acknowledged >= h.current.content {
			acknowledged++
		}
	}
	return len(h.streams), acknowledged
}

// Wait returns once each agent that is connected has acknowledged the last bundle and CRLs, or refused them, or when ctx
// ends, with what Counts says then.
func (h *Hub) Wait(ctx context.Context) (agents, acknowledged int) {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		if agents, acknowledged = h.Counts(); agents == acknowledged || h.answered() {
			return agents, acknowledged
		}
		select {
		case <-ctx.Done():
			return agents, acknowledged
		case <-ticker.C:
		}
	}
}

// answered reports whether each agent has acknowledged the last content or refused it.
func (h *Hub) answered() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.streams {
		if h.current != nil && s.acknowledged < h.current.content && (s.refused == "" || s.sent < h.current.content) {
			return false
		}
	}
	return true
}

// Served returns what agents say they serve, and how many SVIDs were too many to be kept.
func (h *Hub) Served() (all []*chanceryv1.ServedByAgent, omitted uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.streams {
		all = append(all, &chanceryv1.ServedByAgent{SpiffeId: s.id, Remote: s.remote, Served: s.served})
		omitted += s.omitted
	}
	return all, omitted
}

// Issued notes that an identity has a certificate, and by which API, until when.
func (h *Hub) Issued(api, id string, notAfter time.Time) {
	h.issuedMu.Lock()
	defer h.issuedMu.Unlock()
	key := holder{api, id}
	if _, known := h.issued[key]; !known && len(h.issued) >= maxHolders && !h.forgetEnded(time.Now()) {
		return
	}
	h.issued[key] = notAfter
}

// forgetEnded makes room by forgetting holders whose certificates have ended, once a minute at most. Caller holds issuedMu.
func (h *Hub) forgetEnded(now time.Time) (room bool) {
	if now.Sub(h.forgot) < time.Minute {
		return false
	}
	h.forgot = now
	maps.DeleteFunc(h.issued, func(_ holder, end time.Time) bool { return now.After(end) })
	return len(h.issued) < maxHolders
}

// register adds the metrics.
func (h *Hub) register(r prometheus.Registerer) {
	gauge := func(name, help string, read func() float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, read))
	}
	gauge("chancery_csr_agents", "Agents with a Sync stream.", func() float64 { n, _ := h.Counts(); return float64(n) })
	gauge("chancery_csr_agents_behind", "Agents with a Sync stream that have not acknowledged the last bundle and CRLs.", func() float64 {
		n, acknowledged := h.Counts()
		return float64(n - acknowledged)
	})
	gauge("chancery_csr_sync_version", "Version of the last update for agents; 0 before the first.", func() float64 {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.current == nil {
			return 0
		}
		return float64(h.current.message.Version)
	})
	h.gone = prometheus.NewCounter(prometheus.CounterOpts{Name: "chancery_csr_sync_refused_total", Help: "Updates that an agent said it did not apply."})
	r.MustRegister(h.gone)
}
