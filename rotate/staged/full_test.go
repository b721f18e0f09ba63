package staged

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/rotate/stages"
)

// full is a store that takes no document while it is told so, and goes on otherwise: this server keeps its lease.
type full struct {
	store.Store
	is bool
}

func (f *full) Replace(ctx context.Context, old, next uint64, data []byte) error {
	if f.is {
		return errors.New("no space left on device")
	}
	return f.Store.Replace(ctx, old, next, data)
}

func (s *server) lines(t *testing.T, words string) int {
	t.Helper()
	data, err := os.ReadFile(s.audit)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(data), words)
}

// TestFullStoreDoesNotFillTheAuditLog: a step that cannot be stored for an hour is in the audit log once, and a start by policy now and then;
// once there is room, both are done.
func TestFullStoreDoesNotFillTheAuditLog(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a", nil)
		f := &full{Store: w.store}
		w.store = f
		a := w.start("a", f)
		w.begin(t, "a", document.KindRoot)
		w.until("a", document.PhaseDistribute)
		w.acknowledge("a")
		hour := func() {
			f.is = true
			for range 360 {
				if !a.k.Drives() {
					w.drives("a")
				}
				a.m.look(t.Context(), time.Now())
				time.Sleep(10 * time.Second)
			}
			f.is = false
		}
		hour()
		w.until("a", document.PhaseActivate)
		if n := a.lines(t, "everybody has the successor"); n != 1 {
			t.Errorf("the step is in the audit log %d times", n)
		}
		w.until("a", "")
		time.Sleep(51 * time.Hour)
		w.drives("a")
		before := a.lines(t, "rotate start")
		hour()
		w.until("a", document.PhaseDistribute)
		if n := a.lines(t, "rotate start") - before; n < 2 || n > 70 {
			t.Errorf("the start by policy is in the audit log %d times", n)
		}
	})
}

// TestGatesThatFlapDoNotFillTheLog: a gate that passes once more each second is told once an hour.
func TestGatesThatFlapDoNotFillTheLog(t *testing.T) {
	bubble(t, func(t *testing.T) {
		w := newWorld(t, "a", nil)
		a := w.all["a"]
		w.begin(t, "a", document.KindRoot)
		w.until("a", document.PhaseDistribute)
		a.m.look(t.Context(), time.Now())
		for i := range 7200 {
			a.m.noteGates([]stages.Gate{{Name: stages.GateConsumers, Passed: i%2 == 0}}, a.k.Document().Rotating(td), time.Now())
			time.Sleep(time.Second)
		}
		if n := strings.Count(a.log.String(), "gate=consumers"); n != 2 {
			t.Errorf("the log has it %d times", n)
		}
	})
}
