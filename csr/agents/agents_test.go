package agents

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// server serves a hub on loopback; callers name themselves in the metadata.
type server struct {
	chanceryv1.UnimplementedIssuanceServer
	hub *Hub
}

func (s server) Sync(g grpc.BidiStreamingServer[chanceryv1.SyncRequest, chanceryv1.SyncUpdate]) error {
	md, _ := metadata.FromIncomingContext(g.Context())
	return s.hub.Serve(Caller{ID: strings.Join(md.Get("id"), ""), Remote: "192.0.2.1:1", Place: "node"}, g)
}

var checkpoint atomic.Pointer[string] // of the log; nil for none

func checkpoints() []string {
	if c := checkpoint.Load(); c != nil {
		return []string{*c}
	}
	return nil
}

func setCheckpoint(t *testing.T, s string) {
	t.Cleanup(func() { checkpoint.Store(nil) })
	checkpoint.Store(&s)
}

// start returns a hub and what connects an agent to it.
func start(t *testing.T) (*Hub, func(id string) chanceryv1.Issuance_SyncClient) {
	t.Helper()
	h := New(Config{Metrics: prometheus.NewRegistry(), Checkpoints: checkpoints})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(grpc.ForceServerCodecV2(NewCodec()))
	chanceryv1.RegisterIssuanceServer(g, server{hub: h})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := g.Serve(l); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { g.Stop(); wg.Wait() })
	return h, func(id string) chanceryv1.Issuance_SyncClient {
		t.Helper()
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "id", id), time.Minute)
		t.Cleanup(cancel)
		s, err := chanceryv1.NewIssuanceClient(conn).Sync(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func recv(t *testing.T, s chanceryv1.Issuance_SyncClient) *chanceryv1.SyncUpdate {
	t.Helper()
	u, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func send(t *testing.T, s chanceryv1.Issuance_SyncClient, m *chanceryv1.SyncRequest) {
	t.Helper()
	if err := s.Send(m); err != nil {
		t.Fatal(err)
	}
}

func publish(t *testing.T, h *Hub, m *chanceryv1.SyncUpdate) {
	t.Helper()
	if err := h.Publish(m); err != nil {
		t.Fatal(err)
	}
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func crl(s string) *chanceryv1.SyncUpdate { return &chanceryv1.SyncUpdate{Crls: [][]byte{[]byte(s)}} }

// TestASlowAgentHoldsUpNobody: each gets the newest, and skips what came in between.
func TestASlowAgentHoldsUpNobody(t *testing.T) {
	h, dial := start(t)
	slow, fast := dial("slow"), dial("fast")
	until(t, "both are there", func() bool { n, _ := h.Counts(); return n == 2 })
	const rounds = 50
	large := strings.Repeat("x", 1<<20) // several fill what the connection takes without being read
	for i := range rounds {
		publish(t, h, crl(fmt.Sprint(large, i)))
		for { // may skip, but never the newest
			if got := recv(t, fast).GetCrls()[0]; string(got) == fmt.Sprint(large, i) {
				break
			}
		}
	}
	var versions []uint64
	for {
		u := recv(t, slow)
		versions = append(versions, u.GetVersion())
		if string(u.GetCrls()[0]) == fmt.Sprint(large, rounds-1) {
			break
		}
	}
	if len(versions) > rounds/2 {
		t.Errorf("the slow one got %d of %d updates", len(versions), rounds)
	}
	for i := range versions[1:] {
		if versions[i+1] <= versions[i] {
			t.Errorf("versions %v do not grow", versions)
		}
	}
	publish(t, h, crl("a new one is there at once"))
	if u := recv(t, dial("new")); string(u.GetCrls()[0]) != "a new one is there at once" {
		t.Errorf("a new agent got %s", u.GetCrls())
	}
}

// TestSlowAgentsShareWhatTheyAreSent: a hundred agents that do not read hold one copy of what they are sent, not one each.
func TestSlowAgentsShareWhatTheyAreSent(t *testing.T) {
	h, dial := start(t)
	const agents, size = 100, 3 << 20
	var all []chanceryv1.Issuance_SyncClient
	for i := range agents {
		all = append(all, dial(fmt.Sprint(i)))
	}
	until(t, "all are there", func() bool { n, _ := h.Counts(); return n == agents })
	inUse := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := inUse()
	publish(t, h, crl(strings.Repeat("x", size)))
	until(t, "all are being sent it", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for s := range h.streams {
			if s.sent != h.current.version {
				return false
			}
		}
		return true
	})
	time.Sleep(100 * time.Millisecond) // into gRPC's hands
	if held := inUse() - before; held > agents*size/2 {
		t.Errorf("%d agents hold %d MB", agents, held>>20)
	}
	if u := recv(t, all[0]); len(u.GetCrls()) != 1 || len(u.GetCrls()[0]) != size || u.GetVersion() != h.current.version {
		t.Errorf("version %d with %d CRLs", u.GetVersion(), len(u.GetCrls()))
	}
}

// TestAcknowledgements count for what the stream was sent, and checkpoints do not put an agent behind.
func TestAcknowledgements(t *testing.T) {
	h, dial := start(t)
	publish(t, h, crl("1"))
	a, b := dial("a"), dial("b")
	u := recv(t, a)
	recv(t, b)
	send(t, a, &chanceryv1.SyncRequest{Acknowledged: u.GetVersion() + 1}) // never sent
	send(t, b, &chanceryv1.SyncRequest{Acknowledged: 7})                  // of another process of the server
	send(t, a, &chanceryv1.SyncRequest{NotEnforcing: []string{"ALL has 2 users"}})
	until(t, "it is taken", func() bool {
		return strings.Contains(strings.Join(h.NotEnforcing(time.Now()), "\n"), "ALL has 2 users")
	})
	if n, have := h.Counts(); n != 2 || have != 0 {
		t.Errorf("%d of %d have acknowledged what they were not sent", have, n)
	}
	send(t, a, &chanceryv1.SyncRequest{Acknowledged: u.GetVersion()})
	send(t, b, &chanceryv1.SyncRequest{Acknowledged: u.GetVersion()})
	if n, have := h.Wait(t.Context()); n != 2 || have != 2 {
		t.Errorf("%d of %d", have, n)
	}
	setCheckpoint(t, "c")
	h.PushCheckpoints(time.Now())
	setCheckpoint(t, "d")
	if u := recv(t, a); len(u.GetCheckpoints()) != 1 || string(u.GetCrls()[0]) != "1" {
		t.Errorf("got %v", u)
	}
	if n, have := h.Counts(); n != 2 || have != 2 {
		t.Errorf("a checkpoint put %d of %d behind", n-have, n)
	}
	publish(t, h, crl("2"))
	if u := recv(t, a); len(u.GetCheckpoints()) != 1 {
		t.Error("the next update has no checkpoint")
	} else {
		send(t, a, &chanceryv1.SyncRequest{Acknowledged: u.GetVersion()})
	}
	for {
		if u := recv(t, b); string(u.GetCrls()[0]) == "2" {
			break
		}
	}
	send(t, b, &chanceryv1.SyncRequest{Acknowledged: u.GetVersion(), Refused: "crls[0]: no"})
	if n, have := h.Wait(t.Context()); n != 2 || have != 1 { // it does not wait for what was refused
		t.Errorf("%d of %d", have, n)
	}
	if got := strings.Join(h.NotEnforcing(time.Now()), "\n"); !strings.Contains(got, "agent b at 192.0.2.1:1 refused the last update: crls[0]: no") {
		t.Errorf("got %q", got)
	}
	if err := b.CloseSend(); err != nil {
		t.Fatal(err)
	}
	until(t, "b is gone", func() bool { n, _ := h.Counts(); return n == 1 })
}

// TestD21CheckpointsAreCoalescedAndNeverOld: alone they make an update every 10 s at most, and more seldom where updates are
// large; whatever is sent has those of the moment.
func TestD21CheckpointsAreCoalescedAndNeverOld(t *testing.T) {
	h, dial := start(t)
	version := func() uint64 { return h.current.version }
	now := time.Now()
	setCheckpoint(t, "0")
	h.PushCheckpoints(now)
	if h.current != nil {
		t.Fatal("checkpoints alone were sent before there was anything else")
	}
	publish(t, h, crl("1"))
	first := version()
	for i := range 100 { // a second each
		setCheckpoint(t, fmt.Sprint("a", i))
		h.PushCheckpoints(now.Add(time.Duration(i) * time.Second))
	}
	if n := version() - first; n != 10 {
		t.Errorf("%d updates in 100 s, want 10", n)
	}
	setCheckpoint(t, "newest")
	if got := recv(t, dial("new")).GetCheckpoints(); len(got) != 1 || got[0] != "newest" {
		t.Errorf("a new agent got %v", got)
	}
	publish(t, h, crl(strings.Repeat("x", 20*checkpointBytes)))
	first = version()
	for i := range 1000 {
		setCheckpoint(t, fmt.Sprint("b", i))
		h.PushCheckpoints(now.Add(time.Duration(1000+i) * time.Second))
	}
	if n := version() - first; n < 3 || n > 6 {
		t.Errorf("%d large updates in 1000 s", n)
	}
}

func TestBounds(t *testing.T) {
	h, dial := start(t)
	publish(t, h, crl("1"))
	code := func(s chanceryv1.Issuance_SyncClient) codes.Code {
		for {
			if _, err := s.Recv(); err != nil {
				return status.Code(err)
			}
		}
	}
	many := dial("many")
	send(t, many, &chanceryv1.SyncRequest{Served: make([]*chanceryv1.ServedSvid, maxServed+1)})
	if c := code(many); c != codes.InvalidArgument {
		t.Errorf("too many SVIDs: %v", c)
	}
	long := dial("long")
	send(t, long, &chanceryv1.SyncRequest{Served: []*chanceryv1.ServedSvid{{Serial: make([]byte, 21)}}})
	if c := code(long); c != codes.InvalidArgument {
		t.Errorf("a serial that is none: %v", c)
	}
	wordy := dial("wordy")
	words := make([]string, 2*maxWords)
	for i := range words {
		words[i] = strings.Repeat("w", 10*maxWord)
	}
	send(t, wordy, &chanceryv1.SyncRequest{NotEnforcing: words, Served: []*chanceryv1.ServedSvid{{SpiffeId: "x"}}})
	until(t, "the report is there", func() bool { all, _ := h.Served(); return len(all) == 1 && len(all[0].GetServed()) == 1 })
	n := 0
	for _, s := range h.NotEnforcing(time.Now()) {
		if strings.Contains(s, "www") {
			n++
		}
		if len(s) > maxWord+100 {
			t.Errorf("a line of %d bytes", len(s))
		}
	}
	if n != maxWords {
		t.Errorf("%d lines were kept", n)
	}

	// The books are right, however streams come and go.
	var streams []*stream
	for i := range maxOfOnePlace {
		s := &stream{id: fmt.Sprint(i), place: "one"}
		if err := h.join(s); err != nil {
			t.Fatal(i, err)
		}
		streams = append(streams, s)
	}
	if err := h.join(&stream{place: "one"}); !errors.Is(err, ErrBusy) {
		t.Errorf("one too many: %v", err)
	}
	if err := h.join(&stream{place: "two"}); err != nil {
		t.Errorf("elsewhere: %v", err)
	}
	report := func(s *stream, idBytes int) {
		m := &chanceryv1.SyncRequest{}
		for range maxServed {
			m.Served = append(m.Served, &chanceryv1.ServedSvid{SpiffeId: strings.Repeat("x", idBytes)})
		}
		if err := h.take(s, m); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range streams {
		report(s, 2048)
	}
	if _, omitted := h.Served(); omitted == 0 || h.bytes > maxPlaceBytes+200 || h.bytes < maxPlaceBytes-5000 || h.byPlace["one"] > maxPlaceBytes {
		t.Errorf("long names of one place: %d bytes kept, %d omitted", h.bytes, omitted)
	}
	for _, s := range streams {
		h.leave(s)
	}
	streams = streams[:0]
	for i := range 300 {
		s := &stream{id: fmt.Sprint(i), place: fmt.Sprint(i)}
		if err := h.join(s); err != nil {
			t.Fatal(i, err)
		}
		streams = append(streams, s)
		report(s, 50)
	}
	if _, omitted := h.Served(); omitted != 300*maxServed+1-maxKept || h.kept != maxKept {
		t.Errorf("%d kept, %d omitted", h.kept, omitted)
	}
	for _, s := range streams {
		report(s, 2048)
	}
	if _, omitted := h.Served(); omitted == 0 || h.bytes > maxKeptBytes || h.bytes < maxKeptBytes-5000 {
		t.Errorf("long names everywhere: %d bytes kept, %d omitted", h.bytes, omitted)
	}
	for _, s := range streams {
		h.leave(s)
	}
	if _, omitted := h.Served(); omitted != 0 || h.kept != 1 || h.places["one"] != 0 || len(h.byPlace) != 1 {
		t.Errorf("after all left: %d kept, %d omitted, places %v, bytes %v", h.kept, omitted, h.places, h.byPlace)
	}
}

// TestAgain: agents that are asked to say again how they are get the same again, and are not behind meanwhile.
func TestAgain(t *testing.T) {
	h, dial := start(t)
	publish(t, h, crl("1"))
	s := dial("a")
	u := recv(t, s)
	send(t, s, &chanceryv1.SyncRequest{Acknowledged: u.GetVersion()})
	if n, have := h.Wait(t.Context()); n != 1 || have != 1 {
		t.Errorf("%d of %d", have, n)
	}
	h.Again()
	h.Again()
	now := time.Now()
	for i := range 3 {
		h.PushCheckpoints(now.Add(time.Duration(i) * time.Minute))
	}
	if again := recv(t, s); again.GetVersion() != u.GetVersion()+1 || string(again.GetCrls()[0]) != "1" {
		t.Errorf("got %v", again)
	}
	if n, have := h.Counts(); n != 1 || have != 1 || h.current.version != u.GetVersion()+1 {
		t.Errorf("%d of %d have the content, and the version is %d", have, n, h.current.version)
	}
}
