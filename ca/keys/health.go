package keys

import (
	"context"
	"crypto"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	checkEvery      = time.Minute
	checkAgainEvery = 5 * time.Second // while a key fails
	// checkPatience is how long a signature may take. A slow key is no broken one, but one that does not answer is.
	checkPatience = 30 * time.Second
)

// Watched is a key that is checked again and again.
type Watched struct {
	Name string // for metrics and logs, such as "issuer 4f2a..."
	Open func(context.Context) (crypto.Signer, error)
}

// HealthConfig says what Health watches.
type HealthConfig struct {
	Keys    func() []Watched // the keys of the moment
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Health makes a signature with each key at start and once a minute, in the background: a key that stopped to sign is
// found before a workload asks for it. Each key is checked on its own, so that a slow one delays no other.
type Health struct {
	config  HealthConfig
	healthy *prometheus.GaugeVec
	seconds *prometheus.GaugeVec
	wake    chan struct{} // cap 1: a check has ended

	mu   sync.Mutex // guards keys and what is in it
	keys map[string]*verdict
}

// verdict is what is known of a key.
type verdict struct {
	running time.Time // when the check that is under way began; zero if none is
	checked time.Time // when the last check ended; zero before
	took    time.Duration
	err     error  // of the last check
	logged  string // the error that was logged last
}

// NewHealth registers the metrics.
func NewHealth(c HealthConfig) *Health {
	h := &Health{
		config: c, keys: map[string]*verdict{}, wake: make(chan struct{}, 1),
		healthy: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "chancery_ca_key_healthy", Help: "1 if the key made a valid signature at its last check, else 0.",
		}, []string{"key"}),
		seconds: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "chancery_ca_key_sign_seconds", Help: "How long the signature of the key's last check took.",
		}, []string{"key"}),
	}
	c.Metrics.MustRegister(h.healthy, h.seconds)
	return h
}

// Err returns why a key does not sign, or nil if it does or was not checked yet.
func (h *Health) Err(name string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.keys[name]; v != nil && v.err != nil {
		return fmt.Errorf("key of %s: %w", name, v.err)
	}
	return nil
}

// Verdict is what is known of a key.
type Verdict struct {
	Name    string
	Checked time.Time     // when the last check ended; zero before the first
	Took    time.Duration // of its signature
	Waiting time.Time     // when the check that is under way began; zero if none is
	Err     error         // why the key does not sign
}

// Verdicts returns what is known of each key, by name.
func (h *Health) Verdicts() []Verdict {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []Verdict
	for _, name := range slices.Sorted(maps.Keys(h.keys)) {
		v := h.keys[name]
		out = append(out, Verdict{name, v.checked, v.took, v.running, v.err})
	}
	return out
}

// Run checks the keys until ctx ends. It does not wait for a signature that hangs.
func (h *Health) Run(ctx context.Context) error {
	for {
		h.round(ctx)
		next := time.NewTimer(h.wait())
		for due := false; !due; {
			select {
			case <-ctx.Done():
				next.Stop()
				return nil
			case <-next.C:
				due = true
			case <-h.wake: // a verdict may have changed how long to wait
				next.Reset(h.wait())
			}
		}
	}
}

func (h *Health) wait() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, v := range h.keys {
		if v.err != nil || !v.running.IsZero() {
			return checkAgainEvery
		}
	}
	return checkEvery
}

// round starts a check of each key that has none under way, judges those that take too long, and forgets keys that are
// not there any more.
func (h *Health) round(ctx context.Context) {
	current := map[string]bool{}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, k := range h.config.Keys() {
		current[k.Name] = true
		v := h.keys[k.Name]
		if v == nil {
			v = &verdict{}
			h.keys[k.Name] = v
		}
		if v.running.IsZero() {
			v.running = time.Now()
			go h.check(ctx, k, v)
		} else if time.Since(v.running) >= checkPatience {
			h.judge(k.Name, v, fmt.Errorf("no signature within %s", checkPatience))
		}
	}
	for name := range h.keys {
		if !current[name] {
			delete(h.keys, name)
			h.healthy.DeleteLabelValues(name)
			h.seconds.DeleteLabelValues(name)
		}
	}
}

func (h *Health) check(ctx context.Context, k Watched, v *verdict) {
	began := time.Now()
	key, err := k.Open(ctx)
	if err == nil {
		began = time.Now() // opening may take long by design, as decrypting a file does
		err = Check(key)
	}
	took := time.Since(began)
	if ctx.Err() != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	v.running, v.checked, v.took = time.Time{}, time.Now(), took
	if h.keys[k.Name] == v { // else the key went away meanwhile
		h.seconds.WithLabelValues(k.Name).Set(took.Seconds())
		h.judge(k.Name, v, err)
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// judge takes a verdict down and logs it if it is news. Caller holds mu.
func (h *Health) judge(name string, v *verdict, err error) {
	v.err = err
	if err == nil {
		h.healthy.WithLabelValues(name).Set(1)
		if v.logged != "" {
			h.config.Logger.Info("key signs again", "key", name)
		}
		v.logged = ""
		return
	}
	h.healthy.WithLabelValues(name).Set(0)
	if v.logged != err.Error() {
		v.logged = err.Error()
		h.config.Logger.Error("key does not sign", "key", name, "reason", v.logged)
	}
}
