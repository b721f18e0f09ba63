package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// say tells what an import does, and what is lost.
func (r *restoring) say(ctx context.Context, out io.Writer, next *document.Document, kept []string) {
	say := func(format string, args ...any) {
		fmt.Fprintln(out, process.Printable(checkup.OneLine(fmt.Sprintf(format, args...))))
	}
	e := r.export
	say("Export of %s: version %d, made %s by replica %s (%s ago).", strings.Join(e.TrustDomains, ", "), e.Version, e.Time.Format(time.RFC3339), e.Replica,
		checkup.Span(max(0, time.Since(e.Time))))
	for _, name := range slices.Sorted(maps.Keys(r.from.Domains)) {
		state := r.from.Domains[name]
		say("  trust domain %s: %d authorities, %d revocations", name, len(state.Authorities), len(state.Revocations))
		for i := range state.Authorities {
			a := &state.Authorities[i]
			if cert, err := a.X509(); err == nil && a.State != document.StateRetiring {
				say("    %s %s, %s, until %s", a.Kind, a.ID, a.State, cert.NotAfter.UTC().Format(time.RFC3339))
			}
		}
	}
	r.sayKeys(ctx, say)
	if r.present == nil {
		say("%s has no document; it gets version %d.", r.settings.Place(), next.Version)
		say("If a key was found to be compromised after the export, it is not tainted in it: rotate it again.")
		say("Revocations made after the export are not in it. The audit logs have them (events \"admin\", detail \"revoke\"): revoke them again.")
		return
	}
	say("%s has version %d, which is replaced by version %d.", r.settings.Place(), r.version, next.Version)
	for _, what := range kept {
		say("  kept: %s", what)
	}
	for _, what := range lost(r.present, r.from) {
		say("  lost: %s", what)
	}
}

// lost lists what a document has and another lacks.
func lost(has, gets *document.Document) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(has.Domains)) {
		old, now := has.Domains[name], gets.Domains[name]
		if now == nil {
			all = append(all, "trust domain "+name)
			continue
		}
		for i := range old.Authorities {
			a := &old.Authorities[i]
			if !slices.ContainsFunc(now.Authorities, func(b document.Authority) bool { return a.ID == b.ID }) {
				all = append(all, fmt.Sprintf("%s %s (%s) of %s", a.Kind, a.ID, a.State, name))
			}
		}
		if had, gets := old.PublicBundleKey(), now.PublicBundleKey(); had != nil && gets != nil && !bytes.Equal(had, gets) {
			all = append(all, fmt.Sprintf("the bundle key %s: agents that have pinned it take no roots and no CRLs that are signed by %s", trust.KeyFingerprint(had), trust.KeyFingerprint(gets)))
		}
		for i := range old.Revocations {
			v := &old.Revocations[i]
			at := slices.IndexFunc(now.Revocations, func(b document.Revocation) bool { return v.ID == b.ID })
			switch {
			case at < 0 && v.Restored == nil:
				all = append(all, fmt.Sprintf("the revocation of %s by %s at %s: revoke it again", v.Predicate.String(), v.Actor, v.Time.UTC().Format(time.RFC3339)))
			case at >= 0 && v.Restored != nil && now.Revocations[at].Restored == nil:
				all = append(all, fmt.Sprintf("that %s was restored: restore it again", v.Predicate.String()))
			}
		}
	}
	return all
}

// keyTime bounds the look for keys in a key store.
const keyTime = 20 * time.Second

// sayKeys says which keys in key stores the document needs, and whether they are there.
func (r *restoring) sayKeys(ctx context.Context, say func(string, ...any)) {
	refs := slices.Sorted(maps.Keys(r.from.KeyRefs()))
	if len(refs) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, keyTime)
	defer cancel()
	kept, err := r.settings.KeyPlace().Open(ctx, r.sealer, slog.New(slog.DiscardHandler))
	if err == nil && kept == nil {
		err = errors.New("the config names no key store; set `keys`")
	}
	if kept != nil {
		defer kept.Close()
	}
	for _, ref := range refs {
		why := err
		if why == nil {
			_, why = kept.Open(ctx, ref)
		}
		if why != nil {
			say("  key %s: MISSING, what it is of will not sign: %v", ref, why)
		} else {
			say("  key %s: is there", ref)
		}
	}
}
