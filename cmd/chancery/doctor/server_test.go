package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/status"
)

const jwks = `{"keys": [{"kty": "EC", "crv": "P-256", "use": "sig", "kid": "a", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}`

const config = `
trustDomain: cluster.local
listen: 127.0.0.1:0
metrics: 127.0.0.1:0
state: {sqlite: state/state.db, sealingKey: secrets/state.key}
auditLog: logs/audit.jsonl
issuanceLog: logs/issued
clusters: [{name: Kubernetes, issuer: https://kubernetes.default.svc, audiences: [istio-ca], jwksFile: jwks.json}]
`

// place is a server's folder.
type place struct {
	*testing.T
	dir string
}

func (p place) path(name string) string { return filepath.Join(p.dir, name) }

func (p place) write(name, text string, mode os.FileMode) {
	p.Helper()
	p.must(os.MkdirAll(filepath.Dir(p.path(name)), 0o700))
	p.must(os.WriteFile(p.path(name), []byte(text), mode))
	p.must(os.Chmod(p.path(name), mode))
}

func (p place) must(err error) {
	p.Helper()
	if err != nil {
		p.Fatal(err)
	}
}

// change changes the config.
func (p place) change(old, by string) {
	p.Helper()
	data, err := os.ReadFile(p.path("server.yaml"))
	p.must(err)
	if !strings.Contains(string(data), old) {
		p.Fatalf("the config has no %q", old)
	}
	p.write("server.yaml", strings.Replace(string(data), old, by, 1), 0o600)
}

// newPlace makes a server as it should be: `authority init` was run, and it has never been started.
func newPlace(t *testing.T, text string) place {
	t.Helper()
	p := place{t, t.TempDir()}
	p.must(os.Chmod(p.dir, 0o755)) // whatever the umask
	p.write("server.yaml", text, 0o600)
	p.write("jwks.json", jwks, 0o644)
	p.write("passwords/passphrase", "correct horse battery staple\n", 0o600)
	for _, dir := range []string{"state", "secrets", "logs"} {
		p.must(os.Mkdir(p.path(dir), 0o700))
	}
	p.init("server.yaml")
	return p
}

func (p place) init(name string) {
	p.Helper()
	s, err := server.Load(p.path(name))
	p.must(err)
	p.must(server.Init(p.Context(), s, io.Discard))
}

// look returns what is found, as "severity id", without what depends on the machine that the test runs on.
func (p place) look(offline bool, now time.Time) (*status.Report, []string) {
	p.Helper()
	s, err := server.Load(p.path("server.yaml"))
	p.must(err)
	r := examineServerAt(p.Context(), s, p.path("server.yaml"), offline, now)
	got := []string{}
	for _, f := range r.Findings {
		if f.ID != "place.volatile" && f.ID != "disk.low" {
			got = append(got, string(f.Severity)+" "+f.ID)
		}
	}
	return r, got
}

// TestServerThatIsDown breaks one thing of a server that does not run.
func TestServerThatIsDown(t *testing.T) {
	const day = 24 * time.Hour
	const inFiles = "keys: {dir: keys, passphraseFile: passwords/passphrase}\n"
	unknown := []string{"warning unchecked", "warning unchecked", "warning unchecked", "warning unchecked"} // chain, mark, roots.pem, issuance log
	for _, c := range []struct {
		name   string
		more   string // of the config, at init
		change func(place)
		after  time.Duration // on the clock
		want   []string
		says   string
	}{
		{name: "as it should be"},
		{name: "keys in files", more: inFiles},
		{name: "no sealing key", change: func(p place) { p.must(os.Remove(p.path("secrets/state.key"))) },
			want: append([]string{"critical sealing-key.unusable"}, unknown...)},
		{name: "sealing key that others can read", change: func(p place) { p.must(os.Chmod(p.path("secrets/state.key"), 0o644)) },
			want: append([]string{"critical sealing-key.unusable", "critical file.exposed"}, unknown...), says: "has mode 0644; it should be 0600"},
		{name: "another sealing key", change: func(p place) {
			p.write("secrets/state.key", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n", 0o600)
		}, want: append([]string{"critical state.refused"}, unknown...)},
		{name: "no state", change: func(p place) { p.must(os.Remove(p.path("state/state.db"))) }, want: append([]string{"critical state.missing"}, unknown...)},
		{name: "no database", change: func(p place) { p.write("state/state.db", strings.Repeat("x", 5000), 0o600) },
			want: append([]string{"critical state.refused"}, unknown...)},
		{name: "a parent's secret that others can read", change: func(p place) {
			p.change("clusters:", "parent: {cfssl: {address: 'https://a', authKeyFile: auth.key}}\nclusters:")
			p.write("auth.key", "00", 0o640)
		}, want: []string{"critical file.exposed"}, says: "cfssl auth key"},
		{name: "state that others can read", change: func(p place) { p.must(os.Chmod(p.path("state/state.db"), 0o640)) }, want: []string{"warning file.exposed"}},
		{name: "folder that others can write", change: func(p place) { p.must(os.Chmod(p.path("state"), 0o777)) }, want: []string{"warning folder.writable"}},
		{name: "config's folder that others can write", change: func(p place) { p.must(os.Chmod(p.dir, 0o777)) }, want: []string{"warning folder.writable"}},
		{name: "no folder for the audit log", change: func(p place) { p.change("logs/audit.jsonl", "gone/audit.jsonl") },
			want: []string{"critical audit-log.unusable"}, says: "gone: no such file"},
		{name: "audit log is a folder", change: func(p place) { p.change("logs/audit.jsonl", "logs") },
			want: []string{"critical audit-log.unusable"}, says: "it is a folder"},
		{name: "audit log for a log shipper", change: func(p place) { p.must(os.Chmod(p.path("logs/audit.jsonl"), 0o640)) }},
		{name: "audit log for everybody", change: func(p place) { p.must(os.Chmod(p.path("logs/audit.jsonl"), 0o666)) },
			want: []string{"warning file.exposed", "warning file.writable"}},
		{name: "no issuance log", change: func(p place) { p.must(os.RemoveAll(p.path("logs/issued"))) }, want: []string{"critical issuance-log.unusable"}},
		{name: "a server that is forgotten, and new", change: func(p place) {
			s, err := server.Load(p.path("server.yaml"))
			p.must(err)
			st, err := s.OpenState(p.Context())
			p.must(err)
			defer st.Store.Close()
			log, err := audit.Open(p.path("logs/audit.jsonl"))
			p.must(err)
			defer log.Close()
			p.must(replica.Forget(p.Context(), st.Store, st.Sealer, log, "test", "server"))
			p.must(os.RemoveAll(p.path("logs/issued"))) // it is made at the first start
		}},
		{name: "issuance log left out", change: func(p place) { p.change("issuanceLog: logs/issued\n", "") }, want: []string{"critical issuance-log.other"}},
		{name: "another issuance log", change: func(p place) {
			p.must(os.RemoveAll(p.path("logs/issued")))
			_, err := issuelog.Create(p.path("logs/issued"), "cluster.local/chancery/log/16909060")
			p.must(err)
		}, want: []string{"critical issuance-log.other"}},
		{name: "checkpoint that was changed", change: func(p place) {
			data, err := os.ReadFile(p.path("logs/issued/checkpoint"))
			p.must(err)
			p.write("logs/issued/checkpoint", strings.Replace(string(data), "\n", "\n1", 1), 0o600)
		}, want: []string{"critical issuance-log.unusable"}},
		{name: "key of the issuance log that others can read", change: func(p place) { p.must(os.Chmod(p.path("logs/issued/log.key"), 0o604)) },
			want: []string{"critical file.exposed"}},
		{name: "no roots.pem", change: func(p place) { p.must(os.Remove(p.path("state/roots.pem"))) }, want: []string{"warning roots-file.missing"}},
		{name: "another roots.pem", change: func(p place) {
			other := newPlace(p.T, config)
			data, err := os.ReadFile(other.path("state/roots.pem"))
			p.must(err)
			p.write("state/roots.pem", string(data), 0o644)
		}, want: []string{"warning roots-file.differs", "warning roots-file.differs"}, says: "lacks root"},
		{name: "roots.pem of something else", change: func(p place) { p.write("state/roots.pem", "hello", 0o644) }, want: []string{"warning roots-file.differs"}},
		{name: "passphrase beside the keys", more: inFiles, change: func(p place) {
			p.must(os.Rename(p.path("passwords/passphrase"), p.path("keys/passphrase")))
			p.change("passwords/passphrase", "keys/passphrase")
		}, want: []string{"warning passphrase.beside-keys"}},
		{name: "another passphrase", more: inFiles, change: func(p place) { p.write("passwords/passphrase", "wrong horse battery staple", 0o600) },
			want: []string{"critical key.failed", "warning key.failed"}, says: "does not open with the passphrase"},
		{name: "passphrase that others can read", more: inFiles, change: func(p place) { p.must(os.Chmod(p.path("passwords/passphrase"), 0o640)) },
			want: []string{"critical key.failed", "critical file.exposed", "warning key.failed"}},
		{name: "keys that are gone", more: inFiles, change: func(p place) { p.must(os.RemoveAll(p.path("keys"))) },
			want: []string{"critical key.failed", "warning key.failed"}},
		{name: "key store left out", more: inFiles, change: func(p place) { p.change(inFiles, "") },
			want: []string{"critical key.failed", "warning key.failed"}, says: "set `keys` in the config"},
		{name: "no keys of the cluster", change: func(p place) { p.must(os.Remove(p.path("jwks.json"))) }, want: []string{"critical file.unreadable"}},
		{name: "keys of the cluster that others can write", change: func(p place) { p.must(os.Chmod(p.path("jwks.json"), 0o666)) }, want: []string{"warning file.writable"}},
		{name: "config that others can write", change: func(p place) { p.must(os.Chmod(p.path("server.yaml"), 0o622)) }, want: []string{"warning file.writable"}},
		{name: "clock that was set back", change: func(p place) {
			later := time.Now().Add(time.Hour)
			p.must(os.Chtimes(p.path("logs/audit.jsonl"), later, later))
		}, want: []string{"warning clock.behind"}},
		{name: "before it was made", after: -time.Hour, want: []string{"critical certificate.not-begun", "critical certificate.not-begun", "warning clock.behind"}},
		{name: "issuer past half: a server that starts renews it", after: 4 * day},
		{name: "issuer with less than a third", after: 5 * day, want: []string{"warning certificate.ending"}},
		{name: "issuer ended: a server that starts renews it", after: 8 * day, want: []string{"warning certificate.ended"}},
		{name: "root ended", after: 3651 * day, want: []string{"critical certificate.ended", "warning certificate.ended"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if testing.Short() && c.more != "" && c.name != "another passphrase" {
				t.Skip("each passphrase costs a second or two under the race detector")
			}
			p := newPlace(t, config+c.more)
			if c.change != nil {
				c.change(p)
			}
			r, got := p.look(true, time.Now().Add(c.after))
			if !slices.Equal(got, c.want) {
				t.Errorf("found %v, want %v", got, c.want)
			}
			text := new(bytes.Buffer)
			r.PrintFindings(text)
			if !strings.Contains(text.String(), c.says) {
				t.Errorf("it does not say %q:\n%s", c.says, text)
			}
			if strings.Contains(text.String(), "horse") {
				t.Errorf("it tells a passphrase:\n%s", text)
			}
		})
	}
}

// TestD9SealingKeyBesideTheState: wherever in the state's folder the sealing key lies, and by whatever name, doctor warns.
func TestD9SealingKeyBesideTheState(t *testing.T) {
	for name, change := range map[string]func(place){
		"by default": func(p place) {
			p.must(os.Rename(p.path("secrets/state.key"), p.path("state/state.key")))
			p.change(", sealingKey: secrets/state.key", "")
		},
		"below it": func(p place) {
			p.must(os.Rename(p.path("secrets"), p.path("state/secrets")))
			p.change("secrets/state.key", "state/secrets/state.key")
		},
		"by a link to the key": func(p place) {
			p.must(os.Rename(p.path("secrets/state.key"), p.path("state/state.key")))
			p.must(os.Symlink(p.path("state/state.key"), p.path("secrets/state.key")))
		},
		"by a link to the folder": func(p place) {
			p.must(os.Rename(p.path("secrets/state.key"), p.path("state/state.key")))
			p.must(os.Remove(p.path("secrets")))
			p.must(os.Symlink("state", p.path("secrets")))
		},
	} {
		p := newPlace(t, config)
		change(p)
		if _, got := p.look(true, time.Now()); !slices.Equal(got, []string{"warning sealing-key.beside-state"}) {
			t.Errorf("%s: found %v", name, got)
		}
	}
	p := newPlace(t, config)
	p.must(os.Rename(p.path("secrets"), p.path("state-secrets"))) // whose name only begins like the state's folder
	p.change("secrets/state.key", "state-secrets/state.key")
	if _, got := p.look(true, time.Now()); len(got) != 0 {
		t.Errorf("in a folder of its own: found %v", got)
	}
}

// TestTokenIsNotOpened: while the server is down nobody tries a PIN; that the keys were not checked is said.
func TestTokenIsNotOpened(t *testing.T) {
	p := newPlace(t, config)
	s, err := server.Load(p.path("server.yaml"))
	p.must(err)
	sealer, err := keys.LoadSealer(s.State.SealingKey)
	p.must(err)
	st, err := store.OpenSQLite(t.Context(), s.State.SQLite)
	p.must(err)
	data, version, err := st.Load(t.Context())
	p.must(err)
	doc, err := authority.DecodeDocument(data, version, sealer)
	p.must(err)
	next, err := doc.Next(data)
	p.must(err)
	for i := range next.Domains["cluster.local"].Authorities {
		a := &next.Domains["cluster.local"].Authorities[i]
		a.Key, a.KeyRef = nil, "pkcs11:id=00112233445566778899aabbccddeeff;object=chancery-00112233"
	}
	data, err = next.Encode(sealer)
	p.must(err)
	p.must(st.Replace(t.Context(), version, version+1, data))
	st.Close()
	p.write("pin", "4711", 0o644)
	p.write("library.so", "", 0o777)
	p.write("server.yaml", config+"keys: {pkcs11: \"pkcs11:module-path="+p.path("library.so")+";token=a?pin-source="+p.path("pin")+"\"}\n", 0o600)
	r, got := p.look(true, time.Now())
	if !slices.Equal(got, []string{"critical file.exposed", "warning unchecked", "warning unchecked", "warning file.writable"}) {
		t.Errorf("found %v", got)
	}
	for _, k := range r.CA.Keys {
		if k.Store != "token" || !strings.Contains(k.Unknown, "each wrong PIN counts") || k.Checked != nil {
			t.Errorf("%+v", k)
		}
	}
}

// TestTrustOfAServerThatIsDown: authorities whose key others may know, and the bundle key.
func TestTrustOfAServerThatIsDown(t *testing.T) {
	p := newPlace(t, config)
	s, err := server.Load(p.path("server.yaml"))
	p.must(err)
	change := func(f func(state *document.DomainState)) {
		st, err := s.OpenState(t.Context())
		p.must(err)
		defer st.Store.Close()
		p.must(replica.Change(t.Context(), st.Store, st.Sealer, func(next *document.Document) error {
			f(next.State(s.Domain()))
			return nil
		}))
	}
	r, got := p.look(true, time.Now())
	if len(got) > 0 || len(r.CA.Document.BundleKey) != 32 || r.CA.Document.BundleKeyError != "" {
		t.Fatalf("found %v; %+v", got, r.CA.Document)
	}
	at := time.Now().Add(-time.Hour)
	change(func(state *document.DomainState) {
		for i := range state.Authorities {
			state.Authorities[i].Tainted = &at
		}
		state.BundleKey.Key[20] ^= 1
	})
	r, got = p.look(true, time.Now())
	if !slices.Equal(got, []string{"critical bundle-key.unusable", "critical authority.tainted", "critical authority.tainted"}) {
		t.Errorf("found %v", got)
	}
	for _, f := range r.Findings {
		if f.ID == "authority.tainted" && (!strings.Contains(f.Problem, at.UTC().Format(time.RFC3339)) || !strings.Contains(f.Remedy, "rotate start --root --reason compromised")) {
			t.Errorf("%+v", f)
		}
	}
	change(func(state *document.DomainState) { state.BundleKey = nil }) // as a version before this one left it: a start makes one
	if _, got = p.look(true, time.Now()); slices.Contains(got, "critical bundle-key.unusable") {
		t.Errorf("found %v", got)
	}
}

// TestPluggedInIssuer: certificates and key in files, as the CA of another folder.
func TestPluggedInIssuer(t *testing.T) {
	plug := func(t *testing.T, change func(place)) []string {
		t.Helper()
		p := place{t, t.TempDir()}
		p.must(os.Chmod(p.dir, 0o755))
		for _, dir := range []string{"state", "secrets", "logs", "passwords"} {
			p.must(os.Mkdir(p.path(dir), 0o700))
		}
		p.write("jwks.json", jwks, 0o644)
		p.write("server.yaml", config+"issuer: {cacerts: testca}\n", 0o600)
		p.must(os.Rename(pluggedFiles(t), p.path("testca")))
		p.init("server.yaml")
		change(p)
		_, got := p.look(true, time.Now())
		return got
	}
	for _, c := range []struct {
		name   string
		change func(place)
		want   []string
	}{
		{"as it should be", func(place) {}, []string{}},
		{"key that others can read", func(p place) { p.must(os.Chmod(p.path("testca/ca-key.pem"), 0o644)) }, []string{"warning file.exposed"}},
		{"no key", func(p place) { p.must(os.Remove(p.path("testca/ca-key.pem"))) },
			[]string{"critical issuer-files.unusable", "critical issuer.missing", "critical file.unreadable"}},
		{"another CA's files", func(p place) {
			p.must(os.RemoveAll(p.path("testca")))
			p.must(os.Rename(pluggedFiles(p.T), p.path("testca")))
		}, []string{"critical issuer-files.unusable", "critical chain.broken"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := plug(t, c.change); !slices.Equal(got, c.want) {
				t.Errorf("found %v, want %v", got, c.want)
			}
		})
	}
}

// TestFilesOfRoot: what belongs to root beside a state of somebody else was made by a command that root ran.
func TestFilesOfRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can give files away")
	}
	const somebody = 54321
	p := newPlace(t, config)
	for _, name := range []string{"state", "state/state.db", "state/state.db.lock", "state/state.mark", "secrets", "secrets/state.key", "logs/issued", "logs/issued/log.key"} {
		p.must(os.Chown(p.path(name), somebody, somebody))
	}
	for _, name := range []string{"checkpoint", "journal.0", "journal.1"} {
		p.must(os.Chown(p.path("logs/issued/"+name), somebody, somebody))
	}
	r, got := p.look(true, time.Now())
	if !slices.Equal(got, []string{"warning file.owner"}) || !strings.Contains(r.Findings[0].Subject, "audit.jsonl") ||
		!strings.Contains(r.Findings[0].Problem, "belongs to root, and the state to uid-54321") {
		t.Errorf("found %v: %+v", got, r.Findings)
	}
	p.must(os.Chown(p.path("state"), somebody+1, somebody))
	if _, got := p.look(true, time.Now()); !slices.Equal(got, []string{"warning file.owner", "warning folder.writable"}) {
		t.Errorf("with a folder of a third one: %v", got)
	}
}

// TestLookingChangesNothing: neither names, contents, modes nor times of what belongs to the server.
func TestLookingChangesNothing(t *testing.T) {
	p := newPlace(t, config+"keys: {dir: keys, passphraseFile: passwords/passphrase}\n")
	before := snapshot(t, p.dir)
	p.look(false, time.Now())
	if after := snapshot(t, p.dir); !slices.Equal(before, after) {
		t.Errorf("before:\n%s\nafter:\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
}

func snapshot(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		all = append(all, path+" "+info.Mode().String()+" "+info.ModTime().String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestServerThatIsDownIsToldSo: unless it is meant to be.
func TestServerThatIsDownIsToldSo(t *testing.T) {
	p := newPlace(t, config)
	r, got := p.look(false, time.Now())
	if !slices.Equal(got, []string{"critical server.down"}) || r.CA == nil || r.CA.Running || len(r.CA.Certs) != 2 || len(r.CA.Keys) != 2 {
		t.Errorf("found %v, %+v", got, r.CA)
	}
	for _, k := range r.CA.Keys {
		if k.Checked == nil || k.Error != "" {
			t.Errorf("a key was not tried: %+v", k)
		}
	}
	if err := r.Err("doctor"); err == nil || !strings.Contains(err.Error(), "1 critical") {
		t.Error(err)
	}
	var out bytes.Buffer
	if err := show(&out, "json", r); err == nil {
		t.Error("a critical finding is no error")
	}
	var got2 struct {
		Severity string
		Checked  []string
		CA       struct{ Certificates []struct{ Kind string } }
	}
	if err := json.Unmarshal(out.Bytes(), &got2); err != nil || got2.Severity != "critical" || len(got2.Checked) != 13 || len(got2.CA.Certificates) != 2 {
		t.Errorf("%v: %s", err, out.String())
	}
}

// TestNothingGoesUnsaid: a doctor that is stopped before it has looked says what it has not looked at.
func TestNothingGoesUnsaid(t *testing.T) {
	p := newPlace(t, config)
	s, err := server.Load(p.path("server.yaml"))
	p.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := examineServerAt(ctx, s, p.path("server.yaml"), false, time.Now())
	if r.Severity == checkup.OK || !slices.ContainsFunc(r.Findings, func(f checkup.Finding) bool { return f.ID == "unchecked" }) {
		t.Errorf("%+v", r.Findings)
	}
}

func TestRoom(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		room room
		want checkup.Severity
	}{
		{room{free: 50 * gib, total: 100 * gib, freeNodes: 900, inodes: 1000}, checkup.OK},
		{room{free: 2 * gib, total: 10000 * gib}, checkup.OK}, // a large disk: 2 GiB are days
		{room{free: gib - 1, total: 10000 * gib}, checkup.Warning},
		{room{free: gib / 5, total: gib}, checkup.OK}, // a small volume
		{room{free: gib / 11, total: gib}, checkup.Warning},
		{room{free: gib / 51, total: gib}, checkup.Critical},
		{room{free: 99 << 20, total: 100 * gib}, checkup.Critical},
		{room{free: 0, total: 100 * gib, freeNodes: 900, inodes: 1000}, checkup.Critical},
		{room{free: 50 * gib, total: 100 * gib, freeNodes: 49, inodes: 1000}, checkup.Warning},
		{room{free: 50 * gib, total: 100 * gib, freeNodes: 9, inodes: 1000}, checkup.Critical},
	} {
		if got := checkup.Worst(judgeRoom("disk", c.room)); got != c.want {
			t.Errorf("%+v is %s, want %s", c.room, got, c.want)
		}
	}
}

// TestD9MarkOfTheState: a mark that is missing or damaged, and a state that is older than it.
func TestD9MarkOfTheState(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(p place, s *server.Settings)
		want []string
	}{
		{"as it should be", func(place, *server.Settings) {}, []string{}},
		{"missing", func(p place, s *server.Settings) { p.must(os.Remove(s.Place().Mark())) }, []string{"critical mark.unusable"}},
		{"damaged", func(p place, s *server.Settings) { p.must(os.WriteFile(s.Place().Mark(), []byte("x"), 0o600)) }, []string{"critical mark.unusable"}},
		{"ahead of the state", func(p place, s *server.Settings) {
			sealer, err := keys.LoadSealer(s.State.SealingKey)
			p.must(err)
			p.must(replica.WriteMark(s.Place().Mark(), s.Domain(), sealer, replica.Mark{Version: 1 << 32, Hash: "00"}))
		}, []string{"critical state.rolled-back"}},
	} {
		p := newPlace(t, config)
		s, err := server.Load(p.path("server.yaml"))
		p.must(err)
		c.harm(p, s)
		if r, got := p.look(true, time.Now()); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v: %+v", c.name, got, c.want, r.Findings)
		}
	}
}

// TestStoreOutOfReach: a shared store that does not answer is a finding, and all that is no file goes on being looked at.
func TestStoreOutOfReach(t *testing.T) {
	p := newPlace(t, config)
	p.change("sqlite: state/state.db", `postgres: {url: "postgres://nobody@127.0.0.1:1/none"}, replica: ca-1`)
	r, got := p.look(true, time.Now())
	if !slices.Contains(got, "critical state.unreachable") || slices.Contains(got, "critical state.refused") {
		t.Errorf("%v: %+v", got, r.Findings)
	}
	for _, f := range r.Findings {
		if f.ID == "state.unreachable" && !strings.Contains(f.Subject, "schema chancery of postgres://nobody@127.0.0.1:1/none") {
			t.Errorf("%+v", f)
		}
	}
}

// TestConfigWithAFormerTrustDomain works, and is said.
func TestConfigWithAFormerTrustDomain(t *testing.T) {
	p := newPlace(t, config)
	s, err := server.Load(p.path("server.yaml"))
	p.must(err)
	st, err := s.OpenState(t.Context())
	p.must(err)
	p.must(replica.Change(t.Context(), st.Store, st.Sealer, func(next *document.Document) error {
		state := next.State(s.Domain())
		state.Domain, state.Former = "new.example", []string{s.TrustDomain}
		return nil
	}))
	st.Store.Close()
	r, got := p.look(true, time.Now())
	if !slices.Equal(got, []string{"warning config.other-domain"}) || r.CA.TrustDomain != "new.example" {
		t.Fatalf("found %v of %s", got, r.CA.TrustDomain)
	}
	if f := r.Findings[0]; !strings.Contains(f.Problem, s.TrustDomain) || !strings.Contains(f.Problem, "new.example") {
		t.Errorf("%+v", f)
	}
	p.change("trustDomain: "+s.TrustDomain, "trustDomain: new.example")
	if _, got := p.look(true, time.Now()); len(got) > 0 {
		t.Errorf("with the present one: %v", got)
	}
}
