package replica

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// logged is the config of a replica with an issuance log.
func (w *world) logged(name string, id uint32, key string) Config {
	c := w.config(name)
	c.Issuance = document.LogState{ID: id, Key: key}
	return c
}

// TestD13ReplicasRegister, at the same time, each with a log and a log ID of its own; one that starts again is the same.
func TestD13ReplicasRegister(t *testing.T) {
	w := newWorld(t)
	const n = 8
	holds := make([]*Hold, n)
	var wg sync.WaitGroup
	for i := range n {
		c := w.config(fmt.Sprintf("r%d", i))
		if i%2 > 0 {
			c = w.logged(c.Name, uint32(30000000+i), fmt.Sprintf("log %d", i))
		}
		if i == 1 { // who opens first the document of one server without a log has that entry
			holds[0] = w.open(w.config("r0"))
		}
		if i > 0 {
			wg.Go(func() { holds[i] = w.open(c) })
		}
	}
	wg.Wait()
	doc, _ := w.stored()
	ids := map[uint32]bool{}
	for i, h := range holds {
		own := doc.Own(h.Replica(), h.config.Issuance.Key)
		if own == nil || own.Replica != fmt.Sprintf("r%d", i) || own.ID != h.LogID() || own.Key != h.config.Issuance.Key || ids[own.ID] {
			t.Errorf("replica %d: %+v, log ID %d", i, own, h.LogID())
		}
		ids[h.LogID()] = true
		if again := w.open(h.config); again.LogID() != h.LogID() || again.Document().Version != doc.Version {
			t.Errorf("replica %d started again has log ID %d, and the document version %d", i, again.LogID(), again.Document().Version)
		}
	}
	if len(doc.Logs) != n {
		t.Errorf("%+v", doc.Logs)
	}
}

// TestD13LostLogIsRefused, as is one that was put in its place, one whose name or ID another has, and a name that cannot be one.
func TestD13LostLogIsRefused(t *testing.T) {
	w := newWorld(t)
	w.open(w.config("plain"))
	a := w.open(w.logged("a", 30000001, "log a"))
	version := a.Document().Version
	for _, c := range []struct {
		config Config
		want   string
	}{
		{w.config("a"), "set issuanceLog in the config"},
		{w.logged("a", 30000002, "log b"), "put the folder of that one back"},
		{w.logged("a", 30000002, "log a"), "put the folder of that one back"},
		{w.logged("plain", 30000002, "log b"), "lists no issuance log yet"},
		{w.logged("plain", 30000001, "log a"), "another replica is registered as plain"},
		{w.logged("b", 30000001, "log b"), "serials would not tell them apart"},
		{w.config("A_1"), "name of replica"},
	} {
		if _, err := Open(t.Context(), c.config); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s with %+v: %v", c.config.Name, c.config.Issuance, err)
		}
	}
	if doc, _ := w.stored(); doc.Version != version {
		t.Errorf("the document changed: %+v", doc.Logs)
	}
}

// TestHostWithAnotherName is the same replica, by its log. Two servers with copies of one log are told apart: the one that finds its
// entry taken stops to serve.
func TestHostWithAnotherName(t *testing.T) {
	w := newWorld(t)
	w.open(w.config("plain"))
	a := w.open(w.logged("a", 30000001, "log a"))
	renamed := w.logged("b", 30000001, "log a")
	renamed.Mark = a.config.Mark
	b := w.open(renamed)
	doc, _ := w.stored()
	if len(doc.Logs) != 2 || doc.Own("b", "").ID != a.LogID() || b.LogID() != a.LogID() || b.Err() != nil {
		t.Errorf("%+v, %v", doc.Logs, b.Err())
	}
	a.Follow(t.Context())
	if err := a.Err(); err == nil || !strings.Contains(err.Error(), "a copy of the issuance log") {
		t.Errorf("got %v", err)
	}
	if now, _ := w.stored(); now.Version != doc.Version {
		t.Error("they take the entry from each other")
	}
}

// TestForgottenReplica: nobody waits for it any more; it leaves the document once what it issued has ended; it takes its entry up
// again if it comes back before, even while it runs. One that lost its log is a new one.
func TestForgottenReplica(t *testing.T) {
	w := newWorld(t)
	a := w.open(w.config("a"))
	b := w.open(w.logged("b", 30000001, "log b"))
	now := time.Now()
	forget := func() {
		t.Helper()
		fresh := false
		if err := a.Change(t.Context(), func(next *document.Document) (err error) { // which a has not heard of, at first
			fresh, err = next.Forget("b", now)
			return err
		}); err != nil || !fresh {
			t.Fatal(fresh, err)
		}
		if live := a.Document().Live(); len(live) != 1 || live[0].Replica != "a" {
			t.Errorf("%+v", live)
		}
	}
	forget()
	b.Follow(t.Context())
	if own := b.Document().Own("b", "log b"); own.DeclaredDead != nil || len(b.Document().Live()) != 2 {
		t.Errorf("it runs, and is dead: %+v", own)
	}
	a.Follow(t.Context())
	forget()
	if again := w.open(b.config); again.LogID() != b.LogID() || len(again.Document().Live()) != 2 {
		t.Errorf("started again: log ID %d, %+v", again.LogID(), again.Document().Logs)
	}
	a.Follow(t.Context())
	forget()
	fresh := w.open(w.logged("b", 30000002, "log c"))
	if doc := fresh.Document(); len(doc.Logs) != 3 || len(doc.Live()) != 2 || fresh.LogID() != 30000002 {
		t.Errorf("with another log: %+v", doc.Logs)
	}
	a.Follow(t.Context())
	var gone []string
	for _, after := range []time.Duration{89 * 24 * time.Hour, 91 * 24 * time.Hour} {
		if err := a.Change(t.Context(), func(next *document.Document) error {
			gone = next.DropDead(now.Add(after))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if left := len(a.Document().Logs); (after < 90*24*time.Hour) != (left == 3) {
			t.Errorf("after %s there are %d", after, left)
		}
	}
	if len(gone) != 0 { // the new one has the name
		t.Errorf("gone: %v", gone)
	}
	if _, err := a.Document().Forget("nobody", now); err == nil || !strings.Contains(err.Error(), "there are a, b") {
		t.Error(err)
	}
}

// TestDeadReplicasAreDropped, and said, but for the last one.
func TestDeadReplicasAreDropped(t *testing.T) {
	d := document.New()
	long := time.Now().Add(-100 * 24 * time.Hour)
	d.Logs = []document.LogState{{ID: 1, Replica: "a"}, {ID: 2, Replica: "b", DeclaredDead: &long}, {ID: 3, Replica: "b", DeclaredDead: &long}, {ID: 4, Replica: "c", DeclaredDead: &long}}
	if gone := d.DropDead(time.Now()); !slices.Equal(gone, []string{"b", "c"}) || len(d.Logs) != 1 {
		t.Errorf("gone %v, left %+v", gone, d.Logs)
	}
	d.Logs[0].DeclaredDead = &long
	if gone := d.DropDead(time.Now()); len(gone) != 0 || len(d.Logs) != 1 {
		t.Errorf("gone %v, left %+v", gone, d.Logs)
	}
}

// TestReplicasAreBounded: what does not fit is refused with what to do.
func TestReplicasAreBounded(t *testing.T) {
	d := document.New()
	d.Logs = nil
	for i := range 256 {
		if err := d.Register(fmt.Sprintf("r%d", i), document.LogState{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Register("more", document.LogState{}); err == nil || !strings.Contains(err.Error(), "replica forget") {
		t.Errorf("got %v", err)
	}
}
