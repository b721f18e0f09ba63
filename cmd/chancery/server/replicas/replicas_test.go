package replicas

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// TestList: what the document lists, with what each told by its log, whatever name it bore.
func TestList(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	if _, err := issuelog.Create(dir, "cluster.local/chancery/log/16777217"); err != nil {
		t.Fatal(err)
	}
	l, err := issuelog.Open(issuelog.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	now := time.Now().UTC()
	dead := now.Add(-time.Hour)
	doc := document.New()
	doc.Driver = &document.Driver{Replica: "ca-2", Term: 3}
	doc.Logs = []authority.LogState{
		{ID: 1<<24 + 2, Replica: "ca-2"}, {ID: 1<<24 + 1, Replica: "ca-1", Key: l.PublicKey()}, {ID: 1<<24 + 3, Replica: "ca-2", DeclaredDead: &dead},
	}
	all := List(doc, "ca-1", []board.Note{
		{Replica: "ca-1", LogID: 1<<24 + 1, Seen: now, Acknowledged: 9, Format: 2, Checkpoint: l.Checkpoint()},
		{Replica: "ca-2.16777219", LogID: 1<<24 + 3, Seen: dead, Acknowledged: 4, Checkpoint: "nonsense"},
		{Replica: "stranger", LogID: 1<<24 + 9, Seen: now},
	}, map[string]string{"ca-2": "it was changed"})
	if len(all) != 3 || all[0].GetName() != "ca-1" || all[1].GetLogId() != 1<<24+2 || all[2].GetLogId() != 1<<24+3 {
		t.Fatalf("%v", all)
	}
	if r := all[0]; !r.GetOwn() || r.GetDrives() || r.GetAcknowledged() != 9 || r.GetFormat() != 2 || r.GetLogSize() != 0 || r.GetLogKey() != l.PublicKey() || !r.GetSeen().AsTime().Equal(now) || r.GetTrouble() != "" {
		t.Errorf("own: %v", r)
	}
	if r := all[1]; r.GetOwn() || !r.GetDrives() || r.GetSeen() != nil || r.GetAcknowledged() != 0 || r.GetLogSize() != -1 || r.GetTrouble() != "it was changed" || r.GetDeclaredDead() != nil {
		t.Errorf("one that told nothing: %v", r)
	}
	if r := all[2]; r.GetDrives() || r.GetOwn() || r.GetAcknowledged() != 4 || r.GetLogSize() != -1 || !r.GetDeclaredDead().AsTime().Equal(dead) || r.GetTrouble() != "" {
		t.Errorf("a dead one: %v", r)
	}
}

// TestStatusFromSeveralAtOnce: the notes of others are one list for all who ask, and nobody may write behind its end.
func TestStatusFromSeveralAtOnce(t *testing.T) {
	dir := t.TempDir()
	st, err := store.CreateSQLite(t.Context(), filepath.Join(dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	sealer, err := keys.CreateSealer(filepath.Join(dir, "state.key"))
	if err != nil {
		t.Fatal(err)
	}
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	var own *board.Board
	for i := range 6 { // five others: the list is longer than what it was grown to
		own = board.Open(board.Config{Store: st, Sealer: sealer, Domain: td, Replica: fmt.Sprintf("ca-%d", i), Format: document.Format, Logger: slog.New(slog.DiscardHandler)})
		own.Own(func(n *board.Note) { n.LogID = 1<<24 + uint32(i) })
		if err := own.Write(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := own.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	d := Open(Config{Board: own})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				if all := d.notes(); len(all) != 6 || all[5].LogID != 1<<24+5 {
					t.Errorf("%d notes", len(all))
				}
			}
		})
	}
	wg.Wait()
}

// TestMetrics: what monitoring needs to tell a store or a server that is gone.
func TestMetrics(t *testing.T) {
	at := timestamppb.New(time.Unix(1_800_000_000, 0))
	doc := document.New()
	doc.Version = 7
	m := metrics{func() *chanceryv1.GetStatusResponse_Store {
		return &chanceryv1.GetStatusResponse_Store{Confirmed: at, Error: "connection refused", Replica: "ca-1", Driver: "ca-1", Replicas: []*chanceryv1.Replica{
			{Name: "ca-1", Own: true, Seen: at}, {Name: "ca-2", Seen: at}, {Name: "ca-2", Seen: at}, {Name: "ca-3"}, {Name: "ca-4", DeclaredDead: at},
		}}
	}, func() *authority.Document { return doc }}
	if err := testutil.CollectAndCompare(m, strings.NewReader(`
# HELP chancery_ca_document_version Version of the authority document that this server works by.
# TYPE chancery_ca_document_version gauge
chancery_ca_document_version 7
# HELP chancery_ca_drives 1 if the authority document names this server as the one that renews issuers, else 0.
# TYPE chancery_ca_drives gauge
chancery_ca_drives 1
# HELP chancery_ca_replica_seen_timestamp_seconds When another server on the store was last heard of, by its own clock; 0 if never.
# TYPE chancery_ca_replica_seen_timestamp_seconds gauge
chancery_ca_replica_seen_timestamp_seconds{replica="ca-2"} 1.8e+09
chancery_ca_replica_seen_timestamp_seconds{replica="ca-3"} 0
# HELP chancery_ca_store_confirmed_timestamp_seconds When the store last confirmed the authority document.
# TYPE chancery_ca_store_confirmed_timestamp_seconds gauge
chancery_ca_store_confirmed_timestamp_seconds 1.8e+09
# HELP chancery_ca_store_failing 1 if the store did not answer, or gave what is refused, when it was asked last, else 0.
# TYPE chancery_ca_store_failing gauge
chancery_ca_store_failing 1
`)); err != nil {
		t.Error(err)
	}
}
