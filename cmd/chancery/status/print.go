package status

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// Print prints a state for people.
func Print(out io.Writer, s *checkup.State) {
	say := func(format string, args ...any) {
		fmt.Fprintln(out, process.Printable(checkup.OneLine(fmt.Sprintf(format, args...))))
	}
	switch {
	case !s.Running:
		say("trust domain %s, as its files say", s.TrustDomain)
	case s.NotReady == "":
		say("server of trust domain %s, ready, started %s", s.TrustDomain, ago(s.Time, s.Started))
	default:
		say("server of trust domain %s, NOT READY, started %s", s.TrustDomain, ago(s.Time, s.Started))
	}
	printAuthorities(say, s)
	if r := s.Requests; r != nil {
		say("issued %s", countOf(r.Issued))
		say("refused %s", countOf(r.Refused))
		for _, reason := range slices.Sorted(maps.Keys(r.Reasons)) {
			say("  %s: %s", reason, countOf(r.Reasons[reason]))
		}
	}
	if a := s.AuditLog; a != nil {
		say("audit log %s, %d kB%s", a.Path, (a.Bytes+1023)/1024, orError(a.Error))
	}
	if l := s.IssuanceLog; l != nil {
		say("issuance log %s, %d entries, last checkpoint over %d, made %s%s%s", l.Dir, l.Size, l.Covered, ago(s.Time, l.Checkpoint), orError(l.Error), orError(l.CheckpointError))
	}
	if c := s.CRLs; c != nil {
		printCRLs(say, s.Time, c)
	}
	if r := s.Rotation; r != nil {
		printRotation(say, s.Time, r)
	}
	printFederation(say, s)
	for _, c := range s.Clusters {
		if c.NotReady == "" {
			say("cluster %s ready", c.Name)
		} else {
			say("cluster %s NOT READY", c.Name)
		}
	}
	for _, k := range [][2]string{{"signing for Kubernetes", s.Kubernetes.Signing}, {"publishing in Kubernetes", s.Kubernetes.Publishing}, {"secure naming", s.Kubernetes.Naming}} {
		if k[1] != "" {
			say("%s%s", k[0], orError(k[1]))
		}
	}
}

// printFederation prints whose roots there are beside our own, in short; `chancery trust list` says more.
func printFederation(say func(string, ...any), s *checkup.State) {
	for i := range s.Federation {
		f := &s.Federation[i]
		if f.Since == nil {
			say("federated trust domain %s, no bundle yet%s", f.TrustDomain, orError(f.Error))
			continue
		}
		say("federated trust domain %s, roots %d, bundle taken over %s%s", f.TrustDomain, f.Roots, ago(s.Time, f.Since), orError(f.Error))
	}
	if e := s.BundleEndpoint; e != nil {
		say("bundle endpoint %s%s", e.Listen, orError(e.Error))
	}
}

// printCRLs prints what is revoked, and who has it.
func printCRLs(say func(string, ...any), now time.Time, c *checkup.CRLs) {
	ends := "there are no CRLs"
	if c.Ends != nil && len(c.Off) == 0 {
		ends = fmt.Sprintf("CRLs until %s (%s left)", c.Ends.UTC().Format(time.RFC3339), checkup.Span(c.Ends.Sub(now)))
	}
	say("revocations %d, of %d certificates, %s%s", c.Revocations, c.Certificates, ends, orError(c.Error))
	say("agents %d, %d of them have the last roots and CRLs", c.Agents, c.Acknowledged)
}

// printRotation prints a rotation in short; `chancery rotate status` says more.
func printRotation(say func(string, ...any), now time.Time, r *checkup.Rotation) {
	words := fmt.Sprintf("%s, started %s, in phase %s since %s", r.Name(), ago(now, &r.Started), r.Phase, stamp(r.Since))
	if r.Back {
		words += ", ROLLED BACK"
	}
	if r.Paused != nil {
		words += ", PAUSED"
	}
	for _, g := range r.Gates {
		if g.Passed {
			continue
		}
		words += ", waits for " + g.Name
		if g.Want > 0 {
			words += fmt.Sprintf(" (%d of %d)", g.Have, g.Want)
		}
	}
	say("%s%s", words, orError(r.Trouble))
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// printAuthorities prints document, certificates and keys.
func printAuthorities(say func(string, ...any), s *checkup.State) {
	if d := s.Document; d != nil {
		say("authority document version %d, bundle generation %d", d.Version, d.Generation)
		for _, l := range d.Logs {
			if l.Key == "" {
				l.Key = "no issuance log"
			}
			say("  log %d  %s", l.ID, l.Key)
		}
		if d.BundleKey != "" {
			say("  bundle key %s%s", d.BundleKey, orError(d.BundleKeyError))
		}
		if d.Requested != nil {
			takes := "`chancery authority import` takes it"
			if s.RenewedBy == checkup.RenewedByParent {
				takes = "the parent has not signed it yet"
			}
			say("  an issuer was requested %s; %s", ago(s.Time, d.Requested), takes)
		}
	}
	if s.Store != nil {
		printStore(say, s)
	}
	say("certificates (issuer renewed by: %s)", s.RenewedBy)
	for i := range s.Certs {
		c := &s.Certs[i]
		use := ""
		if c.InUse {
			use = "  in use"
		}
		if c.Tainted != nil {
			use += "  TAINTED since " + c.Tainted.UTC().Format(time.RFC3339)
		}
		name := c.ID
		if c.Kind == checkup.KindServer {
			name = c.Subject
		}
		left := time.Duration(c.SecondsLeft) * time.Second
		say("  %-12s  %-8s  %s  until %s, %s left (%.0f %%)%s", c.Kind, c.State, name, c.NotAfter.Format(time.RFC3339), checkup.Span(left), 100*c.ShareLeft, use)
	}
	for _, k := range s.Keys {
		switch {
		case k.Unknown != "":
			say("key of %s, %s: not known: %s", k.Name, k.Store, k.Unknown)
		case k.Error != "":
			say("key of %s, %s: DOES NOT SIGN: %s", k.Name, k.Store, k.Error)
		case k.Checked == nil:
			say("key of %s, %s: not checked yet", k.Name, k.Store)
		default:
			say("key of %s, %s: signs, in %s, checked %s", k.Name, k.Store,
				time.Duration(k.SignSeconds*float64(time.Second)).Round(time.Microsecond), ago(s.Time, k.Checked))
		}
	}
}

// printStore prints the store, and the other servers on it.
func printStore(say func(string, ...any), s *checkup.State) {
	st := s.Store
	fresh := "confirmed " + ago(s.Time, st.Confirmed)
	if st.Confirmed == nil {
		fresh = "not confirmed yet"
	}
	say("store %s, %s, %s%s", st.Kind, st.Place, fresh, orError(st.Error))
	if st.Imported != nil {
		say("  restored from an export %s, by %s", ago(s.Time, st.Imported), st.By)
	}
	if st.Kind == checkup.StoreSQLite && len(st.Replicas) < 2 {
		return
	}
	for i := range st.Replicas {
		say("  %s", ReplicaLine(s.Time, &st.Replicas[i]))
	}
}

// ReplicaLine says how a replica is.
func ReplicaLine(now time.Time, r *checkup.Replica) string {
	words := []string{"replica " + r.Name, fmt.Sprintf("log %d", r.LogID)}
	if r.LogSize != nil {
		words[1] += fmt.Sprintf(" of %d entries", *r.LogSize)
	}
	switch {
	case r.Own:
		words = append(words, "this server")
	case r.Seen == nil:
		words = append(words, "never seen")
	default:
		words = append(words, "seen "+ago(now, r.Seen))
	}
	if r.Acknowledged > 0 {
		words = append(words, fmt.Sprintf("works by version %d", r.Acknowledged))
	}
	if r.Drives {
		words = append(words, "renews issuers")
	}
	if r.DeclaredDead != nil {
		words = append(words, "declared dead "+ago(now, r.DeclaredDead))
	}
	if r.Trouble != "" {
		words = append(words, "CANNOT BE USED: "+r.Trouble)
	}
	return strings.Join(words, ", ")
}

func countOf(c checkup.Count) string {
	return fmt.Sprintf("%d in the last minute, %d in the last hour, %d since the start", c.Minute, c.Hour, c.Total)
}

func orError(why string) string {
	if why == "" {
		return ""
	}
	return ", FAILS: " + why
}

func ago(now time.Time, t *time.Time) string {
	if t == nil {
		return "at an unknown time"
	}
	return checkup.Span(max(0, now.Sub(*t))) + " ago" // what is asked first may be looked at a moment later
}
