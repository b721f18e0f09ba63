package naming

import (
	"slices"

	"github.com/chancery-project/chancery/trust"
)

const kindRule Kind = "rule"

// maxProblems bounds what is said to be wrong with one object.
const maxProblems = 20

// source is an object that names identities of services: a Service, an EndpointSlice, a ServiceEntry, or a rule.
type source struct {
	kind     Kind
	space    *space // nil: a rule
	name     string
	live     bool       // it counts; a slice does not while its Service is not there, or is an ExternalName
	targets  []*named   // services that it speaks of,
	refused  []*named   // and those that it has no right to speak of (decision D25)
	fixed    []trust.ID // that it names by itself,
	words    []trust.ID // and those of them whose trust domain, too, it says itself
	selector []label
	anchor   label    // the label of the selector under which it is found
	classes  []*class // that the selector selects
	refs     []ref    // of a slice
	tallies  tallies  // identity -> how often this object names it
	problems []string
	object   Object // as it came; of a slice its service only
	broken   bool   // a later version of it could not be read
	epoch    uint32
}

// ref is an endpoint's pod.
type ref struct {
	pod *pod
	uid UID
}

// is reports whether an endpoint names what a reference says.
func (r ref) is(o PodRef) bool { return r.pod.name == o.Name && r.uid == o.UID && o.Namespace == "" }

// appear makes services hear of a new source. Its selector and endpoints come after it.
func (s *source) appear() {
	for _, t := range s.targets {
		t.sources = append(t.sources, s)
	}
	for _, t := range s.refused {
		t.sources = append(t.sources, s)
	}
	if s.live {
		s.define(1)
	}
	for _, id := range s.fixed {
		s.count(id, 1)
	}
}

// vanish is the end of a source, whose selector and endpoints went before.
func (s *source) vanish() {
	for _, id := range s.fixed {
		s.count(id, -1)
	}
	if s.live {
		s.define(-1)
	}
	for _, t := range append(slices.Clone(s.targets), s.refused...) {
		t.sources = slices.DeleteFunc(t.sources, func(o *source) bool { return o == s })
		t.engine.touch(t)
	}
}

// define tells the targets that there is such a service. An EndpointSlice says nothing of that.
func (s *source) define(by int) {
	if s.kind == KindSlice {
		return
	}
	for _, t := range s.targets {
		t.define(by)
	}
}

// count notes that the object names an identity once more, or less.
func (s *source) count(id trust.ID, by int32) {
	was, is := s.tallies.add(id, by, false)
	if !s.live || (was == 0) == (is == 0) {
		return
	}
	for _, t := range s.targets {
		t.count(id, by/abs(by))
	}
}

func abs(n int32) int32 {
	if n < 0 {
		return -n
	}
	return n
}

// setLive makes a slice count, or count no more.
func (s *source) setLive(live bool) {
	if s.live == live {
		return
	}
	s.live = live
	by := int32(-1)
	if live {
		by = 1
	}
	for _, t := range s.tallies {
		for _, target := range s.targets {
			target.count(t.id, by)
		}
	}
}

// follow counts an endpoint's pod in or out.
func (s *source) follow(r ref, by int32) {
	if id, ok := r.names(); ok {
		s.count(id, by)
	}
}

// names returns the identity that an endpoint names: that of its pod, if it is still that pod.
func (r ref) names() (trust.ID, bool) {
	if r.pod.class == nil || r.uid != 0 && r.uid != r.pod.uid {
		return trust.ID{}, false
	}
	return r.pod.class.id, !r.pod.class.id.IsZero()
}

// selects finds the pods that a selector selects, and is found by those to come.
func (s *source) selects() {
	if len(s.selector) == 0 {
		return
	}
	sp := s.space
	s.anchor = s.selector[0]
	for _, l := range s.selector[1:] { // the one that fewest others are found by
		if len(sp.selectors[l]) < len(sp.selectors[s.anchor]) {
			s.anchor = l
		}
	}
	sp.selectors[s.anchor] = append(sp.selectors[s.anchor], s)
	rarest := sp.byLabel[s.selector[0]]
	for _, l := range s.selector[1:] {
		if few := sp.byLabel[l]; len(few) < len(rarest) {
			rarest = few
		}
	}
	for _, c := range rarest {
		if covers(c.labels, s.selector) {
			c.join(s)
		}
	}
}

// forget is the end of a selector.
func (s *source) forget() {
	if len(s.selector) == 0 {
		return
	}
	sp := s.space
	without(sp.selectors, s.anchor, s)
	for _, c := range s.classes {
		c.sources = slices.DeleteFunc(c.sources, func(o *source) bool { return o == s })
		if !c.id.IsZero() {
			s.count(c.id, -1)
		}
	}
	s.classes = nil
}
