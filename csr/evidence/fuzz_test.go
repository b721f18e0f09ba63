package evidence_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/evidence"
)

// FuzzSay: whatever an agent says, we do not panic, and what passes the checks is taken.
func FuzzSay(f *testing.F) {
	for _, m := range []*chanceryv1.ConsumersState{state(1, 1, i1, i2), {Agent: agentID(2)}, {}} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, b)
	}
	l := evidence.New(evidence.Config{MaxLife: time.Hour})
	f.Fuzz(func(t *testing.T, one, two []byte) {
		a, b := l.Open("spiffe://cluster.local/ns/foo/sa/web", "place", "192.0.2.1:1"), l.Open("spiffe://cluster.local/ns/foo/sa/web", "place", "")
		for i, data := range [][]byte{one, two, one} {
			m := new(chanceryv1.ConsumersState)
			if proto.Unmarshal(data, m) != nil || evidence.Check(m, time.Now()) != nil {
				continue
			}
			if err := []*evidence.Stream{a, b, a}[i].Say(m); err != nil {
				t.Fatal(err)
			}
		}
		b.Close()
		a.Close()
		a.Close()
	})
}

// BenchmarkAnswer measures what the ledger adds to each certificate.
func BenchmarkAnswer(b *testing.B) {
	l := evidence.New(evidence.Config{MaxLife: time.Hour})
	calls := l.Calls(i1, 1)
	x := leaf(i1, 1, time.Hour)
	var pods []evidence.Client
	for i := range 1000 {
		pods = append(pods, pod(i))
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for n := 0; pb.Next(); n++ {
			c := evidence.Enter(l, func() (*evidence.Calls, *evidence.Calls) { return calls, calls })
			if _, err := l.Reserve(b.Context(), x.NotAfter); err != nil {
				b.Fatal("refused")
			}
			l.ToClient(pods[n%len(pods)], x)
			c.Leave()
		}
	})
}
