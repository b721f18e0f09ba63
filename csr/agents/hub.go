package agents

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/trust"
)

// Bounds of all streams together, and of one agent's report.
const (
	maxAgents     = 20_000
	maxOfOnePlace = 256 // many agents may share one identity and one address; none needs that many
	maxServed     = 1000
	maxKept       = 200_000  // SVIDs reported by all,
	maxKeptBytes  = 48 << 20 // and what they take; it fits into an answer of the admin API
	// maxPlaceBytes is what those of one identity and place may take of it, so that nobody crowds out the others.
	maxPlaceBytes  = maxKeptBytes / 8
	maxWords       = 20 // lines of what cannot enforce CRLs
	maxWord        = 200
	maxHolders     = 10_000
	maxMark        = 64 // bytes of a mark's MAC
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
	// Mark returns the mark of the document that the server has; nil for none. It is called for each message, too.
	Mark func() *chanceryv1.DocumentMark
	// Seen is told of a mark that an agent brought along and that is above Mark's: the server is behind, or its store was
	// rolled back, or the agent made it up (decision D9). It verifies the mark, and may take its time: only the stream that
	// brought the mark waits. ctx ends with that stream. May be nil.
	Seen func(ctx context.Context, mark *chanceryv1.DocumentMark)
	// Naming returns who may serve a service, "NS/NAME", as SPIFFE IDs; known is false for what is no service. It does not block. See
	// NamingChanged. Nil: agents are told nothing, so that what a
	// server with a source told them stands: servers get it in their configs one after the other.
	Naming func(service string) (ids []string, known bool)
	// Ledger is told what agents say of their consumers; nil: nobody is.
	Ledger  *evidence.Ledger
	Logger  *slog.Logger // nil for none
	Metrics prometheus.Registerer
}

// Hub sends updates to agents. Its methods are safe for concurrent use.
type Hub struct {
	config Config
	start  time.Time
	gone   prometheus.Counter
	ending chan struct{} // closed by Close
	end    sync.Once     // of ending
	naming naming
	told   atomic.Pointer[func(trust.Domain)] // of unknown authorities; nil for nobody

	mu      sync.Mutex // guards all below
	current *update    // nil before the first Publish
	news    time.Time  // when it was called last
	changed chan struct{}
	streams map[*stream]struct{}
	places  map[string]int
	kept    int            // SVIDs in reports
	bytes   int            // of these
	byPlace map[string]int // of these, by place
	pushed  time.Time      // when the checkpoints below were pushed,
	last    []string       // the last ones that all were woken for,
	marked  uint64         // and the version of the mark
	again   bool           // agents are to say again how they are
	former  int            // bytes of the names of former domains, of all streams

	issuedMu sync.Mutex           // guards issued; apart from mu, since each certificate takes it
	issued   map[holder]time.Time // when the last certificate of a holder ends
	forgot   time.Time            // when ended ones were last forgotten
}

// holder is an identity with certificates of one API.
type holder struct{ api, id string }

// update is one state of all that agents are sent.
type update struct {
	version uint64
	content uint64 // the version at which roots or CRLs changed last
	shared  []byte // the update but for version, checkpoints and what follows, encoded
	reissue *chanceryv1.Reissue
}

// stream is one connected agent.
type stream struct {
	id, remote, place  string
	sent, acknowledged uint64
	refused            string
	served             []*chanceryv1.ServedSvid
	bytes              int    // of these
	omitted            uint64 // SVIDs of the report that were not kept
	notEnforcing       []string
	turn               turn
	former             []string    // names of former domains that are asked for
	look               *time.Timer // wakes the stream
	named              bool        // there is something to say of naming,
	paused             time.Time   // but not before

	services []*service            // that are asked for, in order; this and the next ones belong to naming's lock
	untold   map[*service]struct{} // of these, those of which there is something new to say
	left     bool
}

// New returns a hub that has nothing to send yet.
func New(c Config) *Hub {
	if c.Checkpoints == nil {
		c.Checkpoints = func() []string { return nil }
	}
	if c.Mark == nil {
		c.Mark = func() *chanceryv1.DocumentMark { return nil }
	}
	if c.Ledger == nil {
		c.Ledger = evidence.New(evidence.Config{})
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	h := &Hub{
		config: c, start: time.Now(), ending: make(chan struct{}), changed: make(chan struct{}), streams: map[*stream]struct{}{}, places: map[string]int{},
		byPlace: map[string]int{}, issued: map[holder]time.Time{},
		naming: naming{
			of: c.Naming, warn: c.Logger.Warn, seldom: rate.Sometimes{Interval: time.Minute}, all: map[string]*service{}, byPlace: map[string]int{},
		},
	}
	if c.Metrics != nil {
		h.register(c.Metrics)
	}
	c.Ledger.Ask(h.Again)
	return h
}

// Close ends all streams, so that a server that stops need not wait for agents that would stay for ever.
func (h *Hub) Close() { h.end.Do(func() { close(h.ending) }) }

// nextVersion returns a version above all before. Caller holds mu.
func (h *Hub) nextVersion() uint64 {
	if h.current == nil {
		return uint64(h.start.UnixMicro())
	}
	return h.current.version + 1
}

// set wakes all streams. Caller holds mu.
func (h *Hub) set(u *update) {
	h.current = u
	close(h.changed)
	h.changed = make(chan struct{})
}

// Published returns when bundle or CRLs changed last; zero before the first.
func (h *Hub) Published() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.news
}

// Ledger returns who is told what agents say of their consumers.
func (h *Hub) Ledger() *evidence.Ledger { return h.config.Ledger }

// Again has agents say how they are, also those of which nothing has changed: they are sent what they have, and acknowledge it once
// more. It happens with the next PushCheckpoints, as seldom as that pushes anything.
func (h *Hub) Again() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.again = true
}

// PushCheckpoints has checkpoints and mark sent, if they are new. Alone they make an update every 10 s at most, and more
// seldom where updates are large; not to all streams at once. It is called every second or so.
func (h *Hub) PushCheckpoints(now time.Time) {
	all, mark := h.config.Checkpoints(), h.config.Mark().GetVersion()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.current == nil || slices.Equal(h.last, all) && h.marked == mark && !h.again {
		return
	}
	if now.Sub(h.pushed) < checkpointTime*time.Duration(1+len(h.current.shared)/checkpointBytes) {
		return
	}
	h.pushed, h.last, h.marked, h.again = now, all, mark, false
	h.set(&update{h.nextVersion(), h.current.content, h.current.shared, h.current.reissue})
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
		return float64(h.current.version)
	})
	h.gone = prometheus.NewCounter(prometheus.CounterOpts{Name: "chancery_csr_sync_refused_total", Help: "Updates that an agent said it did not apply."})
	r.MustRegister(h.gone)
}
