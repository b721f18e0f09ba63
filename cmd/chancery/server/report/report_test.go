package report

import (
	"context"
	"crypto"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/server/adminsocket"
	"github.com/chancery-project/chancery/csr/tally"
	"github.com/chancery-project/chancery/trust"
)

// parts makes the parts of a server in a folder.
func parts(t *testing.T) Config {
	t.Helper()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	td, err := trust.ParseDomain("cluster.local")
	must(err)
	st, err := store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db"))
	must(err)
	t.Cleanup(func() { st.Close() })
	sealer, err := keys.CreateSealer(filepath.Join(dir, "state.key"))
	must(err)
	file, logDir := filepath.Join(dir, "audit.jsonl"), filepath.Join(dir, "log")
	log, err := audit.Open(file)
	must(err)
	_, err = issuelog.Create(logDir, "cluster.local/chancery/log/16909060")
	must(err)
	issued, err := issuelog.Open(issuelog.Config{Dir: logDir, Logger: slog.New(slog.DiscardHandler)})
	must(err)
	log.Mirror(issued.Write)
	t.Cleanup(func() { log.Close(); issued.Close() })
	p, err := ca.NewProfile("workload", ca.ProfileConfig{})
	must(err)
	c := authority.Config{Domain: td, Store: st, Sealer: sealer, Log: log, Logger: slog.New(slog.DiscardHandler), Profiles: []*ca.Profile{p}}
	_, err = authority.Init(t.Context(), c, "test")
	must(err)
	keeper, err := authority.Open(t.Context(), c)
	must(err)
	return Config{
		Domain: td, MaxTTL: p.MaxTTL(), Ready: func() error { return nil }, WasReady: func() bool { return true }, Authority: keeper, Own: func() *trust.Identity { return nil },
		Health:  keys.NewHealth(keys.HealthConfig{Keys: func() []keys.Watched { return append(keeper.Keys(), gone) }, Logger: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()}),
		Signing: func() string { return "no right" }, Publishing: func() string { return "another manager" }, Naming: func() (string, bool) { return "pods cannot be read", true },
		Recent: tally.New(), Log: log, Notes: adminsocket.NewNotes(log), AuditLog: file, Issuance: issued, IssuanceLog: logDir,
	}
}

// gone is a key in a store that has lost it.
var gone = keys.Watched{Name: "issuer gone", Open: func(context.Context) (crypto.Signer, error) { return nil, keys.ErrNotFound }}

func ask(t *testing.T, r *Reporter, actor string) *chanceryv1.GetStatusResponse {
	t.Helper()
	resp, err := r.Status(actor)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func TestStatusSaysWhatThePartsSay(t *testing.T) {
	c := parts(t)
	c.Ready = func() error { return errors.New("the disk is full") }
	c.Clusters = []Cluster{
		{Name: "east", Ready: func() error { return nil }, WasReady: func() bool { return true }},
		{Name: "west", Ready: func() error { return errors.New("no keys") }, WasReady: func() bool { return false }},
	}
	c.Recent.Add("ok")
	c.Recent.Add("BUSY")
	c.Recent.Add("BUSY")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.Health.Run(ctx) }()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if v := c.Health.Verdicts(); len(v) == 3 && !v[0].Checked.IsZero() && !v[1].Checked.IsZero() && !v[2].Checked.IsZero() {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("keys are not checked: %+v", v)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	resp := ask(t, New(c), "unix:root")
	if resp.GetNotReady() != "the disk is full" || !resp.GetWasReady() || resp.GetTrustDomain() != "cluster.local" || resp.GetMaxTtl().AsDuration() != 24*time.Hour ||
		resp.GetIssuerRenewedBy() != "server" || resp.GetDocument().GetVersion() != 1 || len(resp.GetDocument().GetLogs()) != 1 {
		t.Errorf("%v", resp)
	}
	if certs := resp.GetCertificates(); len(certs) != 2 || certs[0].GetKind() != "root" || certs[1].GetKind() != "issuer" || !certs[0].GetInUse() || !certs[1].GetInUse() {
		t.Errorf("certificates: %v", certs)
	}
	for _, k := range resp.GetKeys() {
		if k.GetName() == gone.Name {
			if k.GetError() != keys.ErrNotFound.Error() {
				t.Errorf("a key that is gone: %v", k)
			}
		} else if k.GetStore() != "sealed in the state" || k.GetError() != "" || k.GetTook() == nil || k.GetChecked() == nil {
			t.Errorf("key: %v", k)
		}
	}
	if o := resp.GetOutcomes(); len(o) != 2 || o[0].GetOutcome() != "BUSY" || o[0].GetMinute() != 2 || o[1].GetOutcome() != "ok" || o[1].GetTotal() != 1 {
		t.Errorf("outcomes: %v", o)
	}
	if l := resp.GetIssuanceLog(); l.GetDir() != c.IssuanceLog || l.GetSize() == 0 || l.GetError() != "" { // init's intents
		t.Errorf("issuance log: %v", l)
	}
	if a := resp.GetAuditLog(); a.GetPath() != c.AuditLog || a.GetSize() == 0 || a.GetError() != "" || a.GetMoved() {
		t.Errorf("audit log: %v", a)
	}
	if resp.GetSigningError() != "no right" || resp.GetPublishingError() != "another manager" {
		t.Errorf("in Kubernetes: %q, %q", resp.GetSigningError(), resp.GetPublishingError())
	}
	if resp.GetNamingError() != "pods cannot be read" || !resp.GetNamingUnread() {
		t.Errorf("naming: %q, %t", resp.GetNamingError(), resp.GetNamingUnread())
	}
	if k := resp.GetClusters(); len(k) != 2 || k[0].GetNotReady() != "" || !k[0].GetWasReady() || k[1].GetNotReady() != "no keys" || k[1].GetWasReady() {
		t.Errorf("clusters: %v", k)
	}
}

// TestD14StatusIsNotedOnceAnHour: who asks goes into the audit log, once an hour for each actor; and a log that cannot be
// written does not keep anybody from learning so.
func TestD14StatusIsNotedOnceAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := parts(t)
		r := New(c)
		noted := func() int {
			t.Helper()
			time.Sleep(time.Second) // for the next commit
			data, err := os.ReadFile(c.AuditLog)
			if err != nil {
				t.Fatal(err)
			}
			return strings.Count(string(data), `"event":"admin","actor":"unix:root","detail":"status`)
		}
		for range 50 {
			ask(t, r, "unix:root")
			time.Sleep(time.Minute)
		}
		ask(t, r, "unix:chancery")
		if n := noted(); n != 1 {
			t.Errorf("%d lines of 50 minutes, want 1", n)
		}
		time.Sleep(time.Hour)
		ask(t, r, "unix:root")
		if n := noted(); n != 2 {
			t.Errorf("%d lines after an hour, want 2", n)
		}

		if err := os.Rename(c.AuditLog, c.AuditLog+".1"); err != nil {
			t.Fatal(err)
		}
		if !ask(t, r, "unix:root").GetAuditLog().GetMoved() {
			t.Error("a log that was moved away is not told")
		}
		if err := os.Mkdir(c.AuditLog, 0o700); err != nil {
			t.Fatal(err)
		}
		c.Log.Reopen()
		time.Sleep(time.Hour)
		ask(t, r, "unix:root") // whose line cannot be written
		time.Sleep(time.Second)
		if got := ask(t, r, "unix:root").GetAuditLog().GetError(); !strings.Contains(got, "is a directory") {
			t.Errorf("a log that cannot be written is told as %q", got)
		}
	})
}
