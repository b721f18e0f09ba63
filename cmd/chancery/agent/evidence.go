package agent

import (
	"bytes"
	"crypto/x509"
	"errors"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/rotate"
	"github.com/chancery-project/chancery/trust"
)

const (
	// unfitSpread is within which time another SVID is asked for, where new roots do not vouch for the one in use: a whole fleet
	// may be told at once.
	unfitSpread = 5 * time.Second
	// unfitTime is how long such roots wait for another SVID.
	unfitTime = time.Minute
	// againSpread and maxAgain bound within which time an SVID is replaced that has replaced one of the same issuer just so.
	againSpread = 10 * time.Second
	maxAgain    = 10 * time.Minute
)

// apply takes over roots and CRLs. Roots that do not vouch for the SVID in use come with the next one, which is asked for at once;
// if there is none within a minute, they count nevertheless, where the authority itself has signed them: whoever has them takes
// our SVID no more, and a root that may be in the wrong hands must not stay (decision D6 over invariant 7).
func (k *Keeper) apply(b *trust.Bundle) error {
	err := k.Adopt(b)
	_, unfit := errors.AsType[*rotate.Unfit](err)
	id, _ := k.Current()
	k.mu.Lock()
	defer k.mu.Unlock()
	if !unfit || id == nil {
		k.since = time.Time{}
		return err
	}
	if k.since.IsZero() || k.unfit != b.Generation() {
		k.unfit, k.since = b.Generation(), time.Now()
	}
	k.urge(id.Leaf(), unfitSpread)
	if time.Since(k.since) < unfitTime || !k.pinned() {
		return err
	}
	k.logger.Error("roots that do not vouch for the SVID in use are served with it: the bundle key has signed them, and there is no other SVID",
		"spiffe_id", id.ID.String(), "generation", b.Generation(), "reason", err.Error())
	return k.Enforce(b)
}

// urge has an SVID replaced before its time, once. If what it was replaced by is of the same issuer and is to be replaced again, the
// server that signs does not know what the one knows that asks: then there is ever more time, lest a fleet asks round and round. mu is held.
func (k *Keeper) urge(leaf *x509.Certificate, within time.Duration) {
	if k.urged == leaf {
		return
	}
	if k.urged != nil && bytes.Equal(k.urged.AuthorityKeyId, leaf.AuthorityKeyId) {
		k.calm = min(max(2*k.calm, againSpread), maxAgain)
	} else {
		k.calm = 0
	}
	k.urged = leaf
	k.Renew(max(within, k.calm))
}

// reissue replaces the SVID within a time if one of these issuers has signed it.
func (k *Keeper) reissue(issuers [][]byte, within time.Duration) {
	id, _ := k.Current()
	if id == nil || !slices.ContainsFunc(issuers, func(i []byte) bool { return bytes.Equal(i, id.Leaf().AuthorityKeyId) }) {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.urged != id.Leaf() {
		k.logger.Info("the server wants the SVID replaced before its time", "spiffe_id", id.ID.String(), "issuer", id.Leaf().AuthorityKeyId, "within", within.String())
	}
	k.urge(id.Leaf(), within)
}

// evidence is what the server is told of the agent's consumers, and of the agent itself (decision D1).
func (k *Keeper) evidence() (*chanceryv1.ConsumersState, <-chan struct{}) {
	changed := k.table.Changed() // before the look, so that nothing falls between
	id, _ := k.Current()
	var own uint64
	if id != nil {
		own = id.Bundle.Generation()
	}
	known := k.table.State(own)
	s := &chanceryv1.ConsumersState{Agent: known.Agent[:], Generation: own, Consumers: uint32(known.Consumers)}
	if known.Consumers > 0 {
		s.Generation = min(own, known.Generation)
	}
	until := known.Until
	for _, h := range known.Held {
		s.Held = append(s.Held, &chanceryv1.HeldIssuer{Issuer: h.Issuer, Until: timestamppb.New(h.Until), Consumers: uint32(h.Consumers)})
	}
	if id != nil && time.Now().Before(id.NotAfter()) {
		s.Held = holdOwn(s.Held, id.Leaf())
		if id.NotAfter().After(until) {
			until = id.NotAfter()
		}
	}
	if !until.IsZero() {
		s.Until = timestamppb.New(until)
	}
	for _, l := range known.Lagging {
		s.Lagging = append(s.Lagging, &chanceryv1.LaggingConsumer{Name: l.Name, Generation: l.Generation, Why: l.Why})
	}
	return s, changed
}

// holdOwn adds the issuer of the agent's own SVID.
func holdOwn(held []*chanceryv1.HeldIssuer, leaf *x509.Certificate) []*chanceryv1.HeldIssuer {
	at := slices.IndexFunc(held, func(h *chanceryv1.HeldIssuer) bool { return bytes.Equal(h.GetIssuer(), leaf.AuthorityKeyId) })
	if at < 0 {
		held = append(held, &chanceryv1.HeldIssuer{Issuer: leaf.AuthorityKeyId, Until: timestamppb.New(leaf.NotAfter)})
		return held[max(0, len(held)-maxHeld):]
	}
	if leaf.NotAfter.After(held[at].GetUntil().AsTime()) {
		held[at].Until = timestamppb.New(leaf.NotAfter)
	}
	return held
}

// maxHeld is the bound of ConsumersState.held.
const maxHeld = 32

// Evidence are collectors of what is known of the keepers' consumers.
func Evidence(keepers func() []*Keeper) []prometheus.Collector {
	gauge := func(name, help string, read func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, read)
	}
	states := func() (consumers, lowest, newest uint64) {
		for i, k := range keepers() {
			var own uint64
			if id, _ := k.Current(); id != nil {
				own = id.Bundle.Generation()
			}
			acknowledged := own
			if k.table != nil {
				s := k.table.State(own)
				if consumers += uint64(s.Consumers); s.Consumers > 0 {
					acknowledged = min(own, s.Generation)
				}
			}
			newest = max(newest, own)
			if i == 0 || acknowledged < lowest {
				lowest = acknowledged
			}
		}
		return consumers, lowest, newest
	}
	return []prometheus.Collector{
		gauge("chancery_agent_consumers", "Processes that were handed an SVID that has not ended, connected or not.", func() float64 {
			n, _, _ := states()
			return float64(n)
		}),
		gauge("chancery_agent_bundle_generation", "Generation of the trust domain's bundle that is served; 0 before the first came by Sync.", func() float64 {
			_, _, n := states()
			return float64(n)
		}),
		gauge("chancery_agent_acknowledged_generation", "Lowest generation of the bundle that the agent and each of its consumers have acknowledged; 0 if that is not known of one.", func() float64 {
			_, n, _ := states()
			return float64(n)
		}),
	}
}
