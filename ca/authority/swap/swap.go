// Package swap owns what a change of plugged-in files is (decision D7): which of the steps by which a root is replaced, and whether it is
// time for it.
//
// It refuses what would cut off those who do not know the new roots yet: roots and issuing key changed at once, a root that is
// left out while it is needed. It changes nothing: the document follows by a rotation, whose driver asks here.
package swap

import (
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/parent"
	"github.com/chancery-project/chancery/trust"
)

// Steps are those by which a plugged-in root is replaced.
const Steps = "(1) add the new root to the root file beside the old one, with the same issuing key; (2) when `chancery rotate status` says that everybody has it, " +
	"change issuing certificate and key; (3) when it says that no certificate of the old one is left, take the old root out of the root file"

// Kind is what files ask for.
type Kind string

// What files ask for, of the document that there is.
const (
	None   Kind = ""       // nothing, or another issuer under the same root
	Add    Kind = "add"    // a root was added: a rotation to it begins
	Next   Kind = "next"   // the issuer is under the root that a rotation leads to
	Remove Kind = "remove" // the root that a rotation replaces was left out
	Back   Kind = "back"   // the root that a rotation leads to was taken back, before anything was signed under it
)

// Step is what files ask for, and the root that it is about. Hint says what the files should have instead, where they can be used
// nevertheless; it may be empty.
type Step struct {
	Kind Kind
	Root *x509.Certificate
	Hint string
}

// History is what a process saw of its files: when which root came last, and went, while it ran.
type History struct {
	came, went map[string]time.Time // by ID
}

// After returns what was seen once one set has followed another; nil: there was none.
func (h History) After(before, after *files.Set, now time.Time) History {
	next := History{map[string]time.Time{}, map[string]time.Time{}}
	maps.Copy(next.came, h.came)
	maps.Copy(next.went, h.went)
	if before == nil {
		return next
	}
	for _, r := range after.Roots {
		if !slices.ContainsFunc(before.Roots, r.Equal) {
			next.came[ID(r)] = now
			delete(next.went, ID(r))
		}
	}
	for _, r := range before.Roots {
		if !slices.ContainsFunc(after.Roots, r.Equal) {
			next.went[ID(r)] = now
			delete(next.came, ID(r))
		}
	}
	return next
}

// ID is that of a certificate in the document.
func ID(c *x509.Certificate) string { return hex.EncodeToString(c.SubjectKeyId) }

// RootID returns the ID of the root that a set's issuer is under.
func RootID(set *files.Set) string {
	if slices.ContainsFunc(set.Roots, set.Chain[0].Equal) {
		return ID(set.Chain[0]) // a root that issues itself
	}
	return document.RootOf(set.Chain)
}

// judge is one set held against one document.
type judge struct {
	state          *document.DomainState
	r              *document.Rotation // that follows files; nil: none does
	set            *files.Set
	seen           History
	dir            string
	added, missing []*x509.Certificate
}

// Judge says what a set of files asks for, of the document that there is; seen is the history up to the set. An error says why it
// must not be used, and what to do.
func Judge(doc *document.Document, td trust.Domain, set *files.Set, seen History, dir string, now time.Time) (Step, error) {
	have, err := doc.Bundle(td)
	if err != nil {
		return Step{}, err
	}
	j := &judge{state: doc.Domains[td.String()], set: set, seen: seen, dir: dir}
	if j.r = j.state.Rotation; j.r != nil && j.r.Reason != document.ReasonFiles {
		j.r = nil
	}
	for _, r := range set.Roots {
		if !slices.ContainsFunc(have.Roots(), r.Equal) {
			j.added = append(j.added, r)
		}
	}
	for _, r := range have.Roots() {
		if !slices.ContainsFunc(set.Roots, r.Equal) {
			j.missing = append(j.missing, r)
		}
	}
	hints := j.dropOver()
	step := Step{}
	switch {
	case len(j.added) > 0:
		step, err = j.add(have, now)
	case len(j.missing) > 0:
		step, err = j.remove()
	default:
		step, err = j.same()
	}
	if step.Hint == "" {
		step.Hint = hints
	}
	return step, err
}

// dropOver takes those roots for not there that a rotation has taken out of the bundle: files that keep them for a while do no harm, and
// must not bring them back.
func (j *judge) dropOver() (hint string) {
	j.added = slices.DeleteFunc(j.added, func(r *x509.Certificate) bool {
		over := j.over(ID(r))
		if over != "" {
			hint = fmt.Sprintf("root %s in %s %s: take it out of the root file", ID(r), j.dir, over)
		}
		return over != ""
	})
	return hint
}

// over says why a root in the files is not trusted, and will not be. One that was taken back, or whose rotation was aborted, may be added
// anew once it was out of the files.
func (j *judge) over(id string) string {
	if j.r != nil && j.r.Phase == document.PhaseRetire && id == j.r.FromRoot {
		return "has left the bundle"
	}
	for _, p := range j.state.Past {
		switch {
		case p.Kind != document.KindRoot:
		case p.Outcome != "aborted" && p.FromRoot == id:
			return fmt.Sprintf("has left the bundle with rotation %s", p.ID)
		case p.Outcome == "aborted" && p.ToRoot == id && !j.seen.came[id].After(p.Ended):
			return fmt.Sprintf("is that of rotation %s, which was aborted", p.ID)
		case p.FromRoot == id || p.ToRoot == id:
			return ""
		}
	}
	return ""
}

// add is for files with a root that is not in the bundle.
func (j *judge) add(have *trust.Bundle, now time.Time) (Step, error) {
	root := j.added[0]
	switch {
	case j.state.Rotation != nil:
		return Step{}, fmt.Errorf("the root file in %s brings root %s, and rotation %s is under way, in phase %s: add it once that has ended", j.dir, ID(root), j.state.Rotation.ID, j.state.Rotation.Phase)
	case len(j.missing) > 0 || len(j.added) > 1 || !slices.ContainsFunc(have.Roots(), func(r *x509.Certificate) bool { return ID(r) == RootID(j.set) }):
		return Step{}, j.refuse()
	case slices.ContainsFunc(have.Roots(), func(r *x509.Certificate) bool { return ID(r) == ID(root) }):
		return Step{}, fmt.Errorf("the root %q that %s brings has the key of one that is there: a root that replaces another needs a key of its own", root.Subject, j.dir)
	}
	if err := parent.CheckRoot(root, now); err != nil {
		return Step{}, fmt.Errorf("the root %q that %s brings: %w", root.Subject, j.dir, err)
	}
	return Step{Kind: Add, Root: root}, nil
}

// refuse is the error for what cannot be done safely.
func (j *judge) refuse() error {
	names := func(certs []*x509.Certificate) string {
		var all []string
		for _, c := range certs {
			all = append(all, ID(c))
		}
		if all == nil {
			return "none"
		}
		return strings.Join(all, ", ")
	}
	return fmt.Errorf("the root certificates in %s differ from those of this trust domain (new: %s; missing: %s; the issuer is under root %s) by more than one step: it would "+
		"cut off every proxy that does not know the new ones yet. To change safely: %s. Put the former files back, and take one step at a time",
		j.dir, names(j.added), names(j.missing), RootID(j.set), Steps)
}

// remove is for files without a root that is in the bundle.
func (j *judge) remove() (Step, error) {
	if j.r == nil || len(j.missing) > 1 {
		return Step{}, j.refuse()
	}
	root, id := j.missing[0], ID(j.missing[0])
	early := j.r.Phase == document.PhasePrepare || j.r.Phase == document.PhaseDistribute
	switch {
	case id == j.r.ToRoot && early && RootID(j.set) == j.r.FromRoot:
		if j.seen.went[id].After(j.r.Started) {
			return Step{Kind: Back, Root: root}, nil
		}
		return Step{Hint: fmt.Sprintf("root %s is distributed by rotation %s, and the root file in %s lacks it: add it there, too", id, j.r.ID, j.dir)}, nil
	case id == j.r.FromRoot && j.r.Phase == document.PhaseReissue && RootID(j.set) == j.r.ToRoot:
		return Step{Kind: Remove, Root: root}, nil
	case id == j.r.FromRoot:
		return Step{}, fmt.Errorf("root %s was left out of the root file in %s too early: rotation %s is in phase %s, and certificates under it are in use. Put it back, and take it out "+
			"when `chancery rotate status` says that no certificate of it is left; the steps are: %s", id, j.dir, j.r.ID, j.r.Phase, Steps)
	}
	return Step{}, j.refuse()
}

// same is for files with the roots of the bundle.
func (j *judge) same() (Step, error) {
	if j.r == nil {
		return Step{}, nil
	}
	id, under := ID(j.set.Chain[0]), RootID(j.set)
	switch j.r.Phase {
	case document.PhasePrepare, document.PhaseDistribute:
		if under == j.r.ToRoot {
			return Step{Kind: Next}, nil
		}
	case document.PhaseActivate, document.PhaseReissue:
		if under == j.r.FromRoot && id != j.r.FromIssuer {
			return Step{}, fmt.Errorf("the files in %s have issuer %s under root %s, which rotation %s replaces: put an issuer under root %s there", j.dir, id, under, j.r.ID, j.r.ToRoot)
		}
	}
	return Step{}, nil
}
