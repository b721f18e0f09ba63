package swap

import (
	"crypto/x509"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

// TestD7Judge holds sets of files against documents of each phase.
func TestD7Judge(t *testing.T) {
	log := must(audit.Open(filepath.Join(t.TempDir(), "audit.jsonl")))
	defer log.Close()
	made := func() *ca.Created {
		return must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log}))
	}
	sealer := must(keys.CreateSealer(filepath.Join(t.TempDir(), "key")))
	one, two, three := made(), made(), made()
	short := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log, RootTTL: time.Hour, IssuerTTL: time.Hour}))
	now := time.Now()

	// document is one that trusts roots, in a phase from the first to the second; past rotations follow.
	doc := func(roots []*ca.Created, phase document.Phase, past ...document.PastRotation) *document.Document {
		d := document.New()
		for _, r := range roots {
			if err := d.Add(td, document.KindRoot, document.Key{}, sealer, r.Root); err != nil {
				t.Fatal(err)
			}
		}
		s := d.State(td)
		s.Past = past
		if phase != "" {
			s.Rotation = &document.Rotation{
				ID: "r", Kind: document.KindRoot, Reason: document.ReasonFiles, Phase: phase, Started: now.Add(-time.Hour),
				FromRoot: ID(one.Root), FromIssuer: ID(one.Issuer), ToRoot: ID(two.Root),
			}
		}
		return d
	}
	set := func(issuer *ca.Created, roots ...*ca.Created) *files.Set {
		s := &files.Set{Key: issuer.IssuerKey, Chain: []*x509.Certificate{issuer.Issuer}}
		for _, r := range roots {
			s.Roots = append(s.Roots, r.Root)
		}
		return s
	}
	list := func(all ...*ca.Created) []*ca.Created { return all }
	saw := func(before, after *files.Set, at time.Time) History { return History{}.After(before, after, at) }
	ended := func(outcome string, from, to *ca.Created) document.PastRotation {
		return document.PastRotation{Rotation: document.Rotation{ID: "p", Kind: document.KindRoot, FromRoot: ID(from.Root), ToRoot: ID(to.Root)}, Ended: now.Add(-time.Minute), Outcome: outcome}
	}
	asked := doc(list(one, two), document.PhaseDistribute)
	asked.State(td).Rotation.Reason = document.ReasonAsked
	for name, c := range map[string]struct {
		doc  *document.Document
		set  *files.Set
		seen History
		want Kind
		hint string // in the hint
		bad  string // in the error
	}{
		"as it was":                      {doc: doc(list(one), ""), set: set(one, one)},
		"a root added":                   {doc: doc(list(one), ""), set: set(one, one, two), want: Add},
		"two added":                      {doc: doc(list(one), ""), set: set(one, one, two, three), bad: "by more than one step"},
		"another CA":                     {doc: doc(list(one), ""), set: set(two, two), bad: "(1) add the new root"},
		"root and key at once":           {doc: doc(list(one), ""), set: set(two, one, two), bad: "by more than one step"},
		"one swapped for another":        {doc: doc(list(one, three), ""), set: set(one, one, two), bad: "by more than one step"},
		"a root that has ended":          {doc: doc(list(one), ""), set: set(one, one, short), bad: "it ended at"},
		"one left out, for no rotation":  {doc: doc(list(one, three), ""), set: set(one, one), bad: "by more than one step"},
		"added during another":           {doc: doc(list(one, two), document.PhaseDistribute), set: set(one, one, two, three), bad: "rotation r is under way"},
		"left out during one by command": {doc: asked, set: set(one, one), bad: "by more than one step"},

		"behind":                          {doc: doc(list(one, two), document.PhaseDistribute), set: set(one, one), hint: "add it there, too"},
		"taken back":                      {doc: doc(list(one, two), document.PhaseDistribute), set: set(one, one), seen: saw(set(one, one, two), set(one, one), now), want: Back},
		"taken back before it began":      {doc: doc(list(one, two), document.PhaseDistribute), set: set(one, one), seen: saw(set(one, one, two), set(one, one), now.Add(-2*time.Hour)), hint: "add it there, too"},
		"waiting":                         {doc: doc(list(one, two), document.PhaseDistribute), set: set(one, one, two)},
		"the new issuer":                  {doc: doc(list(one, two), document.PhaseDistribute), set: set(two, one, two), want: Next},
		"the old root left, too early":    {doc: doc(list(one, two), document.PhaseDistribute), set: set(two, two), bad: "too early"},
		"and right after it signs":        {doc: doc(list(one, two), document.PhaseActivate), set: set(two, two), bad: "too early"},
		"behind with the key":             {doc: doc(list(one, two), document.PhaseReissue), set: set(one, one, two)},
		"another issuer of the old root":  {doc: doc(list(one, two), document.PhaseReissue), set: &files.Set{Chain: []*x509.Certificate{under(t, one, log)}, Roots: set(one, one, two).Roots}, bad: "put an issuer under root"},
		"waiting for the third step":      {doc: doc(list(one, two), document.PhaseReissue), set: set(two, one, two)},
		"the third step":                  {doc: doc(list(one, two), document.PhaseReissue), set: set(two, two), want: Remove},
		"the third step with the old key": {doc: doc(list(one, two), document.PhaseReissue), set: set(one, two), bad: "too early"},
		"the new root left":               {doc: doc(list(one, two), document.PhaseReissue), set: set(two, one), bad: "by more than one step"},
		"retiring, still in the file":     {doc: doc(list(two), document.PhaseRetire), set: set(two, one, two), hint: "has left the bundle"},
		"retired, still in the file":      {doc: doc(list(two), "", ended("done", one, two)), set: set(two, one, two), hint: "with rotation p"},
		"aborted, still in the file":      {doc: doc(list(one), "", ended("aborted", one, two)), set: set(one, one, two), hint: "was aborted"},
		"aborted, and added again":        {doc: doc(list(one), "", ended("aborted", one, two)), set: set(one, one, two), seen: saw(set(one, one), set(one, one, two), now), want: Add},
		"aborted, and added before":       {doc: doc(list(one), "", ended("aborted", one, two)), set: set(one, one, two), seen: saw(set(one, one), set(one, one, two), now.Add(-time.Hour)), hint: "was aborted"},
		"retired, and another added":      {doc: doc(list(two), "", ended("done", one, two)), set: set(two, one, two, three), want: Add, hint: "with rotation p"},
	} {
		at := now
		if strings.Contains(name, "ended") {
			at = now.Add(2 * time.Hour)
		}
		step, err := Judge(c.doc, td, c.set, c.seen, "/files", at)
		switch {
		case c.bad != "":
			if err == nil || !strings.Contains(err.Error(), c.bad) || !strings.Contains(err.Error(), "/files") {
				t.Errorf("%s: %+v, %v; want an error with %q", name, step, err, c.bad)
			}
		case err != nil || step.Kind != c.want || !strings.Contains(step.Hint, c.hint) || c.hint == "" && step.Hint != "":
			t.Errorf("%s: %+v, %v; want %q with the hint %q", name, step, err, c.want, c.hint)
		}
		if step.Kind == Add && (step.Root == nil || ID(step.Root) == ID(one.Root)) {
			t.Errorf("%s: the root to add is %v", name, step.Root)
		}
	}
}

// under makes another issuer under a root.
func under(t *testing.T, made *ca.Created, log *audit.Log) *x509.Certificate {
	t.Helper()
	root := must(ca.NewIssuer(ca.IssuerConfig{
		Domain: td, Key: made.RootKey, Chain: []*x509.Certificate{made.Root}, LogID: ca.MinLogID, Log: log, Bundle: must(trust.NewBundle(td, 1, []*x509.Certificate{made.Root})),
	}))
	cert, _, err := root.NewIssuer(t.Context(), time.Hour, audit.Requester{})
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// TestD7RootWithTheSameKey: certified anew, it would be told from the old one by nobody.
func TestD7RootWithTheSameKey(t *testing.T) {
	log := must(audit.Open(filepath.Join(t.TempDir(), "audit.jsonl")))
	defer log.Close()
	one := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log}))
	again := must(ca.Create(t.Context(), ca.CreateConfig{Domain: td, LogID: ca.MinLogID, Log: log, RootKey: one.RootKey}))
	d := document.New()
	if err := d.Add(td, document.KindRoot, document.Key{}, nil, one.Root); err != nil {
		t.Fatal(err)
	}
	_, err := Judge(d, td, &files.Set{Chain: []*x509.Certificate{one.Issuer}, Roots: []*x509.Certificate{one.Root, again.Root}}, History{}, "/files", time.Now())
	if err == nil || !strings.Contains(err.Error(), "needs a key of its own") {
		t.Errorf("got %v", err)
	}
}
