package state

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/trust"
)

func TestMain(m *testing.M) {
	code := m.Run()
	pgtest.Stop()
	os.Exit(code)
}

const config = `
trustDomain: cluster.local
state: {sqlite: store/state.db, sealingKey: key/state.key, dir: .}
auditLog: audit.jsonl
clusters:
- {name: k8s, issuer: "https://k8s.example", audiences: [chancery], jwksFile: jwks.json}
`

// load writes a config into a folder and reads it.
func load(t *testing.T, dir, text string) *server.Settings {
	t.Helper()
	for _, sub := range []string{"store", "key"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "server.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := server.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// made is a folder with an authority, and an export of it.
func made(t *testing.T) (s *server.Settings, exported string) {
	t.Helper()
	s = load(t, t.TempDir(), config)
	if err := server.Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	exported = filepath.Join(t.TempDir(), "export.json")
	if err := export(t.Context(), s, exported, t.Output(), t.Output()); err != nil {
		t.Fatal(err)
	}
	return s, exported
}

func stored(t *testing.T, s *server.Settings) *server.Stored {
	t.Helper()
	st, err := s.OpenState(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Store.Close() })
	return st
}

var sure = asked{as: "Alice", confirm: "cluster.local"}

// TestD9ImportNeedsANamedAdmin, and the trust domain's name.
func TestD9ImportNeedsANamedAdmin(t *testing.T) {
	s, exported := made(t)
	for _, c := range []struct {
		ask  asked
		want string
	}{
		{asked{confirm: "cluster.local"}, "who restores? Use --as NAME"},
		{asked{as: "Alice"}, "confirm it with --confirm cluster.local"},
		{asked{as: "Alice", confirm: "other.local"}, "confirm it with --confirm cluster.local"},
		{asked{as: "A\x1b[2J", confirm: "cluster.local"}, "can be printed"},
		{asked{as: strings.Repeat("a", 101), confirm: "cluster.local"}, "at most 100 bytes"},
	} {
		if err := restore(t.Context(), s, exported, c.ask, t.Output()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v; want %q", c.ask, err, c.want)
		}
	}
	if doc := stored(t, s).Document; doc.Version >= 1<<32 {
		t.Error("it was restored all the same")
	}
}

// TestD9ImportAfterAMigration: what is restored is the line's, by whichever of its trust domains the config names; the mark is its own.
func TestD9ImportAfterAMigration(t *testing.T) {
	s, before := made(t)
	to, err := trust.ParseDomain("new.example")
	if err != nil {
		t.Fatal(err)
	}
	st := stored(t, s)
	err = replica.Change(t.Context(), st.Store, st.Sealer, func(next *document.Document) error {
		state := next.State(s.Domain())
		state.Domain, state.Former = to.String(), []string{"cluster.local"}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	st.Store.Close()
	exported := filepath.Join(t.TempDir(), "export.json")
	if err := export(t.Context(), s, exported, t.Output(), t.Output()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"new.example", "cluster.local"} {
		as := load(t, filepath.Dir(filepath.Dir(s.State.SQLite)), strings.Replace(config, "cluster.local", name, 1))
		if err := restore(t.Context(), as, exported, asked{as: "Alice", confirm: name}, t.Output()); err != nil {
			t.Fatalf("by %s: %v", name, err)
		}
		if m, err := replica.ReadMark(as.Place().Mark(), s.Domain(), st.Sealer); err != nil || m.Version < 1<<32 {
			t.Errorf("by %s: the mark is %+v, %v", name, m, err)
		}
		now := stored(t, as)
		if now.Document.Present(to) != to || as.Domain() != s.Domain() {
			t.Errorf("by %s: %s is %s", name, as.Domain(), now.Document.Present(to))
		}
		now.Store.Close()
	}
	as := load(t, filepath.Dir(filepath.Dir(s.State.SQLite)), strings.Replace(config, "cluster.local", "new.example", 1))
	if err := restore(t.Context(), as, before, asked{as: "Alice", confirm: "new.example"}, t.Output()); err == nil || !strings.Contains(err.Error(), "it is of trust domain cluster.local") {
		t.Errorf("an export of before, under the new name: %v", err)
	}
}

// TestImportRefuses has all that may be wrong with export, key and store. None changes anything.
func TestImportRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(t *testing.T, s *server.Settings, exported string) *server.Settings
		want string
	}{
		{"no such file", func(t *testing.T, _ *server.Settings, exported string) *server.Settings {
			os.Remove(exported)
			return nil
		}, "reading the export: open"},
		{"a folder", func(t *testing.T, _ *server.Settings, exported string) *server.Settings {
			os.Remove(exported)
			os.Mkdir(exported, 0o700)
			return nil
		}, "is not a regular file"},
		{"a pipe that nobody writes to", func(t *testing.T, _ *server.Settings, exported string) *server.Settings {
			os.Remove(exported)
			if err := syscall.Mkfifo(exported, 0o600); err != nil {
				t.Fatal(err)
			}
			return nil
		}, "is not a regular file"},
		{"a changed export", func(t *testing.T, _ *server.Settings, exported string) *server.Settings {
			data, err := os.ReadFile(exported)
			if err != nil {
				t.Fatal(err)
			}
			os.WriteFile(exported, bytes.Replace(data, []byte(`"replica": "server"`), []byte(`"replica": "Server"`), 1), 0o600)
			return nil
		}, "it was changed since it was made"},
		{"no sealing key", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			os.Remove(s.State.SealingKey)
			return nil
		}, "with the sealing key that it was made with only"},
		{"another sealing key", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			os.Remove(s.State.SealingKey)
			keys.CreateSealer(s.State.SealingKey)
			return nil
		}, "it was made with the sealing key of ID"},
		{"another trust domain", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			return load(t, filepath.Dir(s.AuditLog), strings.Replace(config, "cluster.local", "other.local", 1))
		}, "it is of trust domain cluster.local, and the config is of other.local"},
		{"a server that runs", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			st, err := store.OpenSQLite(t.Context(), s.State.SQLite)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { st.Close() })
			return nil
		}, "which is a server or another command; stop it first"},
		{"a store of somebody else", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			os.RemoveAll(filepath.Dir(s.State.SQLite))
			os.Mkdir(filepath.Dir(s.State.SQLite), 0o700)
			st, err := store.CreateSQLite(t.Context(), s.State.SQLite)
			if err != nil {
				t.Fatal(err)
			}
			defer st.Close()
			if err := st.Create(t.Context(), 9, []byte("mine")); err != nil {
				t.Fatal(err)
			}
			return nil
		}, "holds something that is not of this authority"},
		{"a damaged mark", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			os.WriteFile(s.Place().Mark(), []byte("{}"), 0o600)
			return nil
		}, "give the highest version that is known as --above"},
		{"an audit log that cannot be written", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			os.Remove(s.AuditLog)
			os.Mkdir(s.AuditLog, 0o700)
			return nil
		}, "audit"},
		{"a version at the end", func(t *testing.T, s *server.Settings, _ string) *server.Settings {
			sealer, err := keys.LoadSealer(s.State.SealingKey)
			if err != nil {
				t.Fatal(err)
			}
			if err := replica.WriteMark(s.Place().Mark(), s.Domain(), sealer, replica.Mark{Version: 1<<62 - 1}); err != nil {
				t.Fatal(err)
			}
			return nil
		}, "no epoch after it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, exported := made(t)
			if other := c.harm(t, s, exported); other != nil {
				s = other
			}
			ask := sure
			ask.confirm = s.TrustDomain
			if err := restore(t.Context(), s, exported, ask, t.Output()); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v; want %q", err, c.want)
			}
			if data, version, err := s.Place().Read(t.Context()); err != nil || version >= 1<<32 {
				t.Errorf("the store has version %d now, %d bytes, %v", version, len(data), err)
			}
		})
	}
}

// TestD9ImportOverAnotherDocument: over a newer or an older one it goes above all that was seen, and says what is lost.
func TestD9ImportOverAnotherDocument(t *testing.T) {
	s, exported := made(t)
	st, err := s.OpenState(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(-time.Minute)
	var root string
	if err := replica.Change(t.Context(), st.Store, st.Sealer, func(next *document.Document) error {
		active, err := next.Active(s.Domain(), authority.KindRoot)
		if err != nil {
			return err
		}
		root, active.Tainted = active.ID, &at
		_, err = next.Revoke(s.Domain(), authority.Revocation{Predicate: authority.Predicate{Serial: "abcd"}, Time: at, Actor: "unix:bob"})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	st.Store.Close()

	var out bytes.Buffer
	look := asked{dryRun: true}
	if err := restore(t.Context(), s, exported, look, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"which is replaced by version 4294967296", "lost: the revocation of serial abcd by unix:bob at ", "kept: that root " + root + " is tainted since ", "Nothing was changed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not say %q:\n%s", want, out.String())
		}
	}
	now := stored(t, s)
	if now.Document.Version != 2 {
		t.Errorf("a dry run left version %d", now.Document.Version)
	}
	now.Store.Close()

	if err := restore(t.Context(), s, exported, sure, t.Output()); err != nil {
		t.Fatal(err)
	}
	again := sure
	again.above = 7<<32 | 5 // an agent has seen that
	if err := restore(t.Context(), s, exported, again, t.Output()); err != nil {
		t.Fatal(err)
	}
	doc := stored(t, s).Document
	if active, err := doc.Active(s.Domain(), authority.KindRoot); err != nil || active.Tainted == nil || !active.Tainted.Equal(at) || doc.TaintedAt(s.Domain()) != doc.Version {
		t.Errorf("an import makes a tainted root one like any other (decision D6): %+v, %v", active, err)
	}
	if doc.Version != 8<<32 || len(doc.Revocations(s.Domain())) != 0 || doc.Imported == nil || !strings.HasPrefix(doc.Imported.Actor, "Alice (unix:") || doc.Imported.Version != 1 {
		t.Errorf("%d, %+v", doc.Version, doc.Imported)
	}
	log, err := os.ReadFile(s.AuditLog)
	if err != nil || strings.Count(string(log), `"actor":"Alice (unix:`) != 2 || !strings.Contains(string(log), "state import of version 1, exported by replica server at ") {
		t.Errorf("%v:\n%s", err, log)
	}
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	if err != nil {
		t.Fatal(err)
	}
	if m, err := replica.ReadMark(s.Place().Mark(), s.Domain(), sealer); err != nil || m.Version != doc.Version {
		t.Errorf("the mark says %+v, %v", m, err)
	}
}

// TestExport: an export is a new file of the owner's, and its making is noted.
func TestExport(t *testing.T) {
	s, exported := made(t)
	if info, err := os.Stat(exported); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if err := export(t.Context(), s, exported, t.Output(), t.Output()); err == nil || !strings.Contains(err.Error(), "exists already; name another file") {
		t.Errorf("over another: %v", err)
	}
	var out, say bytes.Buffer
	if err := export(t.Context(), s, "-", &out, &say); err != nil || !strings.HasPrefix(out.String(), "{\n  \"export\": {") || !strings.Contains(say.String(), "Not included") {
		t.Errorf("%v, %.60q, %q", err, out.String(), say.String())
	}
	say.Reset()
	if err := export(t.Context(), s, filepath.Join(filepath.Dir(s.State.SealingKey), "e.json"), t.Output(), &say); err != nil || !strings.Contains(say.String(), "both together are the CA") {
		t.Errorf("beside the sealing key: %v, %s", err, say.String())
	}
	if log, err := os.ReadFile(s.AuditLog); err != nil || strings.Count(string(log), `"detail":"state export"`) != 3 {
		t.Errorf("%v:\n%s", err, log)
	}
	os.Remove(s.State.SQLite)
	if err := export(t.Context(), s, filepath.Join(t.TempDir(), "e"), t.Output(), t.Output()); err == nil || !strings.Contains(err.Error(), "authority init") {
		t.Errorf("without a state: %v", err)
	}
}

// TestImportFaults: whichever step of an export or an import fails or is the last, the store has the document of before or what was
// restored, and a second try works.
func TestImportFaults(t *testing.T) {
	s, exported := made(t)
	base := filepath.Dir(s.AuditLog)
	one := func(t *testing.T, n int, mode durabletest.Mode) int {
		t.Helper()
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(base)); err != nil {
			t.Fatal(err)
		}
		for _, secret := range []string{"key/state.key", "audit.jsonl", "state.mark", "store/state.db"} {
			os.Chmod(filepath.Join(dir, secret), 0o600)
		}
		d := durabletest.Watch(t, dir)
		d.FailAt(n, mode)
		s := load(t, dir, config)
		err := restore(t.Context(), s, exported, sure, t.Output())
		var exportErr error
		if err == nil {
			exportErr = export(t.Context(), s, filepath.Join(dir, "again.json"), t.Output(), t.Output())
		}
		steps, name := d.Steps(), fmt.Sprintf("%s (%v, %v)", d.Failed(), err, exportErr)
		if d.Dead() {
			dir = d.Copy()
			s = load(t, dir, config)
		}
		d.FailAt(-1, "")
		if _, version, err := s.Place().Read(t.Context()); err != nil || version != 1 && version != 1<<32 {
			t.Errorf("%s: version %d, %v", name, version, err)
		}
		if err := restore(t.Context(), s, exported, sure, t.Output()); err != nil {
			t.Errorf("%s: a second time: %v", name, err)
		}
		if data, err := os.ReadFile(filepath.Join(dir, "again.json")); err == nil && exportErr == nil && !d.Dead() && !bytes.HasSuffix(data, []byte("}\n")) {
			t.Errorf("%s: half an export", name)
		}
		return steps
	}
	total := one(t, -1, "")
	if total < 20 {
		t.Errorf("only %d steps were seen", total)
	}
	stride := 1
	if testing.Short() {
		stride = 5
	}
	for n := 0; n < total; n += stride {
		others := []durabletest.Mode{durabletest.FailDone, durabletest.Fail, durabletest.Full, durabletest.Torn}
		for _, mode := range []durabletest.Mode{durabletest.Crash, others[n%len(others)]} {
			one(t, n, mode)
		}
	}
}

// TestImportIntoASharedStoreThatIsInUse: notes, lease and a server on this machine show that servers work on it.
func TestImportIntoASharedStoreThatIsInUse(t *testing.T) {
	c := pgtest.Shared(t)
	dir := t.TempDir()
	text := strings.Replace(config, "sqlite: store/state.db", fmt.Sprintf("postgres: {url: %q}, replica: ca-1", c.URL(c.Database(t), pgtest.Admin)), 1)
	s := load(t, dir, text)
	if err := server.Init(t.Context(), s, t.Output()); err != nil {
		t.Fatal(err)
	}
	exported := filepath.Join(dir, "export.json")
	if err := export(t.Context(), s, exported, t.Output(), t.Output()); err != nil {
		t.Fatal(err)
	}
	st := stored(t, s)
	try := func(ask asked) error { return restore(t.Context(), s, exported, ask, t.Output()) }

	if held, _, err := st.Store.Hold(t.Context(), "ca-2", time.Minute); err != nil || !held {
		t.Fatal(err)
	}
	if err := try(sure); err == nil || !strings.Contains(err.Error(), "replica ca-2 holds the lease") {
		t.Errorf("while another drives: %v", err)
	}
	if err := st.Store.GiveUp(t.Context(), "ca-2"); err != nil {
		t.Fatal(err)
	}

	if held, _, err := st.Store.Hold(t.Context(), importName+"0123456789ab", time.Minute); err != nil || !held {
		t.Fatal(err)
	}
	if err := try(sure); err == nil || !strings.Contains(err.Error(), "another `chancery state import` works on") || strings.Contains(err.Error(), "stop all servers") {
		t.Errorf("while another import is under way: %v", err)
	}
	if err := st.Store.GiveUp(t.Context(), importName+"0123456789ab"); err != nil {
		t.Fatal(err)
	}

	b := board.Open(board.Config{Store: st.Store, Sealer: st.Sealer, Domain: s.Domain(), Replica: "ca-1", Format: document.Format, Logger: slog.New(slog.DiscardHandler)})
	b.Own(func(n *board.Note) { n.LogID = st.Document.Logs[0].ID })
	if err := b.Write(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := try(sure); err == nil || !strings.Contains(err.Error(), "replica ca-1 wrote into the store") || !strings.Contains(err.Error(), "--stopped ca-1") {
		t.Errorf("while another writes notes: %v", err)
	}
	stopped := sure
	stopped.stopped = []string{"ca-1"}

	l, err := adminsocket.Listen(s.AdminSocket())
	if err != nil {
		t.Fatal(err)
	}
	if err := try(stopped); err == nil || !strings.Contains(err.Error(), "a server answers on "+s.AdminSocket()) {
		t.Errorf("while a server runs here: %v", err)
	}
	l.Close()
	if err := try(stopped); err != nil {
		t.Fatal(err)
	}
	if data, version, err := st.Store.Load(t.Context()); err != nil || version != 1<<32 {
		t.Errorf("%d bytes, version %d, %v", len(data), version, err)
	}
	if held, by, err := st.Store.Hold(t.Context(), "ca-1", time.Second); err != nil || !held {
		t.Errorf("the lease was not given up: %s has it, %v", by, err)
	}
}

// TestTwoImportsAtOnce: one of them restores, and the other says why it did not, over a store with a document and without; what the
// store has then is that of the one, and the server starts with it.
func TestTwoImportsAtOnce(t *testing.T) {
	c := pgtest.Shared(t)
	for _, empty := range []bool{false, true} {
		t.Run(fmt.Sprintf("empty=%t", empty), func(t *testing.T) {
			dir := t.TempDir()
			db := c.Database(t)
			text := strings.Replace(config, "sqlite: store/state.db", fmt.Sprintf("postgres: {url: %q}, replica: ca-1", c.URL(db, pgtest.Admin)), 1)
			s := load(t, dir, text)
			if err := server.Init(t.Context(), s, t.Output()); err != nil {
				t.Fatal(err)
			}
			exported := filepath.Join(dir, "export.json")
			if err := export(t.Context(), s, exported, t.Output(), t.Output()); err != nil {
				t.Fatal(err)
			}
			if empty {
				c.Exec(t, db, "DELETE FROM chancery.document")
			}
			var wg sync.WaitGroup
			var fails [2]error
			for i := range fails {
				ask := sure
				ask.as = fmt.Sprint("Admin ", i)
				wg.Go(func() { fails[i] = restore(t.Context(), s, exported, ask, t.Output()) })
			}
			wg.Wait()
			won := 0
			for _, err := range fails {
				switch {
				case err == nil:
					won++
				case !strings.Contains(err.Error(), "another `chancery state import`") && !strings.Contains(err.Error(), "changed by somebody else") && !strings.Contains(err.Error(), "in use by another process"):
					t.Error(err)
				}
			}
			if won == 0 {
				t.Errorf("none restored: %v", fails)
			}
			st := stored(t, s)
			if st.Document.Version>>32 != uint64(won) || st.Document.Imported == nil {
				t.Errorf("after %d imports the store has version %d", won, st.Document.Version)
			}
		})
	}
}
