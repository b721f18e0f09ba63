package naming

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// maxReasons bounds the reasons that are given for one identity; more are counted.
const maxReasons = 20

// Reasons say why an identity may serve a service.
type Reasons struct {
	ID      trust.ID
	Because []string  // each an object, and what of it, sorted
	More    int       // beyond maxReasons
	Until   time.Time // nothing names it any more, and it stays until then; else zero
}

// Explanation is all that is known of a service.
type Explanation struct {
	Service    string
	Standing   trust.NamingStanding
	Identities []Reasons
	Problems   []string // of objects that speak of it, at most maxProblems
}

// Why explains a service.
func (e *Engine) Why(service string) Explanation {
	_, standing := e.config.Naming.Lookup(service)
	out := Explanation{Service: service, Standing: standing}
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.services[service]
	if s == nil {
		return out
	}
	w := why{engine: e, byID: map[trust.ID]*Reasons{}}
	for _, src := range s.sources {
		if slices.Contains(src.targets, s) && src.live {
			w.source(src)
		}
		w.problems(src)
	}
	for _, l := range s.leaving {
		w.because(l.id, "nothing names it any more").Until = l.until
	}
	w.aliases()
	out.Problems = w.wrong
	if _, cut := s.identities(); cut {
		out.Problems = append([]string{fmt.Sprintf("there are more than %d identities; the rest may not serve it", maxListed)}, out.Problems...)
	}
	if standing != trust.NamingKnown {
		return out
	}
	for _, id := range s.list {
		if r := w.byID[id]; r != nil {
			slices.Sort(r.Because)
			out.Identities = append(out.Identities, *r)
		}
	}
	return out
}

// Saying returns the objects and rules that name identities of a trust domain in so many words, each with one of them, in order, at most as many as
// are wanted, and how many there are.
func (e *Engine) Saying(d trust.Domain, most int) (objects []string, ids []trust.ID, all int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	found := map[string]trust.ID{}
	for _, s := range e.services {
		for _, src := range s.sources {
			if i := slices.IndexFunc(src.words, func(id trust.ID) bool { return id.Domain() == d }); i >= 0 {
				found[src.title()] = src.words[i]
			}
		}
	}
	for _, title := range slices.Sorted(maps.Keys(found))[:min(most, len(found))] {
		objects, ids = append(objects, title), append(ids, found[title])
	}
	return objects, ids, len(found)
}

// why collects reasons.
type why struct {
	engine *Engine
	byID   map[trust.ID]*Reasons
	wrong  []string
}

func (w *why) because(id trust.ID, reason string) *Reasons {
	r := w.byID[id]
	if r == nil {
		r = &Reasons{ID: id}
		w.byID[id] = r
	}
	if len(r.Because) < maxReasons {
		r.Because = append(r.Because, reason)
	} else {
		r.More++
	}
	return r
}

// source says what an object names.
func (w *why) source(s *source) {
	if s.kind == kindRule {
		for _, id := range s.fixed {
			w.because(id, "naming."+s.name+" in the server's config")
		}
		return
	}
	for _, id := range s.fixed {
		w.because(id, s.title()+": by its own word")
	}
	selected := map[*class]bool{}
	for _, c := range s.classes {
		selected[c] = true
	}
	if len(selected) > 0 {
		w.members(s, selected, KindPod)
		w.members(s, selected, KindWorkload)
	}
	for _, r := range s.refs {
		if id, ok := r.names(); ok {
			w.because(id, s.title()+": an endpoint is pod "+s.space.name+"/"+r.pod.name)
		}
	}
}

// members says which pods a selector selects.
func (w *why) members(s *source, selected map[*class]bool, kind Kind) {
	all, _ := s.space.of(kind)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if p := all[name]; selected[p.class] && !p.class.id.IsZero() {
			w.because(p.class.id, s.title()+" selects "+string(kind)+" "+s.space.name+"/"+name+" ("+strings.Join(s.selector, ",")+")")
		}
	}
}

// problems says what is wrong with an object, and with WorkloadEntries that it selects.
func (w *why) problems(s *source) {
	wrong := make([]string, 0, len(s.problems))
	for _, p := range s.problems {
		wrong = append(wrong, s.title()+": "+p)
	}
	if s.space != nil {
		for _, name := range slices.Sorted(maps.Keys(s.space.workloads)) {
			if p := s.space.workloads[name]; p.problem != "" && slices.Contains(s.classes, p.class) {
				wrong = append(wrong, fmt.Sprintf("cluster %s: workloadentry %s/%s: %s", s.space.cluster.name, s.space.name, name, p.problem))
			}
		}
	}
	for _, p := range wrong {
		if len(w.wrong) < maxProblems && !slices.Contains(w.wrong, p) {
			w.wrong = append(w.wrong, p)
		}
	}
}

// title names an object: "cluster east: service shop/cart".
func (s *source) title() string {
	if s.space == nil {
		return "naming." + s.name
	}
	return fmt.Sprintf("cluster %s: %s %s/%s", s.space.cluster.name, s.kind, s.space.name, s.name)
}

// aliases gives the reasons of an identity to those that count as the same.
func (w *why) aliases() {
	for _, id := range slices.Collect(maps.Keys(w.byID)) {
		r := w.byID[id]
		for _, other := range w.engine.config.Aliases(id) {
			if other != id {
				w.because(other, "it counts as "+id.String()).Until = r.Until
			}
		}
	}
}
