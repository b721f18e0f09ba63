package naming

import (
	"slices"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// named is a service as all clusters, and rules, have it.
type named struct {
	engine  *Engine
	name    string
	defs    int     // objects that say that it is a service
	tallies tallies // identity -> objects that name it
	leaving []leaver
	sources []*source // objects that speak of it, also those that have no right to: for Why
	dirty   bool

	listed bool // is in the index,
	list   []trust.ID
}

// leaver is an identity that nothing names any more, in its grace.
type leaver struct {
	id    trust.ID
	until time.Time
}

func (s *named) known() bool { return s.defs > 0 || len(s.leaving) > 0 }

func (s *named) empty() bool {
	return s.defs == 0 && len(s.tallies) == 0 && len(s.leaving) == 0 && len(s.sources) == 0
}

// count notes that one more object, or one less, names an identity.
func (s *named) count(id trust.ID, by int32) {
	if was, is := s.tallies.add(id, by, true); (was == 0) != (is == 0) {
		s.engine.touch(s)
	}
}

// define notes that one more object, or one less, says that there is this service.
func (s *named) define(by int) {
	s.defs += by
	s.engine.touch(s)
}

// identities returns who may serve it, aliases included, in order, and whether some were too many.
func (s *named) identities() (ids []trust.ID, cut bool) {
	for _, t := range s.tallies {
		if t.n > 0 {
			ids = append(ids, s.engine.config.Aliases(t.id)...)
		}
	}
	for _, l := range s.leaving {
		ids = append(ids, s.engine.config.Aliases(l.id)...)
	}
	slices.SortFunc(ids, trust.CompareIDs)
	ids = slices.Compact(ids)
	if len(ids) > maxListed {
		return slices.Clone(ids[:maxListed]), true
	}
	return slices.Clip(ids), false
}

// publish makes the list anew and says whether it differs from that in the index.
func (s *named) publish() (c trust.NamingChange, differs bool) {
	if !s.known() {
		differs = s.listed
		s.listed, s.list = false, nil
		return trust.NamingChange{Service: s.name, Gone: true}, differs
	}
	ids, _ := s.identities()
	if s.listed && slices.Equal(ids, s.list) {
		return c, false
	}
	s.listed, s.list = true, ids
	return trust.NamingChange{Service: s.name, IDs: ids}, true
}

// tally is how often something names an identity.
type tally struct {
	id   trust.ID
	n    int32
	held bool // it was in the list, so it has a grace
}

// tallies are few for each service: the accounts that run it.
type tallies []tally

func (ts tallies) of(id trust.ID) int32 {
	for i := range ts {
		if ts[i].id == id {
			return ts[i].n
		}
	}
	return 0
}

// add counts. What comes down to zero is dropped, unless it is kept, until it has been looked at.
func (ts *tallies) add(id trust.ID, by int32, keep bool) (was, is int32) {
	for i := range *ts {
		if t := &(*ts)[i]; t.id == id {
			was, is = t.n, t.n+by
			if t.n = is; is == 0 && !keep {
				*ts = slices.Delete(*ts, i, i+1)
			}
			return was, is
		}
	}
	*ts = append(*ts, tally{id: id, n: by})
	return 0, by
}
