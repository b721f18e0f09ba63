package log

import (
	"bytes"
	"encoding/hex"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/issuelogtest"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// TestAuditFindsCertificatesThatNoLogHas: a serial that is unknown, one that is another identity's, and another
// certificate of a known serial are named; what the log has is not, also where only its intent is there.
func TestAuditFindsCertificatesThatNoLogHas(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	if _, err := issuelog.Create(dir, "cluster.local/chancery/log/16909060"); err != nil {
		t.Fatal(err)
	}
	l, err := issuelog.Open(issuelog.Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	records := issuelogtest.Pairs(0, 300)
	for _, r := range [][]audit.Record{records, records[:0]} {
		if err := l.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	alone, _ := issuelogtest.Pair(1000)
	if err := errors.Join(l.Write([]audit.Record{alone}), l.Close()); err != nil {
		t.Fatal(err)
	}
	svid := func(i int, id string) *chanceryv1.ServedSvid {
		_, issued := issuelogtest.Pair(i)
		serial, _ := hex.DecodeString(issued.Serial)
		hash, _ := hex.DecodeString(issued.CertHash)
		return &chanceryv1.ServedSvid{SpiffeId: id, Serial: serial, CertificateHash: hash}
	}
	run := func(missing string, served ...*chanceryv1.ServedSvid) (string, error) {
		var out bytes.Buffer
		s := sources{dirs: []string{dir}}
		if missing != "" {
			s.dirs = append(s.dirs, missing)
		}
		err := s.audit(t.Context(), &chanceryv1.ListServedResponse{Agents: []*chanceryv1.ServedByAgent{
			{SpiffeId: "spiffe://cluster.local/ns/a/sa/agent", Remote: "192.0.2.1:1", Served: served},
		}}, "text", &out)
		return out.String(), err
	}
	good := []*chanceryv1.ServedSvid{svid(0, issuelogtest.ID(0)), svid(299, issuelogtest.ID(299)), svid(1000, issuelogtest.ID(1000))}
	if out, err := run("", good...); err != nil || !strings.Contains(out, "1 agents serve 3 certificates; 0 of them are in no log") {
		t.Errorf("%q, %v", out, err)
	}
	another := svid(2, issuelogtest.ID(2))
	another.CertificateHash = make([]byte, 32)
	out, err := run("", append(good, svid(5000, issuelogtest.ID(5000)), svid(1, issuelogtest.ID(7)), another)...)
	if err == nil || !strings.Contains(err.Error(), "3 certificates in use are in no log") {
		t.Errorf("%v", err)
	}
	if e, ok := errors.AsType[*process.ExitError](err); ok {
		t.Errorf("exit code %d, want 1", e.Code)
	}
	for _, want := range []string{
		issuelogtest.ID(5000) + "  serial " + issuelogtest.Serial(5000), "served by spiffe://cluster.local/ns/a/sa/agent at 192.0.2.1:1: no log has this serial",
		"the log has this serial for " + issuelogtest.ID(1), "the log has another certificate with this serial",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	// With a log that cannot be read, what was not found may be there.
	_, err = run(filepath.Join(t.TempDir(), "gone"), svid(5000, issuelogtest.ID(5000)))
	if e, ok := errors.AsType[*process.ExitError](err); !ok || e.Code != 2 || !strings.Contains(err.Error(), "INCOMPLETE") || !strings.Contains(err.Error(), "in no log") {
		t.Errorf("%v", err)
	}
}
