package sds

import (
	"crypto/x509"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/sds/secret"
	"github.com/chancery-project/chancery/sds/view"
	"github.com/chancery-project/chancery/trust"
)

// Bounds of what one stream may ask for.
const (
	maxNames     = 1000
	maxNameLen   = 4096 // longer than a SPIFFE ID (2,048 bytes), room for two paths
	maxInflight  = 64   // responses without an answer that are remembered
	maxNodeID    = 256
	maxNACKBytes = 1024
)

// apis on the socket, as in metrics and StreamStatus.
const (
	APIStateOfTheWorld = "sds_sotw"
	APIDelta           = "sds_delta"
	APIX509SVID        = "workload_x509_svid"
	APIX509Bundles     = "workload_x509_bundles"
)

// subscription is one stream: what it asked for, what it was sent and what it confirmed.
type subscription struct {
	api   string
	peer  Peer
	since time.Time
	pump  *pump // nil for a single answer

	consumer *consumers.Stream // nil where no table is kept

	mu       sync.Mutex // guards what follows, so that Streams sees a stream between two of its steps, never within one
	node     string
	started  bool // a first request has come
	named    bool // a name has been asked for; from then on an empty list means none, not all
	wildcard bool
	names    map[string]*entry
	nonce    uint64
	inflight []flight
	nack     *NACK
	keep     map[string]bool  // identities that must not be sent now: the client keeps what it has
	retry    *time.Timer      // wakes the stream for them; nil for none
	retryAt  <-chan time.Time // likewise, of a stream of the Workload API
	told     string           // versions of validation contexts that were acknowledged when others were last told
}

// entry is one name of a subscription.
type entry struct {
	explicit bool             // asked for by name, not only through the wildcard
	held     bool             // its files, or its service, are held
	told     bool             // the stream has been told that the name is unknown
	sent     *secret.Resource // last sent; nil before that and once it has been removed
	current  uint64           // newest view generation in which sent was the content of the name
	acked    Confirmed

	rejected string              // the client's words about what it was sent last, if it did not take that
	own      *trust.Bundle       // of the trust domain, in that newest view
	trusts   *trust.Bundle       // likewise, of what was acknowledged; nil before
	chain    []*x509.Certificate // of the identity that was sent; nil if there is none, or if it was sent on an earlier stream
	since    time.Time           // when its identity was first kept back, for another one than before; zero if it is not
	warned   bool                // that it was
}

// flight is a response that awaits its ACK or NACK.
type flight struct {
	nonce string
	items []item
}

// item is one resource of a response and the view generation it was taken from.
type item struct {
	name, version string
	generation    uint64
	own           *trust.Bundle
}

// difference is what a stream should be told about a view.
type difference struct {
	settled bool               // some name holds something or never will; the others' turn has yet to come
	full    []*secret.Resource // all that the stream's names hold now
	changed []*secret.Resource // those of full that the stream does not have yet
	removed []string           // names that held something and hold nothing any more
	absent  []string           // names asked for that hold nothing, told for the first time
}

func (d *difference) empty() bool {
	return len(d.changed)+len(d.removed)+len(d.absent) == 0
}

func checkNames(names []string) error {
	for _, n := range names {
		if len(n) > maxNameLen {
			return status.Errorf(codes.InvalidArgument, "resource name %.80q... is %d bytes long; at most %d are allowed", n, len(n), maxNameLen)
		}
	}
	return nil
}

// replace takes over the names of a state-of-the-world request and reports whether they differ from before.
func (sub *subscription) replace(s *Server, names []string) (asked bool, err error) {
	if len(names) > maxNames {
		return false, status.Errorf(codes.InvalidArgument, "request has %d resource names; at most %d are allowed", len(names), maxNames)
	}
	if err := checkNames(names); err != nil {
		return false, err
	}
	sub.mu.Lock()
	defer sub.mu.Unlock()
	asked = !sub.started
	sub.started = true
	sub.named = sub.named || len(names) > 0
	wanted := make(map[string]bool, len(names))
	for _, name := range names {
		wanted[name] = true
	}
	wildcard := !sub.named || wanted["*"]
	delete(wanted, "*")
	asked = asked || wildcard != sub.wildcard
	sub.wildcard = wildcard
	for name, e := range sub.names {
		if e.explicit && !wanted[name] {
			sub.remove(s, name)
			asked = true
		}
	}
	sub.dropUnasked(s)
	for name := range wanted {
		if e := sub.add(s, name); !e.explicit {
			e.explicit, asked = true, true
		}
	}
	return asked, nil
}

// update takes over a delta request's changes. initial holds what the client kept from an earlier stream.
func (sub *subscription) update(s *Server, subscribe, unsubscribe []string, initial map[string]string) error {
	if err := checkNames(subscribe); err != nil {
		return err
	}
	sub.mu.Lock()
	defer sub.mu.Unlock()
	first := !sub.started
	sub.started = true
	if first && len(subscribe) == 0 { // xDS: a first request without names means all
		sub.wildcard = true
	}
	for _, name := range unsubscribe {
		if name == "*" {
			sub.wildcard = false
			sub.dropUnasked(s)
		} else if sub.names[name] != nil {
			sub.remove(s, name)
		}
	}
	for _, name := range subscribe {
		if name == "*" {
			sub.wildcard = true
			continue
		}
		e := sub.add(s, name)
		e.explicit, e.told = true, false
		if e.sent != nil { // subscribed to again: sent again, for the client may have forgotten it
			e.sent = &secret.Resource{Name: name, Packed: e.sent.Packed}
		}
		if len(sub.names) > maxNames {
			return status.Errorf(codes.InvalidArgument, "stream subscribes to more than %d resource names", maxNames)
		}
	}
	if !first {
		return nil
	}
	for name, version := range initial {
		if e := sub.names[name]; e != nil {
			e.sent, e.acked.Version = &secret.Resource{Name: name, Version: version}, version
		} else if sub.wildcard && len(sub.names) < maxNames && len(name) <= maxNameLen {
			sub.add(s, name).sent = &secret.Resource{Name: name, Version: version}
		}
	}
	return nil
}

// add returns the entry of a name, new if need be. The caller holds mu.
func (sub *subscription) add(s *Server, name string) *entry {
	e := sub.names[name]
	if e == nil {
		e = new(entry)
		sub.names[name] = e
		e.held = s.holds.Hold(name)
	}
	return e
}

func (sub *subscription) isWorkload() bool {
	return sub.api == APIX509SVID || sub.api == APIX509Bundles
}

// forget gives up all names.
func (sub *subscription) forget(s *Server) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	for name := range sub.names {
		sub.remove(s, name)
	}
}

func (sub *subscription) nodeID() string {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	return sub.node
}

// dropUnasked forgets the names that only a wildcard brought, once there is none. The caller holds mu.
func (sub *subscription) dropUnasked(s *Server) {
	for name, e := range sub.names {
		if !sub.wildcard && !e.explicit {
			sub.remove(s, name)
		}
	}
}

// remove forgets a name. The caller holds mu.
func (sub *subscription) remove(s *Server, name string) {
	if sub.names[name].held {
		s.holds.Drop(name)
	}
	delete(sub.names, name)
}

// compare brings a subscription's names in line with a view and returns what differs. What it returns counts as sent.
func (s *Server) compare(sub *subscription, v *View) difference {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.wildcard {
		for _, name := range []string{NameDefault, NameRoots} {
			sub.add(s, name)
		}
		for _, id := range v.Identities {
			sub.add(s, id.ID.String())
		}
	}
	var d difference
	for _, name := range slices.Sorted(maps.Keys(sub.names)) {
		e := sub.names[name]
		a := v.Answer(s.files, name)
		if sub.keep[name] {
			a.Standing = view.Pending
		}
		r := s.currentOf(sub.api, e, name, a)
		d.settled = d.settled || a.Standing != view.Pending
		switch {
		case r != nil:
			d.full = append(d.full, r)
			if e.sent == nil || e.sent.Version != r.Version {
				d.changed = append(d.changed, r)
			}
			e.sent, e.told = r, false
			if r.Version == a.Version {
				e.current, e.own = v.Generation, v.Own()
				if a.Identity != nil && r.Packed != nil {
					e.chain = a.Identity.Chain
				}
			}
			if r.Version == a.Version && e.acked.Version == r.Version {
				e.acked.Generation, e.trusts = v.Generation, v.Own()
			}
		case a.Standing != view.Unknown:
		case e.sent != nil:
			e.sent, e.acked, e.told = nil, Confirmed{}, true
			d.removed = append(d.removed, name)
		case e.explicit && !e.told:
			e.told = true
			d.absent = append(d.absent, name)
		}
		if !e.explicit && e.sent == nil { // an identity that is gone from the wildcard
			sub.remove(s, name)
		}
	}
	return d
}

// currentOf returns what a name should hold now; nil means nothing.
func (s *Server) currentOf(api string, e *entry, name string, a view.Answer) *secret.Resource {
	var has *secret.Resource // sent on this stream, not remembered by its client from an earlier one
	if e.sent != nil && e.sent.Packed != nil {
		has = e.sent
	}
	switch {
	case a.Standing == view.Pending:
		return has
	case a.Standing == view.Unknown:
		// Only what this stream was sent is taken back so: an agent that has just started may not know every bundle
		// yet that its clients remember.
		if has == nil || !view.KindOf(name).Validates() || has.Version == view.NobodyVersion && api == APIDelta {
			return nil
		}
		a = view.NobodyAnswer
	}
	if has != nil && has.Version == a.Version {
		return has
	}
	r, err := s.cache.Get(name, a.Version, a.Build)
	if err != nil {
		s.cfg.Logger.Error("secret not served; the proxy keeps what it has", "resource", name, "reason", err.Error())
		return has
	}
	return r
}

// launch gives a response its nonce and remembers what was in it.
func (sub *subscription) launch(sent []*secret.Resource, v *View) (nonce string) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	sub.nonce++
	f := flight{nonce: strconv.FormatUint(sub.nonce, 16), items: make([]item, 0, len(sent))}
	for _, r := range sent {
		f.items = append(f.items, item{r.Name, r.Version, v.Generation, v.Own()})
	}
	if sub.inflight = append(sub.inflight, f); len(sub.inflight) > maxInflight {
		sub.inflight = slices.Delete(sub.inflight, 0, 1)
	}
	return f.nonce
}

// settle takes the answer to the response with this nonce: an ACK, or a NACK with the client's message. It returns
// what was in the response (nil if that has been answered before), and false if the answer is stale. State of the
// world: it is stale unless it is to the last response. Delta: it counts for its own response, whatever was sent since.
func (sub *subscription) settle(nonce string, message *string) ([]item, bool) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.api == APIStateOfTheWorld && nonce != strconv.FormatUint(sub.nonce, 16) {
		return nil, false
	}
	i := slices.IndexFunc(sub.inflight, func(f flight) bool { return f.nonce == nonce })
	if i < 0 { // a request with new names goes under the nonce of the last response
		return nil, true
	}
	items := sub.inflight[i].items
	sub.inflight = slices.Delete(sub.inflight, 0, i+1)
	if message != nil {
		sub.nack = &NACK{Time: time.Now(), Message: *message}
		for _, it := range items {
			sub.nack.Names = append(sub.nack.Names, it.name)
			if e := sub.names[it.name]; e != nil && e.acked.Version != it.version {
				e.rejected = *message
			}
		}
		return items, true
	}
	for _, it := range items {
		e := sub.names[it.name]
		if e == nil || e.sent == nil { // unsubscribed or removed since
			continue
		}
		e.acked, e.trusts, e.rejected = Confirmed{it.version, it.generation}, it.own, ""
		if e.sent.Version == it.version {
			e.acked.Generation, e.trusts = e.current, e.own
		}
	}
	return items, true
}

// clip bounds a text from a client and drops what is not UTF-8.
func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "")
}
