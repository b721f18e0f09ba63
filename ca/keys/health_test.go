package keys_test

import (
	"bytes"
	"context"
	"crypto"
	"errors"
	"io"
	"log/slog"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
)

// slow is a key in a device that takes its time, and may fail.
type slow struct {
	crypto.Signer
	delay time.Duration
	err   atomic.Pointer[error]
	count atomic.Int64
}

func (s *slow) Sign(random io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	s.count.Add(1)
	time.Sleep(s.delay)
	if err := s.err.Load(); err != nil {
		return nil, *err
	}
	return s.Signer.Sign(random, digest, opts)
}

func newSlow(t *testing.T, delay time.Duration) *slow {
	t.Helper()
	key, err := ca.GenerateKey(ca.P256)
	if err != nil {
		t.Fatal(err)
	}
	return &slow{Signer: key, delay: delay}
}

func watched(name string, key crypto.Signer) keys.Watched {
	return keys.Watched{Name: name, Open: func(context.Context) (crypto.Signer, error) { return key, nil }}
}

// health runs a Health over the keys in a bubble of synctest.
func health(t *testing.T, list func() []keys.Watched) (*keys.Health, *prometheus.Registry, *bytes.Buffer) {
	t.Helper()
	log := new(bytes.Buffer)
	reg := prometheus.NewRegistry()
	h := keys.NewHealth(keys.HealthConfig{Keys: list, Logger: slog.New(slog.NewTextHandler(log, nil)), Metrics: reg})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- h.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		time.Sleep(time.Hour) // checks that hang come to their end
	})
	return h, reg, log
}

// healthy holds which keys the metric calls healthy.
func healthy(t *testing.T, reg *prometheus.Registry, want map[string]float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "chancery_ca_key_healthy" {
			continue
		}
		for _, m := range f.GetMetric() {
			got[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("chancery_ca_key_healthy is %v, want %v", got, want)
	}
}

func TestHealthChecksAtStartAndOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		key := newSlow(t, 0)
		h, reg, log := health(t, func() []keys.Watched { return []keys.Watched{watched("issuer a", key)} })
		synctest.Wait()
		healthy(t, reg, map[string]float64{"issuer a": 1})
		time.Sleep(10*time.Minute + time.Second)
		if n := key.count.Load(); n != 11 {
			t.Errorf("%d signatures in 10 minutes", n)
		}
		if err := h.Err("issuer a"); err != nil || log.Len() > 0 {
			t.Error(err, log)
		}
	})
}

func TestHealthOfAFailingKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		key := newSlow(t, 0)
		h, reg, log := health(t, func() []keys.Watched { return []keys.Watched{watched("issuer a", key)} })
		synctest.Wait()
		gone := errors.New("the token is gone")
		key.err.Store(&gone)
		time.Sleep(time.Minute)
		synctest.Wait()
		if err := h.Err("issuer a"); err == nil || !strings.Contains(err.Error(), "the token is gone") {
			t.Errorf("got %v", err)
		}
		healthy(t, reg, map[string]float64{"issuer a": 0})
		time.Sleep(time.Minute) // the same again is no news
		if n := strings.Count(log.String(), "key does not sign"); n != 1 {
			t.Errorf("logged %d times: %s", n, log)
		}
		key.err.Store(nil)
		time.Sleep(6 * time.Second) // a failing key is tried more often
		if err := h.Err("issuer a"); err != nil || !strings.Contains(log.String(), "key signs again") {
			t.Errorf("after it came back: %v, %s", err, log)
		}
	})
}

// A key that signs, but for another public key, is found.
type wrongKey struct{ crypto.Signer }

func (w wrongKey) Public() crypto.PublicKey {
	other, _ := ca.GenerateKey(ca.P256)
	return other.Public()
}

func TestHealthFindsWrongSignatures(t *testing.T) {
	if err := keys.Check(wrongKey{newSlow(t, 0)}); err == nil || !strings.Contains(err.Error(), "does not verify") {
		t.Errorf("got %v", err)
	}
}

// A slow key is healthy, one that hangs is not, and neither holds up the check of another. A check that hangs is not
// started again beside itself.
func TestHealthOfSlowAndHangingKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slowKey, hanging, quick := newSlow(t, 3*time.Second), newSlow(t, 10*time.Minute), newSlow(t, 0)
		h, _, _ := health(t, func() []keys.Watched {
			return []keys.Watched{watched("hanging", hanging), watched("slow", slowKey), watched("quick", quick)}
		})
		time.Sleep(5*time.Minute + time.Second)
		if err := errors.Join(h.Err("slow"), h.Err("quick")); err != nil {
			t.Error(err)
		}
		if err := h.Err("hanging"); err == nil || !strings.Contains(err.Error(), "no signature within 30s") {
			t.Errorf("the key that hangs: %v", err)
		}
		if n := hanging.count.Load(); n != 1 {
			t.Errorf("%d checks hang at a time", n)
		}
		if n := quick.count.Load(); n < 5 {
			t.Errorf("the quick key was checked %d times in 5 minutes", n)
		}
		time.Sleep(5 * time.Minute) // it answers at last
		synctest.Wait()
		if err := h.Err("hanging"); err != nil {
			t.Error(err)
		}
	})
}

func TestHealthForgetsKeysThatAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var list atomic.Pointer[[]keys.Watched]
		list.Store(&[]keys.Watched{watched("old", newSlow(t, 0)), watched("lost", nil)})
		(*list.Load())[1].Open = func(context.Context) (crypto.Signer, error) { return nil, keys.ErrNotFound }
		h, reg, _ := health(t, func() []keys.Watched { return *list.Load() })
		synctest.Wait()
		healthy(t, reg, map[string]float64{"lost": 0, "old": 1})
		list.Store(&[]keys.Watched{watched("new", newSlow(t, 0))})
		time.Sleep(time.Minute + time.Second)
		healthy(t, reg, map[string]float64{"new": 1})
		if err := h.Err("lost"); err != nil {
			t.Error(err)
		}
	})
}

func TestVerdicts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		good, bad := newSlow(t, 2*time.Second), newSlow(t, 0)
		why := errors.New("the token is gone")
		bad.err.Store(&why)
		start := time.Now()
		h, _, _ := health(t, func() []keys.Watched { return []keys.Watched{watched("root b", bad), watched("issuer a", good)} })
		synctest.Wait()
		time.Sleep(time.Second)
		v := h.Verdicts()
		if len(v) != 2 || v[0].Name != "issuer a" || !v[0].Waiting.Equal(start) || !v[0].Checked.IsZero() || v[0].Err != nil {
			t.Errorf("while a signature is under way: %+v", v)
		}
		if v[1].Name != "root b" || !errors.Is(v[1].Err, why) || !v[1].Checked.Equal(start) || !v[1].Waiting.IsZero() {
			t.Errorf("a key that fails: %+v", v[1])
		}
		time.Sleep(2 * time.Second)
		if v := h.Verdicts()[0]; v.Took != 2*time.Second || !v.Checked.Equal(start.Add(2*time.Second)) || !v.Waiting.IsZero() || v.Err != nil {
			t.Errorf("a key that is slow: %+v", v)
		}
	})
}
