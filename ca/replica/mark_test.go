package replica

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// rollback is a store that can be put back to what it had, by who writes it.
type rollback struct {
	store.Store
	data    []byte
	version uint64
}

func (r *rollback) Load(ctx context.Context) ([]byte, uint64, error) {
	if r.data != nil {
		return r.data, r.version, nil
	}
	return r.Store.Load(ctx)
}

func (r *rollback) to(data []byte, version uint64) { r.data, r.version = data, version }

// TestD9OlderDocumentIsRefused at a start, and by a server that runs, which goes on with the one that it has.
func TestD9OlderDocumentIsRefused(t *testing.T) {
	w := newWorld(t)
	st := &rollback{Store: w.store}
	w.store = st
	h := w.open(w.config("a"))
	_, old := w.stored()
	oldVersion := h.Document().Version
	if err := h.Change(t.Context(), count); err != nil {
		t.Fatal(err)
	}
	last, data := w.stored()
	// Other content under the same version, and a version that does not follow: both with the sealing key, from another line.
	forked := must(must(document.Decode(old, oldVersion, w.sealer)).Next(old))
	forked.By = "b"
	forkedData := must(forked.Encode(w.sealer))
	longer := must(forked.Next(forkedData))
	longerData := must(longer.Encode(w.sealer))
	muchLonger := must(longer.Next(longerData))
	for name, c := range map[string]struct {
		data    []byte
		version uint64
		want    string
	}{
		"an older version":           {old, oldVersion, "has version 2"},
		"another of this version":    {forkedData, forked.Version, "another version 3"},
		"one that does not follow":   {longerData, longer.Version, "does not follow"},
		"one of another line":        {must(muchLonger.Encode(w.sealer)), muchLonger.Version, "does not follow"},
		"an older one and sealed":    {must(must(document.Decode(old, oldVersion, w.sealer)).Encode(w.sealer)), oldVersion, "has version 2"},
		"one that was tampered with": {[]byte(strings.Replace(string(forkedData), `"by":"b"`, `"by":"c"`, 1)), forked.Version, "changed since"},
	} {
		st.to(c.data, c.version)
		h.Follow(t.Context())
		if _, why := h.Fresh(); why == nil || !strings.Contains(why.Error(), c.want) {
			t.Errorf("%s, while it runs: %v", name, why)
		}
		rolled := !strings.Contains(name, "tampered")
		if h.Document().Version != last.Version || (h.Err() != nil) != rolled || rolled && !strings.Contains(h.Err().Error(), "state import") {
			t.Errorf("%s: it took it over, or would go on to serve: %v", name, h.Err())
		}
		_, err := Open(t.Context(), w.config("a"))
		if err == nil || rolled && (!errors.Is(err, ErrRolledBack) || !strings.Contains(err.Error(), "a.mark") || !strings.Contains(err.Error(), "state import")) {
			t.Errorf("%s, at a start: %v", name, err)
		}
		st.to(nil, 0)
		h.Follow(t.Context())
		if _, why := h.Fresh(); why != nil || h.Err() != nil {
			t.Errorf("after %s the right one: %v, %v", name, why, h.Err())
		}
		w.open(w.config("a"))
	}
	// What `state import` gives is above all that was seen: it is followed, and started with.
	again := must(must(document.Decode(old, oldVersion, w.sealer)).Reissue(last.Version))
	if err := w.store.Replace(t.Context(), last.Version, again.Version, must(again.Encode(w.sealer))); err != nil {
		t.Fatal(err)
	}
	h.Follow(t.Context())
	if _, why := h.Fresh(); why != nil || h.Document().Version != 1<<32 {
		t.Errorf("imported: %v, version %d", why, h.Document().Version)
	}
	w.open(w.config("a"))
	st.to(data, last.Version)
	if _, err := Open(t.Context(), w.config("a")); !errors.Is(err, ErrRolledBack) {
		t.Errorf("what was there before the import: %v", err)
	}
}

// TestD9WhoIsBehindDoesNotDrive: a replica that refuses what the store has could change nothing, and lets go of the lease.
func TestD9WhoIsBehindDoesNotDrive(t *testing.T) {
	w := newWorld(t)
	st := &rollback{Store: w.store}
	w.store = st
	a, b := w.open(w.config("a")), w.open(w.config("b"))
	if !a.TakeLease(t.Context()) {
		t.Fatal("nobody drives")
	}
	_, old := w.stored()
	if err := a.Drive(t.Context(), count); err != nil {
		t.Fatal(err)
	}
	st.to(old, a.Document().Version-1)
	a.Follow(t.Context())
	if a.TakeLease(t.Context()) || a.Drives() {
		t.Error("it drives on")
	}
	st.to(nil, 0)
	if !b.TakeLease(t.Context()) {
		t.Error("nobody drives")
	}
}

// TestD2FirstStart: a replica knows whether a process before it may have served somebody: the mark of `authority init` tells of no
// document, and who is not registered has worked by none.
func TestD2FirstStart(t *testing.T) {
	w := newWorld(t)
	init, new := w.config("a"), w.config("b")
	if err := WriteMark(init.Mark, td, w.sealer, Mark{}); err != nil {
		t.Fatal(err)
	}
	new.Issuance = document.LogState{ID: 20000000, Key: "log of b"}
	for _, c := range []Config{init, new} {
		if h := w.open(c); !h.First() {
			t.Errorf("the first start of %s counts as another one", c.Name)
		}
		if h := w.open(c); h.First() {
			t.Errorf("the second start of %s counts as the first", c.Name)
		}
	}
	if err := Change(t.Context(), w.store, w.sealer, func(next *document.Document) error {
		_, err := next.Forget("b", time.Now())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(new.Mark); err != nil {
		t.Fatal(err)
	}
	if h := w.open(new); h.First() {
		t.Error("one that was forgotten and comes back without its mark has served nobody")
	}
}

// TestD9MissingMark: it is made at the first start of a replica, and by an authority from before there were marks. After that it is
// missed; who lost it is registered anew.
func TestD9MissingMark(t *testing.T) {
	w := newWorld(t) // without a name for its only replica, as in format 1
	a := w.config("a")
	w.open(a)
	b := w.config("b")
	b.Issuance = document.LogState{ID: 20000000, Key: "log of b"}
	w.open(b)
	for _, c := range []Config{a, b} {
		m, err := ReadMark(c.Mark, td, w.sealer)
		if err != nil || m.Version < 1 || m.Hash == "" {
			t.Fatalf("%+v, %v", m, err)
		}
		if info, err := os.Stat(c.Mark); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", info.Mode(), err)
		}
		if err := os.Remove(c.Mark); err != nil {
			t.Fatal(err)
		}
		want := "chancery replica forget " + c.Name
		if _, err := Open(t.Context(), c); err == nil || !strings.Contains(err.Error(), c.Mark+" is missing") || !strings.Contains(err.Error(), want) {
			t.Errorf("a mark that is missing: %v", err)
		}
		if err := Change(t.Context(), w.store, w.sealer, func(next *document.Document) error {
			_, err := next.Forget(c.Name, time.Now())
			return err
		}); err != nil {
			t.Fatal(err)
		}
		h := w.open(c)
		if own := h.Document().Own(c.Name, c.Issuance.Key); own.DeclaredDead != nil || own.Key != c.Issuance.Key {
			t.Errorf("%+v", own)
		}
		if _, err := ReadMark(c.Mark, td, w.sealer); err != nil {
			t.Error(err)
		}
	}
}

// TestD9DamagedMark is not taken for one that never was.
func TestD9DamagedMark(t *testing.T) {
	w := newWorld(t)
	c := w.config("a")
	h := w.open(c)
	good := must(os.ReadFile(c.Mark))
	other := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	for name, damage := range map[string]struct {
		write func() error
		want  string
	}{
		"empty": {func() error { return os.WriteFile(c.Mark, nil, 0o600) }, "it is damaged"},
		"torn":  {func() error { return os.WriteFile(c.Mark, good[:len(good)/2], 0o600) }, "it is damaged"},
		"zeros": {func() error { return os.WriteFile(c.Mark, make([]byte, len(good)), 0o600) }, "it is damaged"},
		"a lower version": {func() error {
			return os.WriteFile(c.Mark, []byte(strings.Replace(string(good), `"version":2`, `"version":1`, 1)), 0o600)
		}, "was changed since"},
		"another sealing key": {func() error { return WriteMark(c.Mark, td, other, Mark{1, "ab"}) }, "not written with this sealing key"},
		"another trust domain": {func() error {
			return WriteMark(c.Mark, must(trust.ParseDomain("other.example")), w.sealer, Mark{1, "ab"})
		}, "it is of trust domain"},
		"one more":               {func() error { return os.WriteFile(c.Mark, append(good[:len(good):len(good)], good...), 0o600) }, "more than one JSON value"},
		"a field of tomorrow":    {func() error { return os.WriteFile(c.Mark, []byte(`{"format":1,"more":1}`), 0o600) }, "unknown field"},
		"a format of tomorrow":   {func() error { return os.WriteFile(c.Mark, []byte(`{"format":2}`), 0o600) }, "use a newer one"},
		"more than is ever kept": {func() error { return os.WriteFile(c.Mark, []byte(strings.Repeat(" ", maxMarkFile)+"{}"), 0o600) }, "has more than"},
		"a folder":               {func() error { return os.Mkdir(c.Mark, 0o700) }, "is a directory"},
	} {
		if err := os.Remove(c.Mark); err != nil {
			t.Fatal(err)
		}
		if err := damage.write(); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), c); err == nil || !strings.Contains(err.Error(), damage.want) || !strings.Contains(err.Error(), c.Mark) || !strings.Contains(err.Error(), "replica forget a") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := errors.Join(os.Remove(c.Mark), os.WriteFile(c.Mark, good, 0o600)); err != nil {
		t.Fatal(err)
	}
	if w.open(c).Document().Version != h.Document().Version {
		t.Error("with the good mark another document is in use")
	}
}

// TestD9MarkAfterAFault: whatever fails while a mark is written, in whatever way, what is left is the mark of a document that was
// seen: a start works, and goes back behind nothing that the mark had. A running server tries it again.
func TestD9MarkAfterAFault(t *testing.T) {
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		w := newWorld(t)
		dir := t.TempDir() // the marks', apart from the store's
		c := w.config("a")
		c.Mark = filepath.Join(dir, "state.mark")
		d := durabletest.Watch(t, dir)
		h := w.open(c)
		begun := d.Steps()
		d.FailAt(begun+n, mode)
		if err := h.Change(t.Context(), count); err != nil {
			t.Errorf("a change that was made, without a mark: %v", err)
		}
		steps := d.Steps() - begun
		left := c
		if d.Dead() {
			left.Mark = filepath.Join(d.Copy(), "state.mark")
		}
		m, err := ReadMark(left.Mark, td, w.sealer)
		if err != nil || m.Version != h.Document().Version && m.Version != h.Document().Version-1 {
			t.Fatalf("%s: mark %+v, %v", d.Failed(), m, err)
		}
		again := w.open(left)
		if m, err := ReadMark(left.Mark, td, w.sealer); err != nil || m.Version != again.Document().Version {
			t.Errorf("%s: after a start %+v, %v", d.Failed(), m, err)
		}
		if !d.Dead() {
			h.Follow(t.Context())
			if m, err := ReadMark(c.Mark, td, w.sealer); err != nil || m.Version != h.Document().Version {
				t.Errorf("%s: tried again %+v, %v", d.Failed(), m, err)
			}
		}
		return steps
	}
	total := one(t, -1, "")
	if total < 5 {
		t.Fatalf("only %d steps were seen", total)
	}
	for n := range total {
		for _, mode := range durabletest.Modes {
			one(t, n, mode)
		}
	}
}

// TestD9MarkAfterACrash of the machine: there is a mark from before the replica was registered, always.
func TestD9MarkAfterACrash(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	c := w.config("a")
	c.Mark = filepath.Join(dir, "state.mark")
	d := durabletest.Watch(t, dir)
	h := w.open(c)
	d.Mark("registered")
	for range 2 {
		if err := h.Change(t.Context(), count); err != nil {
			t.Fatal(err)
		}
		d.Mark(h.Document().Version)
	}
	n := 0
	d.Crashes(1, func(_ bool, l *durabletest.Left) {
		n++
		m, err := ReadMark(filepath.Join(l.Dir, "state.mark"), td, w.sealer)
		if errors.Is(err, fs.ErrNotExist) && len(l.Marks) == 0 {
			return
		}
		if err != nil {
			t.Errorf("%s: %v", l, err)
			return
		}
		if seen, ok := lastOf(l.Marks).(uint64); ok && m.Version < seen {
			t.Errorf("%s: the mark has version %d, and %d was seen", l, m.Version, seen)
		}
		left := c
		left.Mark = filepath.Join(l.Dir, "state.mark")
		w.open(left)
	})
	if n < 10 {
		t.Errorf("only %d crashes", n)
	}
}

func lastOf(marks []any) any {
	if len(marks) == 0 {
		return nil
	}
	return marks[len(marks)-1]
}

// TestD9AgentsKnowBetter: a server that an agent tells of a newer document looks for it at once. If it does not find it within half a
// minute, the store was rolled back, and it stops to serve.
func TestD9AgentsKnowBetter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b := w.open(w.config("a")), w.open(w.config("b"))
		go b.Run(t.Context())
		time.Sleep(time.Second)
		if err := a.Change(t.Context(), count); err != nil {
			t.Fatal(err)
		}
		version, _, mac := a.Mark()
		for name, bad := range map[string]struct {
			version uint64
			mac     []byte
		}{"another version": {version + 1, mac}, "no code": {version, nil}, "cut off": {version, mac[:31]}} {
			if err := b.CheckMark(bad.version, 0, bad.mac); err == nil {
				t.Errorf("%s was taken", name)
			}
		}
		if synctest.Wait(); b.Document().Version == version {
			t.Fatal("a bad mark has an effect")
		}
		if err := b.CheckMark(version, 0, mac); err != nil {
			t.Fatal(err)
		}
		if synctest.Wait(); b.Document().Version != version || b.Err() != nil {
			t.Errorf("version %d, %v", b.Document().Version, b.Err())
		}
		// Now the store loses what an agent saw.
		_, old := w.stored()
		ahead := must(must(document.Decode(old, version, w.sealer)).Next(old))
		agent := &Hold{config: a.config}
		agent.snapshot.Store(ahead)
		version, _, mac = agent.Mark()
		if err := b.CheckMark(version, 0, mac); err != nil {
			t.Fatal(err)
		}
		time.Sleep(behindFor - time.Second)
		if err := b.Err(); err != nil {
			t.Errorf("too soon: %v", err)
		}
		time.Sleep(2 * time.Second)
		if err := b.Err(); !errors.Is(err, ErrRolledBack) || !strings.Contains(err.Error(), "an agent has seen version") || !strings.Contains(err.Error(), "state import") {
			t.Errorf("got %v", err)
		}
		if err := a.Change(t.Context(), count); err != nil {
			t.Fatal(err)
		}
		time.Sleep(pollEvery * 11 / 10)
		if err := b.Err(); err != nil {
			t.Errorf("once the store has that version: %v", err)
		}
		if err := b.CheckMark(a.Mark()); err != nil || b.Err() != nil {
			t.Errorf("%v, %v", err, b.Err())
		}
	})
}

// TestD9NoCodePassesForAnother: what is authenticated under the sealing key says what it is, so that a code of a document, of a mark in
// a file and of a mark that agents carry is good for none of the others, nor for another trust domain.
func TestD9NoCodePassesForAnother(t *testing.T) {
	w := newWorld(t)
	a := w.open(w.config("a"))
	doc, data := w.stored()
	version, _, carried := a.Mark()
	var envelope struct {
		MAC []byte `json:"mac"`
	}
	if err := json.Unmarshal(data, &envelope); err != nil {
		t.Fatal(err)
	}
	path := w.config("a").Mark
	var file markFile
	if err := json.Unmarshal(must(os.ReadFile(path)), &file); err != nil || file.Version != version || version != doc.Version {
		t.Fatal(file.Version, version, err)
	}
	for name, mac := range map[string][]byte{"the document's": envelope.MAC, "the file's": file.MAC} {
		if a.CheckMark(version, 0, mac) == nil {
			t.Errorf("an agent's mark with %s code is taken", name)
		}
	}
	for name, mac := range map[string][]byte{"the document's": envelope.MAC, "an agent's": carried} {
		file.MAC = mac
		if err := os.WriteFile(path, must(json.Marshal(file)), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadMark(path, td, w.sealer); err == nil {
			t.Errorf("a mark in a file with %s code is taken", name)
		}
	}
	other := w.config("b")
	other.Domain = must(trust.ParseDomain("other.example"))
	if w.open(other).CheckMark(version, 0, carried) == nil {
		t.Error("an agent's mark of another trust domain is taken")
	}
}

// taint is a change that taints an authority, and makes one where there is none.
func taint(next *document.Document) error {
	now := time.Now().UTC()
	s := next.State(td)
	s.Authorities = append(s.Authorities, document.Authority{ID: fmt.Sprint(next.Version), Kind: document.KindRoot, State: document.StateRetiring, Tainted: &now})
	return nil
}

// TestD4TaintStopsWhoLacksTheDocument at once, without the time that other news has, until it has that very version.
func TestD4TaintStopsWhoLacksTheDocument(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		st := &rollback{Store: w.store}
		a := w.open(w.config("a"))
		w.store = st
		b := w.open(w.config("b"))
		version, tainted, before := a.Mark()
		early := version
		if tainted != 0 || !bytes.Equal(before, a.config.Sealer.MAC(fmt.Appendf(nil, "chancery document mark v1\n%s\n%d\n", td, version))) {
			t.Errorf("a mark without a taint is not what servers before this one read: %d", tainted)
		}
		_, old := w.stored()
		oldVersion := b.Document().Version
		st.to(old, oldVersion) // b is cut off
		if err := a.Change(t.Context(), taint); err != nil {
			t.Fatal(err)
		}
		if err := a.Change(t.Context(), count); err != nil {
			t.Fatal(err)
		}
		version, tainted, mac := a.Mark()
		if tainted != version-1 || tainted != a.Document().TaintedAt(td) {
			t.Fatalf("tainted %d, version %d", tainted, version)
		}
		for name, bad := range map[string]struct {
			version, tainted uint64
			mac              []byte
		}{
			"the taint is taken away": {version, 0, mac}, "another taint": {version, tainted + 1, mac}, "another version": {version + 1, tainted, mac},
			"one is added": {oldVersion + 1, oldVersion + 1, before}, "no code": {version, tainted, nil},
		} {
			if err := b.CheckMark(bad.version, bad.tainted, bad.mac); err == nil || b.MaySign() != nil {
				t.Errorf("%s: taken", name)
			}
		}
		if err := a.CheckMark(version, tainted, mac); err != nil || a.MaySign() != nil {
			t.Errorf("who has the document: %v, %v", err, a.MaySign())
		}
		if err := b.CheckMark(version, tainted, mac); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("version %d of the authority document says so, as an agent knows, and this server has version %d", tainted, oldVersion)
		for _, err := range []error{b.MaySign(), b.Err()} {
			if !errors.Is(err, ErrTainted) || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v", err)
			}
		}
		if b.TakeLease(t.Context()) {
			t.Error("it drives changes")
		}
		// Older news changes nothing; and a server that lost the store for long is no better off.
		if err := b.CheckMark(early, 0, before); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if b.Follow(t.Context()); b.MaySign() == nil {
			t.Error("it is over after some time")
		}
		st.to(nil, 0)
		if b.Follow(t.Context()); b.MaySign() != nil || b.Err() != nil || b.Document().Version != version {
			t.Errorf("once it has the document: %v, %v", b.MaySign(), b.Err())
		}
		if _, same, again := b.Mark(); same != tainted || !bytes.Equal(again, mac) {
			t.Error("two servers with one document do not say the same of it")
		}
		// Of two taints the later one counts, also where it comes with no later version.
		if err := a.Change(t.Context(), taint); err != nil {
			t.Fatal(err)
		}
		version, tainted, mac = a.Mark()
		far := version + 10
		if err := errors.Join(b.CheckMark(far, 0, b.config.Sealer.MAC(b.markText(far, 0))), b.CheckMark(version, tainted, mac)); err != nil {
			t.Fatal(err)
		}
		if !errors.Is(b.MaySign(), ErrTainted) {
			t.Error("a taint is passed over, since an older server told of a later version")
		}
		if b.Follow(t.Context()); b.MaySign() != nil {
			t.Errorf("got %v", b.MaySign())
		}
	})
}
