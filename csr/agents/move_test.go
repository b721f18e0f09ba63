package agents

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// A stream ends before its connection grows too old, and a while after its credential; each at another time.
func TestStreamsEndWithAgeAndCredential(t *testing.T) {
	now := time.Now()
	for _, tc := range []struct {
		name        string
		caller      Caller
		least, most time.Duration
	}{
		{"age", Caller{MaxAge: 10 * time.Minute}, 7 * time.Minute, 9 * time.Minute},
		{"default age", Caller{}, 21 * time.Minute, 27 * time.Minute},
		{"a credential that lives longer", Caller{Ends: now.Add(time.Hour)}, 21 * time.Minute, 27 * time.Minute},
		{"a credential", Caller{Ends: now.Add(5 * time.Minute)}, 6 * time.Minute, 7 * time.Minute},
		{"one that has ended", Caller{Ends: now.Add(-time.Hour)}, time.Minute, 2 * time.Minute},
	} {
		seen := map[time.Duration]bool{}
		for range 500 {
			life := tc.caller.life(now)
			if seen[life] = true; life < tc.least || life > tc.most {
				t.Fatalf("%s: lives %s, want %s to %s", tc.name, life, tc.least, tc.most)
			}
		}
		if len(seen) < 400 {
			t.Errorf("%s: only %d different lives of 500", tc.name, len(seen))
		}
	}
}

// Agents are told what to do: open another stream, and when.
func TestAgentsAreToldToMove(t *testing.T) {
	h, dial := start(t)
	waits := map[time.Duration]bool{}
	var all []chanceryv1.Issuance_SyncClient
	for range 20 {
		all = append(all, dial("a"))
	}
	until(t, "all are there", func() bool { n, _ := h.Counts(); return n == 20 })
	h.Close()
	for _, s := range all {
		_, err := s.Recv()
		st := status.Convert(err)
		if st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "the server is stopping") || len(st.Details()) != 2 {
			t.Fatalf("got %v", err)
		}
		info, _ := st.Details()[0].(*errdetails.ErrorInfo)
		retry, _ := st.Details()[1].(*errdetails.RetryInfo)
		wait := retry.GetRetryDelay().AsDuration()
		if info.GetReason() != ReasonMove || wait < 0 || wait > stopSpread {
			t.Errorf("reason %q, wait %s", info.GetReason(), wait)
		}
		waits[wait] = true
	}
	if len(waits) < 10 {
		t.Errorf("%d different waits of 20", len(waits))
	}
}

// TestD9Marks: a mark goes along with each update, also alone; one that is above the own is passed on once, and its size is
// bounded.
func TestD9Marks(t *testing.T) {
	h, dial := start(t)
	var mark atomic.Pointer[chanceryv1.DocumentMark]
	mark.Store(&chanceryv1.DocumentMark{Version: 7, Mac: []byte("seven")})
	seen := make(chan uint64, 10)
	h.config.Mark = mark.Load
	h.config.Seen = func(_ context.Context, m *chanceryv1.DocumentMark) { seen <- m.GetVersion() }
	publish(t, h, crl("1"))
	h.PushCheckpoints(time.Now())
	s := dial("a")
	if got := recv(t, s).GetDocumentMark(); got.GetVersion() != 7 || string(got.GetMac()) != "seven" {
		t.Errorf("got %v", got)
	}
	for _, version := range []uint64{6, 7, 9, 9, 8, 10} {
		send(t, s, &chanceryv1.SyncRequest{DocumentMark: &chanceryv1.DocumentMark{Version: version, Mac: []byte("x")}})
	}
	if a, b := <-seen, <-seen; a != 9 || b != 10 {
		t.Errorf("passed on are %d and %d, want 9 and 10", a, b)
	}
	before := h.current.version
	mark.Store(&chanceryv1.DocumentMark{Version: 11})
	h.PushCheckpoints(time.Now().Add(time.Minute))
	if got := recv(t, s).GetDocumentMark().GetVersion(); got != 11 || h.current.version == before {
		t.Errorf("a new mark is not pushed: %d", got)
	}
	send(t, s, &chanceryv1.SyncRequest{DocumentMark: &chanceryv1.DocumentMark{Version: 12, Mac: make([]byte, maxMark+1)}})
	for {
		if _, err := s.Recv(); err != nil {
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("a mark that is too large: %v", err)
			}
			break
		}
	}
	if len(seen) > 0 {
		t.Error("a mark that is too large is passed on")
	}
}
