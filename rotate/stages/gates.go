package stages

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/trust"
)

// Names of gates. Those that Risk knows can be overridden.
const (
	GateSuccessor  = "successor"  // there are keys and certificates to go on with
	GateReplicas   = "replicas"   // each replica works by the document in which the phase began
	GateConsumers  = "consumers"  // everybody who was handed a certificate has what the phase asks for, or holds no valid one any more
	GateReaders    = "readers"    // those who only read roots have had the time for it
	GateStragglers = "stragglers" // certificates have ended that replicas may have signed which nobody can ask any more
	GateWait       = "wait"       // certificates have ended that servers which were cut off may have signed
	GateFiles      = "files"      // plugged-in files have left the predecessor out
	GateShare      = "share"      // an admin has let all identities have certificates of the new domain
	GateIssuers    = "issuers"    // issuers have ended that servers below have under the old root
)

// maxWaiting bounds the words of a gate.
const maxWaiting = 20

// Gate is what a phase waits for. Have and Want are for people; a set that is empty passes a gate, never a sum.
type Gate struct {
	Name       string
	Passed     bool
	Overridden bool
	Have, Want uint64
	Waiting    []string  // who or what is missing, and why; some of them
	Until      time.Time // when it passes at the latest by itself, if nothing changes; zero: not known
	more       int       // that Waiting would have
}

// Gates returns the gates of the phase that the rotation of a trust domain is in; none without one.
func Gates(d *document.Document, td trust.Domain, e Evidence, now time.Time) []Gate {
	v := look(d, td, e, now)
	if v == nil {
		return nil
	}
	return v.gates()
}

// gates returns all that must have passed before the next phase.
func (v *view) gates() []Gate {
	var all []Gate
	switch v.r.Phase {
	case document.PhasePrepare:
		all = []Gate{v.successor()}
	case document.PhaseDistribute:
		all = []Gate{v.successor(), v.replicas(), v.consumers(), v.readers(), v.stragglers(), v.issuers()}
	case document.PhaseIssue:
		all = []Gate{v.successor(), v.share()}
	case document.PhaseActivate:
		all = []Gate{v.successor(), v.replicas()}
	case document.PhaseReissue:
		all = []Gate{v.successor(), v.consumers(), v.stragglers(), v.wait(), v.files(), v.issuers()}
	case document.PhaseRetire:
		all = []Gate{v.replicas(), v.consumers(), v.stragglers()}
	default: // of a version to come
		all = []Gate{{Name: GateSuccessor, Waiting: []string{fmt.Sprintf("phase %.40q is not known to this version", v.r.Phase)}}}
	}
	all = slices.DeleteFunc(all, func(g Gate) bool { return g.Name == "" })
	for i := range all {
		g := &all[i]
		if !g.Passed && v.overridden(g.Name) {
			g.Passed, g.Overridden = true, true
		}
		if keep := min(len(g.Waiting), maxWaiting); len(g.Waiting)-keep+g.more > 0 {
			g.Waiting, g.more = append(g.Waiting[:keep:keep], fmt.Sprintf("and %d more", len(g.Waiting)-keep+g.more)), 0
		}
	}
	return all
}

// overridden reports whether somebody's word stands for a gate. It stands for one phase, and not for the same one after a rollback or a
// restore.
func (v *view) overridden(gate string) bool {
	return slices.ContainsFunc(v.r.Overrides, func(o document.Override) bool {
		return o.Gate == gate && o.Phase == v.r.Phase && !o.Time.Before(v.r.Since) && Risk(o.Phase, gate) != ""
	})
}

// lacksSuccessor reports whether something must be made, or come, before the successor can be distributed.
func (v *view) lacksSuccessor() bool {
	root := v.r.Kind == document.KindRoot && v.s.Get(document.KindRoot, v.r.ToRoot) == nil
	return root || v.r.Reason != document.ReasonFiles && v.s.Get(document.KindIssuer, v.r.ToIssuer) == nil
}

// successor is a gate only while something is amiss: what is to follow must be there, untainted, and from the phase activate on in use.
func (v *view) successor() Gate {
	g := Gate{Name: GateSuccessor}
	root, issuer := v.s.Get(document.KindRoot, v.r.ToRoot), v.s.Get(document.KindIssuer, v.r.ToIssuer)
	files := v.r.Reason == document.ReasonFiles
	active := v.r.Phase == document.PhaseActivate || v.r.Phase == document.PhaseReissue
	switch {
	case v.r.Kind != document.KindRoot && v.r.Kind != document.KindIssuer:
		g.Waiting = []string{fmt.Sprintf("a rotation of kind %.40q is not known to this version", v.r.Kind)}
	case v.r.Kind == document.KindRoot && root == nil:
		g.Waiting = []string{"the new root is not made yet" + v.behindDriver()}
	case issuer == nil && files && v.r.Phase == document.PhaseDistribute:
		g.Waiting = []string{"once everybody trusts the new root: change certificate and key of the issuer in the plugged-in files to those under it"}
	case issuer == nil && !(files && v.r.Phase == document.PhasePrepare):
		g.Waiting = []string{"the new issuer is not made yet" + v.behindDriver()}
	case issuer != nil && v.r.Kind == document.KindRoot && issuer.RootID() != root.ID:
		g.Waiting = []string{fmt.Sprintf("issuer %s is not under root %s", issuer.ID, root.ID)}
	case root != nil && root.Tainted != nil || issuer != nil && issuer.Tainted != nil:
		g.Waiting = []string{"the successor is tainted itself"}
	case active && (issuer.State != document.StateActive || root != nil && root.State != document.StateActive):
		g.Waiting = []string{fmt.Sprintf("issuer %s is not the one in use", issuer.ID)}
	default:
		return Gate{}
	}
	return g
}

// behindDriver says in words if the replica that takes the steps does not go by this document, as one that is down or too old to read it.
func (v *view) behindDriver() string {
	if v.d.Driver == nil {
		return ""
	}
	name := v.d.Driver.Replica
	switch n := v.note(name); {
	case n == nil:
		return fmt.Sprintf(": replica %s should make it, and has written no note", name)
	case n.Acknowledged < v.r.Version:
		return fmt.Sprintf(": replica %s should make it, and works by version %d of the document; this began with %d", name, n.Acknowledged, v.r.Version)
	}
	return ""
}

// note returns the note of a replica; nil if there is none.
func (v *view) note(replica string) *board.Note {
	for i := range v.e.Notes {
		if v.e.Notes[i].Replica == replica {
			return &v.e.Notes[i]
		}
	}
	return nil
}

// replicas waits until each that lives works by the document in which the phase began (decision D4).
func (v *view) replicas() Gate {
	g := Gate{Name: GateReplicas}
	for _, l := range v.d.Live() {
		g.Want++
		if n := v.note(l.Replica); n == nil {
			g.Waiting = append(g.Waiting, fmt.Sprintf("replica %s has not written a note yet", l.Replica))
		} else if n.Acknowledged < v.r.Version {
			g.Waiting = append(g.Waiting, fmt.Sprintf("replica %s works by version %d of the document; the phase began with %d", l.Replica, n.Acknowledged, v.r.Version))
		} else {
			g.Have++
		}
	}
	g.Passed = g.Want > 0 && g.Have == g.Want // a document without replicas is none that anybody works by
	return g
}

// vouches reports whether a note's sets are about what this phase asks for. What was learnt before its version was taken over is in
// them, and whoever was served later got what that version has.
func (v *view) vouches(n *board.Note) bool {
	return n != nil && n.Acknowledged >= v.r.Version && n.Evidence.Goal.Equal(v.goal)
}

// consumers waits until nobody is behind by any note that vouches, and each live replica has one. Notes of the dead count as well: what
// they say stays true. A consumer counts until the last certificate ends that it may hold (decisions D1, D2).
func (v *view) consumers() Gate {
	g := Gate{Name: GateConsumers}
	silent := false
	for _, l := range v.d.Live() {
		if n := v.note(l.Replica); !v.vouches(n) {
			silent = true
			g.Waiting = append(g.Waiting, fmt.Sprintf("replica %s has not said yet who is behind", l.Replica))
		} else {
			g.Want += n.Evidence.Total
		}
	}
	behind := v.behind()
	for _, b := range behind {
		if g.Until = later(g.Until, b.Until.Add(skew)); silent {
			g.Until = time.Time{}
		}
	}
	n := uint64(len(behind))
	g.Want = max(g.Want, n)
	g.Have = g.Want - n
	words := v.words(behind)
	g.Waiting, g.more = append(g.Waiting, words...), len(behind)-len(words)
	g.Passed = !silent && n == 0 && len(v.d.Live()) > 0
	for _, n := range v.voices() { // those whom nobody can name count as well (decision D2)
		if until := n.Evidence.Lost.Add(skew); !n.Evidence.Lost.IsZero() && v.now.Before(until) {
			g.Passed = false
			g.Waiting = append(g.Waiting, fmt.Sprintf("replica %s does not know everybody whom it served before it started, or had no room for more: they count until %s", n.Replica, stamp(n.Evidence.Lost)))
			if !silent {
				g.Until = later(g.Until, until)
			}
		}
	}
	return g
}

// behind joins the sets of those notes that vouch. Nobody is settled elsewhere who is connected to a live replica and says itself that
// it is behind: what the others have of it is older.
func (v *view) behind() map[uint64]board.Behind {
	voices, most := v.voices(), 0
	for _, n := range voices {
		most = max(most, len(n.Evidence.Behind))
	}
	all, here := make(map[uint64]board.Behind, most), map[uint64]bool{}
	for _, n := range voices {
		for _, b := range n.Evidence.Behind {
			if !v.now.Before(b.Until.Add(skew)) {
				continue
			}
			if b.Here && v.lives(n.Replica) {
				here[b.Consumer] = true
			}
			if have, is := all[b.Consumer]; !is || b.Until.After(have.Until) {
				all[b.Consumer] = b
			}
		}
	}
	for _, n := range voices {
		for _, c := range n.Evidence.Settled {
			if !here[c] {
				delete(all, c)
			}
		}
	}
	return all
}

func (v *view) lives(replica string) bool {
	return slices.ContainsFunc(v.d.Live(), func(l document.LogState) bool { return l.Replica == replica })
}

// voices returns the notes that vouch, of replicas that are listed.
func (v *view) voices() []*board.Note {
	var all []*board.Note
	names := map[string]bool{}
	for _, l := range v.d.Logs {
		if n := v.note(l.Replica); !names[l.Replica] && v.vouches(n) {
			all = append(all, n)
		}
		names[l.Replica] = true
	}
	return all
}

// words says who is behind, those with words first: no more than are shown, since ten thousand may be behind, and the driver asks each second.
func (v *view) words(behind map[uint64]board.Behind) []string {
	why, here := map[uint64]string{}, map[uint64]bool{}
	for _, n := range v.voices() {
		for _, b := range n.Evidence.Behind {
			if b.Here {
				here[b.Consumer] = true
			}
		}
	}
	for _, n := range v.voices() {
		for _, l := range n.Evidence.Sample {
			i, is := slices.BinarySearchFunc(n.Evidence.Behind, l.Consumer, func(b board.Behind, c uint64) int { return cmp.Compare(b.Consumer, c) })
			if own := is && n.Evidence.Behind[i].Here; own || !here[l.Consumer] { // its own words, not what another server guesses
				why[l.Consumer] = fmt.Sprintf("%s: %s", l.Name, l.Why)
			}
		}
	}
	order := func(a, b board.Behind) int {
		x, y := why[a.Consumer] == "", why[b.Consumer] == ""
		switch {
		case x != y && y:
			return -1
		case x != y:
			return 1
		}
		return cmp.Or(a.Until.Compare(b.Until), cmp.Compare(a.Consumer, b.Consumer))
	}
	var first []board.Behind // in order
	for _, b := range behind {
		if len(first) == maxWaiting && order(b, first[maxWaiting-1]) > 0 {
			continue
		}
		i, _ := slices.BinarySearchFunc(first, b, order)
		first = slices.Insert(first[:min(len(first), maxWaiting-1)], min(i, maxWaiting-1), b)
	}
	var out []string
	for _, b := range first {
		name := why[b.Consumer]
		if name == "" {
			name = fmt.Sprintf("consumer %016x", b.Consumer)
		}
		out = append(out, fmt.Sprintf("%s (counts until %s)", name, stamp(b.Until)))
	}
	return out
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// readers waits for those who read roots and cannot say so, from when the last replica had the new ones to give (decision D3).
func (v *view) readers() Gate {
	if v.e.Floor <= 0 {
		return Gate{}
	}
	g := Gate{Name: GateReaders}
	if v.r.Spread.IsZero() {
		g.Waiting = append(slices.Clone(v.e.Unpublished), fmt.Sprintf("those who only read roots need %s from when each replica has them, and they are published", v.e.Floor))
		return g
	}
	g.Until = v.r.Spread.Add(v.e.Floor + skew)
	if g.Passed = !v.now.Before(g.Until); !g.Passed {
		g.Waiting = []string{"those who only read roots are given until " + stamp(g.Until)}
	}
	return g
}

// stragglers waits for what dead replicas may have signed for consumers whom nobody else knows (decision D2). One whose note
// vouches has said all: whom it served later was given what the phase asks for.
func (v *view) stragglers() Gate {
	g := Gate{Name: GateStragglers, Passed: true}
	names := map[string]bool{}
	for _, l := range v.d.Live() {
		names[l.Replica] = true
	}
	for i := range v.d.Logs {
		l := &v.d.Logs[i]
		if l.DeclaredDead == nil {
			continue
		}
		until, why := v.straggles(l, names[l.Replica])
		if !v.now.Before(until) {
			continue
		}
		g.Passed, g.Until = false, later(g.Until, until)
		g.Waiting = append(g.Waiting, fmt.Sprintf("replica %s was declared dead; %s until %s", l.Replica, why, stamp(until)))
	}
	if g.Passed {
		return Gate{}
	}
	return g
}

// straggles returns until when certificates may be valid that a dead replica signed. A paused one may wake, and sign by the document
// that it knew: no longer than that document's earliest end of the old root, which was a window ahead at most (decision D4).
func (v *view) straggles(dead *document.LogState, followed bool) (until time.Time, why string) {
	n, at := v.note(dead.Replica), dead.DeclaredDead.Add(settled)
	woken := at.Add(max(window(v.e.LeafTTL), v.span(n)) + skew)
	switch {
	case followed: // the note is that of a live replica of its name, which has taken over what its own said
		return woken, "should it live, what it signs is valid"
	case v.vouches(n):
		return time.Time{}, ""
	case n == nil && v.e.LeafTTL <= 0:
		return at.Add(ca.LeafTTLLimit + skew), "it left no note, and certificates of it may be valid"
	case n == nil:
		return later(at.Add(v.e.LeafTTL+skew), woken), "it left no note, and certificates of it may be valid"
	}
	return later(n.Evidence.Stragglers(v.goal).Add(skew), woken), "certificates of it that nobody else knows may be valid"
}

// span is how far ahead a replica announced what it signed, as it wrote its note: one that is cut off from the store goes on to sign
// certificates of that life until it ends, beyond what lies in the store.
func (v *view) span(n *board.Note) time.Duration {
	if n == nil || n.Seen.IsZero() || n.Evidence.Ahead.IsZero() {
		return 0
	}
	most := v.e.LeafTTL
	if most <= 0 {
		most = ca.LeafTTLLimit
	}
	return min(n.Evidence.Ahead.Sub(n.Seen), most)
}

// wait keeps the root until nothing is valid that a server may have signed under it which the store did not confirm (decision D4).
func (v *view) wait() Gate {
	if v.r.Kind != document.KindRoot {
		return Gate{}
	}
	g := Gate{Name: GateWait, Until: v.r.NotBefore.Add(skew)}
	if g.Passed = !v.now.Before(g.Until); !g.Passed {
		g.Waiting = []string{"a server that was cut off may have signed under the old root until " + stamp(g.Until)}
	}
	return g
}

// files waits for the last step of a change of plugged-in files (decision D7).
func (v *view) files() Gate {
	if v.r.Reason != document.ReasonFiles {
		return Gate{}
	}
	g := Gate{Name: GateFiles, Passed: !slices.Contains(v.e.Files, v.r.FromRoot)}
	if !g.Passed {
		g.Waiting = []string{"take the old root out of the plugged-in files: root " + v.r.FromRoot}
	}
	return g
}

// issuers waits for servers below. What they sign is worth nothing once the root above them has left; and what they serve knows their
// roots alone, which are pinned there, so that it refuses what the successor signs. Neither is heard of here.
func (v *view) issuers() Gate {
	g := Gate{Name: GateIssuers}
	for _, x := range below.Under(v.s.Below, v.r.FromRoot, v.now.Add(-skew)) {
		g.Until = later(g.Until, x.Until.Add(skew))
		g.Waiting = append(g.Waiting, fmt.Sprintf("server below %s has an issuer under root %s, which it pins, until %s", x.To, x.Root, stamp(x.Until)))
	}
	if len(g.Waiting) == 0 {
		return Gate{}
	}
	return g
}

// Risk says what an admin risks who overrides a gate in a phase; empty where that cannot be.
func Risk(p document.Phase, gate string) string {
	retire := "some keep trusting the old root; nothing fails"
	return map[document.Phase]map[string]string{
		document.PhaseDistribute: {
			GateReplicas:   "servers that are behind hand out roots without the new one, and whoever has only those refuses the new certificates",
			GateConsumers:  "those that are behind refuse certificates under the new root, or issuer",
			GateReaders:    "readers of roots that are behind refuse certificates under the new root",
			GateStragglers: "those that only a dead server knew may refuse certificates under the new root, or issuer",
			GateIssuers:    "what servers below serve refuses certificates under the new root, until they trust it",
		},
		document.PhaseActivate: {GateReplicas: "servers that are behind go on to sign under the old root, or issuer; their certificates are refused once that is retired"},
		document.PhaseReissue: {
			GateConsumers:  "those that are behind present certificates that everybody refuses from then on",
			GateStragglers: "those that only a dead server knew may present certificates that everybody refuses from then on",
			GateIssuers:    "what servers below have signed, and sign until they have another issuer, is refused by everybody from then on",
		},
		document.PhaseRetire: {GateReplicas: retire, GateConsumers: retire, GateStragglers: retire},
	}[p][gate]
}

// active returns the active authority of a kind; nil if there is none.
func (v *view) active(kind document.AuthorityKind) *document.Authority {
	for i := range v.s.Authorities {
		if a := &v.s.Authorities[i]; a.Kind == kind && a.State == document.StateActive {
			return a
		}
	}
	return nil
}
