package stages

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A history is steps between semicolons, such as histories of mutants have, and what is expected after one: "-> PHASE", with "waits
// GATE, GATE" for the gates that have not passed, and "says TEXT" for words of one of these. In the world are servers a, which has
// everything at once, and b; e and f are agents (e of a, f of b at first), c is a client without agent that b served; r reads roots.
//
//	b reads      takes over the newest document       b writes     writes its note               b follows    both
//	e syncs b    has the roots of b                   e renews b   has a leaf of b               e reports b  tells b what it has
//	b dies, b restarts, b sleeps, b wakes, b declared dead, b registers (finds out that it is not)
//	drive        the driver's step, if there is one          minute, 2 minutes    time goes by; leaves live two
//	no STEP      it must not be possible              refused ORDER: TEXT  an admin is told why not
var histories = []struct{ name, text string }{
	{"a root, from begin to end", `
		start root -> prepare waits successor says the new root is not made yet;
		drive -> distribute waits replicas, consumers says replica b works by version 10;
		b follows -> distribute waits consumers;
		e syncs a; e reports a; f syncs b; f reports b; minute; c renews b; b writes -> distribute waits consumers says consumer 0000000000000005;
		minute; c renews b; e renews a; e reports a; f renews b; f reports b; b writes; drive -> activate waits replicas;
		b follows; drive -> reissue waits consumers, wait says replica b has not said yet who is behind;
		e renews a; e reports a; f renews b; f reports b; b follows; minute; c renews b; b writes -> reissue waits consumers, wait;
		minute; c renews b; b writes -> reissue waits wait says a server that was cut off may have signed; minute; drive -> retire waits replicas, consumers;
		b follows; e renews a; e reports a; f renews b; f reports b; c renews b; minute; c renews b; b writes; drive -> done`},
	{"a gate waits for a replica that is alive and silent (D4)", `
		start root; drive; 9 minutes; drive -> distribute waits replicas, consumers says replica b works by version 10`},
	{"nobody's word is no acknowledgement (D1)", `
		start root; drive; b reads; 9 minutes; drive -> distribute waits replicas, consumers says replica b has not said yet who is behind`},
	{"an agent that is off counts until its leaf ends, connected or not (D1)", `
		start root; drive; b follows; minute; c renews b; f syncs a; f reports a; minute; b writes; c renews b; b writes;
		drive -> distribute waits consumers says consumer 0000000000000001 (counts until 2026-12-01T00:02:00Z); minute; drive -> activate`},
	{"each hash may acknowledge elsewhere (D2)", `
		start root; drive; b follows; e syncs a; e reports a; minute; f renews b; b writes; 2 minutes; b writes;
		drive -> distribute waits consumers says consumer 0000000000000003; f renews a; f reports a; drive -> activate`},
	{"a replica that is gone blocks until what it announced has passed (D2)", `
		start root; drive; b dies; b declared dead -> distribute waits consumers, stragglers says certificates of it that nobody else knows may be valid;
		3 minutes; drive -> distribute waits stragglers; minute; drive -> activate`},
	{"a dead replica's note that vouches has said all (D2)", `
		start root; drive; b follows; b dies; b declared dead -> distribute waits consumers; minute; drive -> distribute waits consumers;
		2 minutes; drive -> activate`},
	{"a replica that comes back must acknowledge, too (D4)", `
		start root; drive; b dies; b declared dead; 4 minutes; b restarts -> distribute waits replicas, consumers;
		drive -> distribute; b writes; drive -> activate waits replicas`},
	{"what a process of before signed blocks its next one (D2)", `
		start root; drive; b dies; b restarts; b writes -> distribute waits consumers says replica b does not know everybody whom it served before it started, or had no room for more: they count until 2026-12-01T00:03:00Z;
		4 minutes; b writes; drive -> activate`},
	{"a paused signer wakes after the end: it signs nothing any more (D4)", `
		start root; drive; b follows; 3 minutes; b writes; b sleeps; b declared dead; drive -> activate; drive -> reissue waits stragglers, wait;
		2 minutes; drive -> reissue; 2 minutes; drive -> retire; b wakes; no c renews b; no f renews b`},
	{"a pause holds; it goes on where it was", `
		start root; pause -> prepare (paused); drive -> prepare (paused); refused pause: paused by admin already; resume -> prepare; refused resume: is not paused;
		drive -> distribute`},
	{"abort before the successor signs: it leaves the bundle", `
		start root; drive; b follows; e syncs a; abort -> aborted; refused abort: no rotation is under way; e syncs a; minute; e renews a`},
	{"abort is refused once the successor signs, and names rollback", `
		start root; drive; b follows; 4 minutes; b writes; drive -> activate; refused abort: chancery rotate rollback;
		rollback -> activate (back) waits replicas; b follows; drive -> reissue (back) waits consumers, wait; b follows -> reissue (back) waits wait;
		3 minutes; drive -> retire (back); b follows; drive -> rolled back`},
	{"rollback replaces what the successor signed", `
		start root; drive; b follows; 4 minutes; b writes; drive -> activate; b follows; e renews a; rollback -> activate (back); b follows;
		drive -> reissue (back); b follows -> reissue (back) waits consumers, wait says consumer 0000000000000001; refused abort: rollback;
		e renews a; e reports a -> reissue (back) waits wait; 3 minutes; drive -> retire (back)`},
	{"a rollback can be rolled back, and not from retire", `
		start root; drive; b follows; 4 minutes; b writes; drive; rollback -> activate (back); rollback -> activate waits replicas;
		b follows; drive -> reissue; b follows; 3 minutes; drive -> retire; refused rollback: Start another rotation`},
	{"a compromised key: no way back (D6)", `
		start root compromised -> prepare; refused abort: is tainted; drive; refused rollback: is tainted; b follows; 4 minutes; b writes; drive -> activate;
		refused rollback: would sign`},
	{"a compromised issuer takes its root along (D6)", `
		start issuer compromised -> prepare waits successor says the new root; refused abort: issuer I1 is tainted`},
	{"an issuer under the same root", `
		start issuer -> prepare waits successor says the new issuer; drive -> distribute waits replicas, consumers; b follows; 3 minutes; b writes; drive -> activate;
		b follows; drive -> reissue; b follows; drive -> done`},
	{"an override stands for one gate in one phase", `
		start root; drive; refused override wait: has no gate; refused override files: has no gate; override consumers -> distribute waits replicas;
		refused override consumers: already; override replicas; drive -> activate waits replicas; refused override consumers: has no gate;
		override replicas; rollback -> activate (back) waits replicas`},
	{"one at a time", `
		start root; refused start issuer: is under way, in phase prepare; refused start migrate 0: rotation 1 of the root is under way; refused issue 100: not to another trust domain`},
	{"a migration, from begin to end (D10)", `
		start migrate 0 -> prepare waits successor; refused start root: migration 1 from td to new is under way, in phase prepare: wait for its end, or ${chancery trust migrate abort;
		drive -> distribute waits replicas, consumers; b follows; e syncs a; e reports a; f syncs b; f reports b; minute; c renews b; b writes; minute; c renews b; e renews a; e reports a;
		f renews b; f reports b; b writes; drive -> issue waits share says no identities yet get new: ${chancery trust migrate issue --share N;
		drive -> issue; refused override share: has no gate; issue e -> issue waits share says identities of the namespace e get new; refused issue e: issues to identities of the namespace e already;
		e renews a; e reports a; refused abort: ${chancery trust migrate rollback; b follows; issue 50 -> issue waits share says 50 % of all identities, and those of the namespace e get new;
		refused issue 49: never shrinks; refused issue 101: a share of 101; refused issue a/b: the migration's namespace; issue 100; drive -> activate waits replicas;
		refused issue f: all identities get certificates of new already; b follows; drive -> reissue waits consumers, wait; f renews b; f reports b; b follows; minute; b writes; c renews b; minute; b writes; c renews b;
		b writes -> reissue waits wait; minute; drive -> retire; refused rollback: Start another`},
	{"a migration is aborted before the new domain is issued", `
		start migrate 100; drive; b follows; e syncs a; abort -> aborted; e syncs a; minute; e renews a`},
	{"a rollback replaces what the new domain had, and cannot be taken back to a part", `
		start migrate e; drive; b follows; 4 minutes; b writes; drive -> issue waits share; b follows; e renews a; e reports a; rollback -> activate (back) waits replicas;
		refused rollback: was rolled back while only a part; refused issue 100: was rolled back: new is issued to nobody any more; b follows; drive -> reissue (back);
		b follows -> reissue (back) waits consumers, wait says consumer 0000000000000001; e renews a; e reports a; 3 minutes; drive -> retire (back); b follows; drive -> rolled back`},
	{"a rollback of all can be taken back", `
		start migrate 100; drive; b follows; 4 minutes; b writes; drive -> issue; drive -> activate; rollback -> activate (back); rollback -> activate`},
	{"a migration holds while it is paused", `
		start migrate 100; drive; b follows; 4 minutes; b writes; pause; drive -> distribute (paused); resume; drive -> issue`},
}

// readerHistories are those with somebody who only reads roots.
var readerHistories = []struct{ name, text string }{
	{"readers of roots are given their time, from when each replica has the new ones (D3)", `
		start root; drive; 2 minutes; r reads b; minute; drive -> distribute waits replicas, consumers, readers says from when each replica has them;
		b follows; drive -> distribute waits readers says are given until; r reads b; 2 minutes; drive -> distribute waits readers; r reads b; minute; drive -> activate`},
}

func TestHistories(t *testing.T) {
	for _, h := range histories {
		t.Run(h.name, func(t *testing.T) { tell(t, h.text, false) })
	}
	for _, h := range readerHistories {
		t.Run(h.name, func(t *testing.T) { tell(t, h.text, true) })
	}
}

func tell(t *testing.T, text string, reader bool) {
	text = strings.ReplaceAll(text, "${", "`")
	w := &world{start: []string{"root", "issuer", "root compromised", "issuer compromised", "migrate 0", "migrate 100", "migrate e"}, consumer: [people]bool{true, true, true}, reader: reader,
		faults: 9, kinds: "die sleep", orders: 9, commands: slices.Concat(orders, overrides, []string{"issue e", "issue 50", "issue 100"}), life: 2}
	s := w.first()
	for _, part := range strings.Split(text, ";") {
		part = strings.Join(strings.Fields(part), " ")
		label, want, expects := strings.Cut(part, "-> ")
		var err error
		if s, err = w.tellOne(s, strings.TrimSpace(label)); err != nil {
			t.Fatalf("%s: %v", part, err)
		}
		if s.bad != "" {
			t.Fatalf("%s: %s", part, s.bad)
		}
		if expects {
			if err := w.expect(&s, want); err != nil {
				t.Fatalf("%s: %v", part, err)
			}
			for _, g := range Gates(s.doc, td, w.evidence(&s), at(s.now)) {
				if !g.Passed {
					t.Logf("%s, minute %d: %s: %s", s.phase(), s.now, g.Name, strings.Join(g.Waiting, "; "))
				}
			}
		}
	}
}

// tellOne plays what stands between two semicolons.
func (w *world) tellOne(s state, label string) (state, error) {
	if order, why, is := strings.Cut(strings.TrimPrefix(label, "refused "), ": "); is && strings.HasPrefix(label, "refused ") {
		next, err := s, error(nil)
		if kind, start := strings.CutPrefix(order, "start "); start {
			err = next.begin(kind)
		} else {
			err = w.order(&next, order)
		}
		if err == nil || !strings.Contains(err.Error(), why) {
			return s, fmt.Errorf("the error is %v", err)
		}
		return s, nil
	}
	if not, is := strings.CutPrefix(label, "no "); is {
		if _, err := w.play(s, not); err == nil {
			return s, fmt.Errorf("it can happen")
		}
		return s, nil
	}
	if n, is := strings.CutSuffix(label, " minutes"); is {
		many, err := strconv.Atoi(n)
		for ; many > 0 && err == nil; many-- {
			s, err = w.play(s, "minute")
		}
		return s, err
	}
	if label == "" {
		return s, nil
	}
	if label == "drive" {
		if next, err := w.play(s, label); err == nil {
			return next, nil
		}
		return s, nil // there was nothing to do
	}
	if name, is := strings.CutSuffix(label, " follows"); is {
		next, err := w.play(s, name+" reads")
		if err != nil {
			return s, err
		}
		return w.play(next, name+" writes")
	}
	return w.play(s, label)
}

// expect checks "PHASE waits GATE, GATE says TEXT".
func (w *world) expect(s *state, want string) error {
	want, says, _ := strings.Cut(want, " says ")
	want, waits, hasGates := strings.Cut(want, " waits ")
	if got := s.phase(); got != want {
		return fmt.Errorf("the phase is %s", got)
	}
	var names, words []string
	for _, g := range Gates(s.doc, td, w.evidence(s), at(s.now)) {
		if !g.Passed {
			names, words = append(names, g.Name), append(words, g.Waiting...)
		}
	}
	if got := strings.Join(names, ", "); hasGates && got != waits {
		return fmt.Errorf("it waits for %s: %s", got, strings.Join(words, "; "))
	}
	if got := strings.Join(words, "; "); !strings.Contains(got, says) {
		return fmt.Errorf("it says %s", got)
	}
	return nil
}
