package e2e

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
)

// TestRing proves rotations on real parts (decision D8): whatever is rotated, rolled back or killed, no request is lost, counted on
// both sides; and what was retired is refused. $RING_SEED repeats what the killer did.
func TestRing(t *testing.T) {
	t.Parallel()
	seed := ringSeed(t)
	t.Logf("RING_SEED=%d", seed)
	for name, h := range map[string]struct {
		pilot bool
		steps []func(*ring)
	}{
		"root":                   {true, []func(*ring){rotatesRoot}},
		"issuer, early rollback": {false, []func(*ring){rotatesIssuer, rollsBackIn(document.PhasePrepare), rollsBackIn(document.PhaseDistribute)}},
		"late rollback":          {false, []func(*ring){rollsBackIn(document.PhaseActivate), rollsBackIn(document.PhaseReissue)}},
		"compromise":             {true, []func(*ring){replacesCompromised}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRing(t, ringConfig{Seed: seed, Pilot: h.pilot, Kill: ringKill(t, 10*time.Second)})
			for _, step := range h.steps {
				step(r)
			}
			r.noneLost()
		})
	}
}

// TestRingSoak runs histories with ever new seeds for $RING_SOAK.
func TestRingSoak(t *testing.T) {
	text := os.Getenv("RING_SOAK")
	if text == "" {
		t.Skip("RING_SOAK says for how long, such as 2h")
	}
	limit, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	histories := []func(*ring){
		rotatesRoot, rotatesIssuer, replacesCompromised, rollsBackIn(document.PhasePrepare), rollsBackIn(document.PhaseDistribute),
		rollsBackIn(document.PhaseActivate), rollsBackIn(document.PhaseReissue),
	}
	for began := time.Now(); time.Since(began) < limit; {
		seed := ringSeed(t)
		if !t.Run(fmt.Sprintf("RING_SEED=%d", seed), func(t *testing.T) {
			r := startRing(t, ringConfig{Seed: seed, Pilot: true, Kill: ringKill(t, 5*time.Second)})
			for range 3 {
				histories[r.killer.draw.IntN(len(histories))](r)
			}
			r.noneLost()
		}) {
			return
		}
	}
}

// rotationLimit is how long a rotation may take: the leaves that a killed server may have given must end, and it announced them two
// minutes ahead.
const rotationLimit = 10 * time.Minute

// rotatesRoot: a root rotation from end to end.
func rotatesRoot(r *ring) {
	before, old := r.authorities(), r.steal()
	r.presents(old, true, "before the rotation")
	r.killer.start(r.cfg.Kill)
	id := r.begin("--root")
	last := r.ends(id, "done", rotationLimit)
	r.killer.stop()
	after := r.authorities()
	if last.FromRoot != before.root || last.ToRoot != after.root || after.root == before.root || after.issuer == before.issuer {
		r.t.Errorf("before %+v, after %+v, rotated %+v", before, after, last.Rotation)
	}
	r.replaced(old, after)
	r.tells(id, "done")
}

// rotatesIssuer: the root stays, so that what is under the old issuer is good until it ends.
func rotatesIssuer(r *ring) {
	before, old := r.authorities(), r.steal()
	r.killer.start(r.cfg.Kill)
	id := r.begin("--issuer")
	r.ends(id, "done", rotationLimit)
	r.killer.stop()
	after := r.authorities()
	if after.root != before.root || after.issuer == before.issuer {
		r.t.Errorf("before %+v, after %+v", before, after)
	}
	r.holds(after.root)
	r.under(after.issuer)
	r.presents(old, true, "after the issuer's rotation")
	r.tells(id, "done")
}

// replacesCompromised: the tainted root leaves, and nothing brings it back (decision D6).
func replacesCompromised(r *ring) {
	before, old := r.authorities(), r.steal()
	id := r.begin("--root", "--reason", "compromised")
	let := r.hold(document.PhaseRetire)
	r.reaches(id, document.PhaseReissue, rotationLimit)
	for _, change := range []string{"abort", "rollback"} {
		if _, stderr, err := r.rotate(r.admin, change); err == nil {
			r.t.Errorf("%s of the rotation of a compromised root is done", change)
		} else {
			r.t.Logf("%s of it: %s", change, strings.TrimSpace(stderr))
		}
	}
	let()
	r.killer.start(r.cfg.Kill)
	r.ends(id, "done", rotationLimit)
	r.killer.stop()
	after := r.authorities()
	if after.root == before.root || after.issuer == before.issuer {
		r.t.Errorf("before %+v, after %+v", before, after)
	}
	r.replaced(old, after)
	r.tells(id, "done")
}

// replaced checks that only what is under the new root counts.
func (r *ring) replaced(old stolen, now authorities) {
	r.t.Helper()
	r.holds(now.root)
	r.under(now.issuer)
	r.presents(old, false, "after its root was retired")
	r.presents(r.steal(), true, "of the new root")
}

// rollsBackIn rolls a root rotation back in a phase; all is as before then (decision D6: each phase before retire).
func rollsBackIn(phase document.Phase) func(*ring) {
	phases := []document.Phase{document.PhasePrepare, document.PhaseDistribute, document.PhaseActivate, document.PhaseReissue, document.PhaseRetire}
	at := slices.Index(phases, phase)
	return func(r *ring) {
		before, old := r.authorities(), r.steal()
		let := r.hold(phases[at+1])
		id := r.begin("--root")
		r.reaches(id, phase, rotationLimit)
		signs := phase == document.PhaseActivate || phase == document.PhaseReissue
		var successor stolen
		if signs {
			successor = r.steal()
			if successor.id == old.id {
				r.t.Errorf("in phase %s the predecessor is the active issuer", phase)
			}
		}
		r.mustRotate("rollback")
		let()
		outcome := "aborted"
		if signs {
			outcome = "rolled back"
		}
		r.killer.start(r.cfg.Kill)
		r.ends(id, outcome, rotationLimit)
		r.killer.stop()
		if after := r.authorities(); after.root != before.root || after.issuer != before.issuer || !slices.Equal(after.roots, before.roots) {
			r.t.Errorf("after the rollback in phase %s there is %+v; before there was %+v", phase, after, before)
		}
		r.holds(before.root)
		r.under(before.issuer)
		r.presents(old, true, "after a rollback in phase "+string(phase))
		if signs {
			r.presents(successor, false, "after a rollback in phase "+string(phase))
		}
		r.tells(id, outcome)
	}
}

// tells checks what the command says of a rotation that has ended.
func (r *ring) tells(id, outcome string) {
	r.t.Helper()
	Eventually(r.t, 30*time.Second, "rotate status tells of the end", func() error {
		s, err := r.status()
		switch {
		case err != nil:
			return err
		case s.Rotation != nil || len(s.Past) == 0 || s.Past[0].ID != id || s.Past[0].Outcome != outcome:
			return fmt.Errorf("%+v; want %s %s", s, id, outcome)
		case s.TrustDomain != trustDomain || s.Past[0].Actor == "":
			r.t.Errorf("rotate status tells of trust domain %q, actor %q", s.TrustDomain, s.Past[0].Actor)
		}
		return nil
	})
}

// TestRingLeaves: no request is lost while leaves are renewed and servers, agents and the store are killed.
func TestRingLeaves(t *testing.T) {
	r := startRing(t, ringConfig{Seed: ringSeed(t), Pilot: true, Kill: ringKill(t, 4*time.Second)})
	r.presents(r.steal(), true, "without a rotation")
	r.killer.start(r.cfg.Kill)
	r.renewed(3)
	r.noneLost()
}

// renewed waits until each client and each server has shown so many more certificates, while the killer kills.
func (r *ring) renewed(n int) {
	r.t.Helper()
	before := map[string]LoadReport{}
	for _, l := range r.loads {
		before[l.name] = l.Report()
	}
	Eventually(r.t, time.Duration(n+2)*r.cfg.TTL, fmt.Sprintf("%d new certificates are seen on each side", n), func() error {
		r.killer.tick()
		var errs []error
		for _, l := range r.loads {
			now := l.Report()
			if c, s := len(now.ClientSerials)-len(before[l.name].ClientSerials), len(now.ServerSerials)-len(before[l.name].ServerSerials); c < n || s < n {
				errs = append(errs, fmt.Errorf("%s: %d and %d", l.name, c, s))
			}
		}
		return errors.Join(errs...)
	})
}
