package sds

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"

	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/trust"
)

// openTable opens a table of consumers in a folder, and lets go of it at the end.
func openTable(t *testing.T, dir string) *consumers.Table {
	t.Helper()
	table, err := consumers.Open(consumers.Config{File: filepath.Join(dir, "consumers")})
	must(t, err)
	t.Cleanup(func() { table.Close() })
	return table
}

func withTable(box *viewBox, table *consumers.Table) Config {
	return Config{Attest: box.attest, Consumers: func(Peer) *consumers.Table { return table }}
}

// waitState waits until a table says what a test wants.
func waitState(t *testing.T, table *consumers.Table, what string, newest uint64, is func(consumers.State) bool) consumers.State {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		s := table.State(newest)
		if is(s) {
			return s
		}
		if time.Now().After(end) {
			t.Fatalf("never came to be: %s; it is %+v", what, s)
		}
	}
}

// waitStream waits until some stream is as a test wants it, and what came of that has been noted.
func waitStream(a *agent, what string, is func(StreamStatus) bool) {
	a.t.Helper()
	for end := time.Now().Add(20 * time.Second); !slices.ContainsFunc(a.server.Streams(), is); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			a.t.Fatalf("never came to be: %s", what)
		}
	}
}

// sent returns, in order, what versions of a name streams were sent last.
func (a *agent) sent(name string) (all []string) {
	for _, st := range a.server.Streams() {
		for _, r := range st.Resources {
			if r.Name == name {
				all = append(all, r.Sent.Version)
			}
		}
	}
	slices.Sort(all)
	return all
}

// TestD1WhatAConsumerHas: a process counts from before it gets its SVID, with the lowest generation that it has acknowledged of the
// validation contexts that it asks for, over all of its streams; a rejection is in its own words; who has no context is unknown.
func TestD1WhatAConsumerHas(t *testing.T) {
	ca := newCA(t, "cluster.local")
	web, bundle := ca.identity("/ns/foo/sa/web"), ca.bundle()
	g := bundle.Generation()
	box := newBox(&View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{bundle}, Naming: map[string][]trust.ID{"foo/web": {web.ID}}})
	table := openTable(t, t.TempDir())
	a := start(t, withTable(box, table))
	want(t, "consumers", table.State(g).Consumers, 0)

	svid := a.sotw("default")
	svid.next()
	s := table.State(g)
	want(t, "consumers", s.Consumers, 1)
	want(t, "generation", s.Generation, 0)
	want(t, "held", len(s.Held), 1)
	if !slices.Equal(s.Held[0].Issuer, ca.issuer.SubjectKeyId) || !s.Until.Equal(web.NotAfter()) {
		t.Errorf("it holds %x until %s", s.Held[0].Issuer, s.Until)
	}
	if !strings.Contains(s.Lagging[0].Why, "no validation context") {
		t.Errorf("it is behind since %q", s.Lagging[0].Why)
	}

	roots, service := a.sotw("ROOTCA"), a.sotw("service:foo/web")
	roots.next()
	roots.ack()
	service.next()
	waitState(t, table, "one of two contexts is no acknowledgement", g, func(s consumers.State) bool {
		return s.Consumers == 1 && s.Generation == 0 && strings.Contains(s.Lagging[0].Why, "has not acknowledged")
	})
	service.nackWith("Failed to load trusted CA certificates")
	s = waitState(t, table, "a rejection in its own words", g, func(s consumers.State) bool { return strings.Contains(s.Lagging[0].Why, "Failed to load trusted CA") })
	if !strings.Contains(s.Lagging[0].Name, "proxy-1") || !strings.Contains(s.Lagging[0].Name, "pid ") {
		t.Errorf("it is called %q", s.Lagging[0].Name)
	}
	next := ca.bundle(newCA(t, "cluster.local").root)
	box.set(View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{next}, Naming: map[string][]trust.ID{"foo/web": {web.ID}}})
	for _, c := range []*sotw{roots, service} {
		c.next()
		c.ack()
	}
	waitState(t, table, "all have it", next.Generation(), func(s consumers.State) bool { return s.Generation == next.Generation() && len(s.Lagging) == 0 })

	// The same roots under another number are acknowledged already.
	again := next.WithGeneration(next.Generation() + 5)
	box.set(View{Identities: []*trust.Identity{web}, Bundles: []*trust.Bundle{again}, Naming: map[string][]trust.ID{"foo/web": {web.ID}}})
	waitState(t, table, "nothing was sent, all have it", again.Generation(), func(s consumers.State) bool { return s.Generation == again.Generation() })

	// A workload counts by delivery, and beyond its connection.
	client, w := a.workload(), newWatcher()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- client.WatchX509Context(ctx, w) }()
	<-w.updates
	cancel()
	<-ended
	client.Close()
	want(t, "one process, one consumer", table.State(1).Consumers, 1)
	must(t, a.stop())
	s = table.State(again.Generation() + 1)
	if s.Consumers != 1 || s.Generation != again.Generation() || !strings.Contains(s.Lagging[0].Why, "not connected") {
		t.Errorf("after its end it is %+v", s)
	}
}

// TestD1ReplacedOnceAcknowledged: an SVID counts until its successor is acknowledged, on each stream that has it.
func TestD1ReplacedOnceAcknowledged(t *testing.T) {
	ca := newCA(t, "cluster.local")
	old, next := ca.identity("/ns/foo/sa/web"), newCA(t, "cluster.local").identity("/ns/foo/sa/web")
	bundle := ca.bundle(next.Bundle.Roots()...)
	box := newBox(&View{Identities: []*trust.Identity{old}, Bundles: []*trust.Bundle{bundle}})
	table := openTable(t, t.TempDir())
	a := start(t, withTable(box, table))
	one, two := a.sotw("default"), a.sotw(old.ID.String())
	for _, c := range []*sotw{one, two} {
		c.next()
		c.ack()
	}
	held := func() int { return len(table.State(1).Held) }
	want(t, "issuers", held(), 1)
	box.set(View{Identities: []*trust.Identity{next}, Bundles: []*trust.Bundle{bundle}})
	one.next()
	two.next()
	want(t, "issuers that may be presented", held(), 2)
	one.ack()
	waitStream(a, "the first has acknowledged", func(st StreamStatus) bool {
		return st.Resources[0].Name == NameDefault && st.Resources[0].Acked == st.Resources[0].Sent
	})
	want(t, "issuers while one stream has not acknowledged", held(), 2)
	two.nackWith("no")
	waitStream(a, "the second has rejected", func(st StreamStatus) bool { return st.LastNACK != nil })
	want(t, "issuers after a rejection", held(), 2)
	two.ack() // it is no answer any more
	again := a.sotw(old.ID.String())
	again.next()
	again.ack()
	waitState(t, table, "the stream that rejected has it still", 1, func(s consumers.State) bool { return len(s.Held) == 2 })
	must(t, two.stream.CloseSend())
	a.waitForAll("one stream less", 2, anyState)
	final := a.sotw(old.ID.String())
	final.next()
	final.ack()
	waitState(t, table, "all have the successor", 1, func(s consumers.State) bool { return len(s.Held) == 1 })
}

// TestD1AFullDisk: what the table cannot have is handed to nobody, who had one keeps it, and roots go out as ever. Once the disk is
// well, all get theirs without asking.
func TestD1AFullDisk(t *testing.T) {
	ca := newCA(t, "cluster.local")
	old, next := ca.identity("/ns/foo/sa/web"), ca.identity("/ns/foo/sa/web")
	box := newBox(&View{Identities: []*trust.Identity{old}, Bundles: []*trust.Bundle{ca.bundle()}})
	dir := t.TempDir()
	table := openTable(t, dir)
	a := start(t, withTable(box, table))
	c, roots := a.sotw("default"), a.sotw("ROOTCA")
	wantIdentity(t, c.next()["default"], old)
	c.ack()
	roots.next()
	roots.ack()
	client, w := a.workload(), newWatcher()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- client.WatchX509Context(ctx, w) }()
	defer func() { cancel(); <-ended }()
	<-w.updates

	first := a.sent(NameDefault)
	broken := durable.Inject(dir, func(s durable.Step, do func(int) error) error {
		if s.Kind == durable.Sync {
			return durabletest.ErrInjected
		}
		return do(-1)
	})
	bundle := ca.bundle(newCA(t, "cluster.local").root)
	box.set(View{Identities: []*trust.Identity{next}, Bundles: []*trust.Bundle{bundle}})
	want(t, "roots", trustedCA(roots.next()["ROOTCA"]), string(bundle.PEM()))
	roots.ack()
	newcomer := a.sotw("default")
	for end := time.Now().Add(20 * time.Second); a.metric("svids_kept_back_total", "disk") < 3; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody was kept back")
		}
	}
	if got := a.sent(NameDefault); !slices.Equal(got, []string{"", first[0]}) {
		t.Errorf("with a broken disk two streams were sent %q; the first had %q before", got, first)
	}
	select {
	case <-w.updates:
		t.Error("a workload was given an SVID that the table does not have")
	default:
	}
	broken()
	wantIdentity(t, c.next()["default"], next)
	wantIdentity(t, newcomer.next()["default"], next)
	x := <-w.updates
	want(t, "the workload's serial", x.DefaultSVID().Certificates[0].SerialNumber.String(), next.Leaf().SerialNumber.String())
}

// TestD5RootsBeforeTheLeafThatNeedsThem: where roots and SVID change together a proxy that knows only the old root gets the new SVID
// once it has acknowledged the new one, and keeps what works until then; it gets it in any case when that works no more.
func TestD5RootsBeforeTheLeafThatNeedsThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, other := newCA(t, "cluster.local"), newCA(t, "cluster.local")
		old, next := ca.identity("/ns/foo/sa/web"), other.identity("/ns/foo/sa/web")
		box := newBox(&View{Identities: []*trust.Identity{old}, Bundles: []*trust.Bundle{ca.bundle()}})
		a := startInBubble(t, Config{Attest: box.attest})
		open := func(name string) *sotw {
			stream, err := secretv3.NewSecretDiscoveryServiceClient(a.conn).StreamSecrets(t.Context())
			must(t, err)
			c := &sotw{t: t, stream: stream, names: []string{name}}
			c.send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: c.names, Node: &corev3.Node{Id: "proxy-1"}})
			c.next()
			c.ack()
			return c
		}
		leaf, roots := open("default"), open("ROOTCA")
		sent := func() string {
			synctest.Wait()
			return a.sent(NameDefault)[0]
		}
		first := sent()
		both := ca.bundle(other.root)
		box.set(View{Identities: []*trust.Identity{next}, Bundles: []*trust.Bundle{both}})
		time.Sleep(time.Second)
		want(t, "the SVID before the roots are acknowledged", sent(), first)
		roots.next()
		roots.ack()
		wantIdentity(t, leaf.next()["default"], next)
		leaf.ack()

		// Back, and the proxy does not take the roots: it keeps what works, and it is said.
		only := other.bundle()
		box.set(View{Identities: []*trust.Identity{next}, Bundles: []*trust.Bundle{only}})
		roots.next()
		roots.ack()
		synctest.Wait()
		second := sent()
		box.set(View{Identities: []*trust.Identity{old}, Bundles: []*trust.Bundle{both}})
		roots.next()
		roots.nackWith("no room")
		time.Sleep(20 * time.Minute)
		want(t, "the SVID while the roots are rejected", sent(), second)
		if n := strings.Count(a.log.String(), "a proxy does not acknowledge new roots"); n != 1 {
			t.Errorf("it is said %d times", n)
		}
		// Its end is near: what peers take counts now.
		time.Sleep(35 * time.Minute)
		wantIdentity(t, leaf.next()["default"], old)
		leaf.ack()

		// The root above what it has leaves the bundle: no reason to wait.
		fresh := other.identity("/ns/foo/sa/web")
		box.set(View{Identities: []*trust.Identity{fresh}, Bundles: []*trust.Bundle{other.bundle()}})
		wantIdentity(t, leaf.next()["default"], fresh)
	})
}
