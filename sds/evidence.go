package sds

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/sds/secret"
	"github.com/chancery-project/chancery/sds/view"
	"github.com/chancery-project/chancery/trust"
)

// This file is about what is known of those who are served (decision D1), and about the order in which they are served (D5).

const (
	// retryAfter is how soon a stream tries again to get an SVID that it was not given.
	retryAfter = time.Second
	// patience is how long a proxy may take to acknowledge new roots before it is said that its new SVID waits for them.
	patience = 5 * time.Second
)

// join notes a stream in its caller's table; nil where none is kept.
func (s *Server) join(p Peer, api string) *consumers.Stream {
	if s.cfg.Consumers == nil {
		return nil
	}
	table := s.cfg.Consumers(p)
	if table == nil {
		return nil
	}
	return table.Join(consumers.ProcessOf(p), api)
}

func (s *Server) leave(sub *subscription) {
	sub.unsettled(0)
	if sub.consumer != nil {
		sub.consumer.Leave()
	}
}

// enter and exit keep the streams of each process. mu is held.
func (s *Server) enter(sub *subscription) {
	p := consumers.ProcessOf(sub.peer)
	if s.processes[p] == nil {
		s.processes[p] = map[*subscription]struct{}{}
	}
	s.processes[p][sub] = struct{}{}
}

func (s *Server) exit(sub *subscription) {
	p := consumers.ProcessOf(sub.peer)
	if delete(s.processes[p], sub); len(s.processes[p]) == 0 {
		delete(s.processes, p)
	}
}

// siblings returns the SDS streams of a stream's process, itself included.
func (s *Server) siblings(sub *subscription) []*subscription {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*subscription
	for o := range s.processes[consumers.ProcessOf(sub.peer)] {
		out = append(out, o)
	}
	return out
}

// due is an identity that a stream has a name for.
type due struct {
	name, version string
	id            *trust.Identity
	has           string              // version that the client has; empty for none
	chain         []*x509.Certificate // of that, where it is known
}

// dues returns the identities that a stream should have.
func (sub *subscription) dues(s *Server, v *View) []due {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	var out []due
	add := func(name string) {
		a := v.Answer(s.files, name)
		if a.Identity == nil {
			return
		}
		d := due{name: name, version: a.Version, id: a.Identity}
		if e := sub.names[name]; e != nil && e.sent != nil {
			d.has, d.chain = e.sent.Version, e.chain
		}
		out = append(out, d)
	}
	for name := range sub.names {
		add(name)
	}
	if sub.wildcard {
		names := []string{NameDefault}
		for _, id := range v.Identities {
			names = append(names, id.ID.String())
		}
		for _, name := range names {
			if sub.names[name] == nil {
				add(name)
			}
		}
	}
	return out
}

// prepare sees to what must come before a stream is sent identities: the roots that they need are acknowledged (D5), and the table
// of consumers has them (D1). Those that have to wait are kept back, and the stream is woken for them.
func (s *Server) prepare(sub *subscription, v *View) {
	keep, again := map[string]bool{}, time.Duration(0)
	var entries []consumers.SVID
	var fresh []string // names that get something new
	for _, d := range sub.dues(s, v) {
		if d.has != "" && d.has != d.version && s.waits(sub, v, d) {
			keep[d.name], again = true, retryAfter
			continue
		}
		if d.has != d.version {
			fresh = append(fresh, d.name)
		}
		entries = append(entries, svidOf(d.name, d.version, d.id))
	}
	if sub.consumer != nil && len(entries) > 0 {
		if err := sub.consumer.Hand(context.Background(), entries); err != nil {
			again = retryAfter
			for _, name := range fresh {
				keep[name] = true
				s.cfg.Metrics.kept.WithLabelValues("disk").Inc()
			}
			s.cfg.Logger.Debug("SVID not served; the proxy keeps what it has", "node", sub.nodeID(), "uid", sub.peer.UID, "reason", err.Error())
		}
	}
	sub.mu.Lock()
	sub.keep = keep
	sub.mu.Unlock()
	sub.unsettled(again)
}

// unsettled has a stream woken after a while; 0: not any more.
func (sub *subscription) unsettled(after time.Duration) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.retry != nil {
		sub.retry.Stop()
		sub.retry = nil
	}
	if after > 0 && sub.pump != nil {
		sub.retry = time.AfterFunc(after, sub.pump.wake)
	}
}

func svidOf(name, version string, id *trust.Identity) consumers.SVID {
	return consumers.SVID{Name: name, Version: version, Issuer: id.Leaf().AuthorityKeyId, Serial: id.Serial(), NotAfter: id.NotAfter()}
}

// waits reports whether a new SVID waits until its proxy has acknowledged the root above it. It does while what the proxy has works:
// a working identity is not replaced by one that the proxy's own roots do not vouch for (invariant 7). Once that one is about to
// end, or its root has left the bundle, or it was revoked, the new one is sent in any case: it is all that peers take.
func (s *Server) waits(sub *subscription, v *View, d due) bool {
	root, now := d.id.Chain[len(d.id.Chain)-1].AuthorityKeyId, time.Now()
	lacks := false
	if view.HasRoot(v.Own(), root) {
		for _, o := range s.siblings(sub) {
			lacks = lacks || o.lacks(v, root)
		}
	}
	sub.mu.Lock()
	defer sub.mu.Unlock()
	e := sub.names[d.name]
	if e == nil {
		return false
	}
	if !lacks {
		e.since, e.warned = time.Time{}, false
		return false
	}
	if e.since.IsZero() {
		e.since = now
		s.cfg.Metrics.kept.WithLabelValues("order").Inc()
	}
	waited := now.Sub(e.since)
	works := waited < patience // of what was sent before the agent was started nothing is known
	if d.chain != nil {
		works = view.StillWorks(d.chain, v.Own(), now)
	}
	args := []any{"node", sub.node, "uid", sub.peer.UID, "resource", clip(d.name, maxNodeID), "root", fmt.Sprintf("%x", root)}
	switch {
	case !works:
		s.cfg.Logger.Warn("a proxy gets its new SVID though it has not acknowledged the roots that vouch for it: what it has works no more", args...)
		e.since, e.warned = time.Time{}, false
	case waited >= patience && !e.warned:
		e.warned = true
		s.cfg.Logger.Warn("a proxy does not acknowledge new roots; it keeps the SVID that it has as long as that works", args...)
	}
	return works
}

// lacks reports whether a stream has a validation context of the trust domain that was acknowledged without a root.
func (sub *subscription) lacks(v *View, root []byte) bool {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	for name, e := range sub.names {
		if v.TrustsOwn(name) && e.sent != nil && e.acked.Version != "" && !view.HasRoot(e.trusts, root) {
			return true
		}
	}
	return false
}

// observe tells the table of consumers what is known of a stream, and wakes the streams of the same process for which that makes a
// difference.
func (s *Server) observe(sub *subscription, v *View) {
	o := consumers.Observed{SVIDs: map[string]string{}, Contexts: map[string]uint64{}, Rejected: map[string]string{}}
	var acked []string
	sub.mu.Lock()
	o.Node = sub.node
	for name, e := range sub.names {
		k := view.KindOf(name)
		narrowed := v.Narrowed(name) // what was acknowledged of it before stands, and is behind
		svid, context := k == view.KindDefault || k == view.KindIdentity, v.TrustsOwn(name) || narrowed
		switch {
		case !svid && !context:
			continue
		case e.rejected != "":
			o.Rejected[name] = e.rejected
		case e.sent != nil && e.acked.Version == e.sent.Version:
			o.Taken = append(o.Taken, name)
		}
		switch {
		case svid && e.sent != nil:
			o.SVIDs[name] = e.acked.Version
		case context:
			o.Contexts[name] = 0
			if e.trusts != nil && !narrowed {
				o.Contexts[name] = e.trusts.Generation()
			}
			acked = append(acked, name+" "+e.acked.Version)
		}
	}
	slices.Sort(acked)
	trusts := strings.Join(acked, "\n")
	news := trusts != sub.told
	sub.told = trusts
	sub.mu.Unlock()
	if sub.consumer != nil {
		sub.consumer.See(o)
	}
	if !news {
		return
	}
	for _, o := range s.siblings(sub) {
		if o != sub && o.isKept() {
			go o.pump.wake()
		}
	}
}

func (sub *subscription) isKept() bool {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	return len(sub.keep) > 0
}

// entered reports whether the table of consumers has all SVIDs of a view, which a stream of the Workload API is about to be sent.
// If not, the stream tries again soon.
func (s *Server) entered(sub *subscription, v *View) bool {
	sub.mu.Lock()
	sub.retryAt = nil
	sub.mu.Unlock()
	if sub.consumer == nil {
		return true
	}
	var all []consumers.SVID
	for _, id := range v.Identities {
		all = append(all, svidOf(view.WorkloadName(id), view.WorkloadVersion(id), id))
	}
	err := sub.consumer.Hand(context.Background(), all)
	if err == nil {
		return true
	}
	s.cfg.Metrics.kept.WithLabelValues("disk").Inc()
	s.cfg.Logger.Debug("SVID not served; the workload keeps what it has", "uid", sub.peer.UID, "reason", err.Error())
	sub.mu.Lock()
	sub.retryAt = time.After(retryAfter)
	sub.mu.Unlock()
	return false
}

// again is when a stream of the Workload API tries again; nil: it has nothing to try.
func (sub *subscription) again() <-chan time.Time {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	return sub.retryAt
}

// delivered notes what a stream of the Workload API holds. Its clients do not acknowledge: what was delivered counts.
func (s *Server) delivered(sub *subscription, version string, v *View) {
	sub.mu.Lock()
	e := sub.names[sub.api]
	if e == nil || e.sent.Version != version {
		e = &entry{sent: &secret.Resource{Name: sub.api, Version: version}}
		sub.names[sub.api] = e
	}
	e.current = v.Generation
	sub.mu.Unlock()
	if sub.consumer == nil {
		return
	}
	o := consumers.Observed{Contexts: map[string]uint64{sub.api: 0}, SVIDs: map[string]string{}}
	if v.Own() != nil {
		o.Contexts[sub.api] = v.Own().Generation()
	}
	if sub.api == APIX509SVID {
		for _, id := range v.Identities {
			o.SVIDs[view.WorkloadName(id)] = view.WorkloadVersion(id)
		}
	}
	sub.consumer.See(o)
}
