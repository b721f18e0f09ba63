package checkup

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// The thresholds. What renews itself does so at half of its life, so neither a 7-day issuer nor a 24-hour certificate of a
// server ever has less than 2/5 left; cert-manager renews at a third, so plugged-in files get until a quarter.
const (
	warnShare     = 1.0 / 3
	warnFiles     = 1.0 / 4
	criticalShare = 1.0 / 10
	// An issuer is renewed at half of its life, and tried again each minute: a twentieth later something is wrong.
	overdueShare = 1.0 / 20
	overdueLeast = 5 * time.Minute

	slowKey      = time.Second
	silentKey    = 5 * time.Second // no answer yet; after 30 s the server itself calls the key failed
	staleKey     = 5 * time.Minute // keys are checked once a minute
	startTime    = 30 * time.Second
	lateSequence = time.Minute // checkpoints are made once a second

	shortCRL  = 3 * 24 * time.Hour // a CRL of 7 days is signed anew when it has 3.5 left
	endingCRL = 24 * time.Hour
	failCRL   = 5 * time.Minute // it is tried again each half a minute
	lateAgent = 5 * time.Minute // agents that are connected have an update within a second
)

// Judge returns what is wrong with a CA, the worst first.
func Judge(s *State) []Finding {
	var all []Finding
	all = append(all, s.judgeServer()...)
	for i := range s.Certs {
		all = append(all, s.judgeCertificate(&s.Certs[i])...)
		all = append(all, s.judgeTaint(&s.Certs[i])...)
	}
	for i := range s.Keys {
		all = append(all, s.judgeKey(&s.Keys[i])...)
	}
	all = append(all, s.judgeStore()...)
	all = append(all, s.judgeLogs()...)
	all = append(all, s.judgeCRLs()...)
	all = append(all, s.judgeRotation()...)
	all = append(all, s.judgeFederation()...)
	all = append(all, s.judgeClusters()...)
	all = append(all, s.judgeKubernetes()...)
	all = append(all, s.judgeRequests()...)
	Sort(all)
	return all
}

// young reports whether a server may not have come round to everything yet.
func (s *State) young() bool { return s.Started != nil && s.Time.Sub(*s.Started) < startTime }

// unlessStarting softens what is normal while a server starts.
func (s *State) unlessStarting(x Severity) Severity {
	if s.young() && !s.WasReady {
		return Warning
	}
	return x
}

func (s *State) judgeServer() (all []Finding) {
	if s.NotReady != "" {
		all = append(all, Found("server.not-ready", s.unlessStarting(Critical), "server of "+s.TrustDomain, "cannot issue: %s", s.NotReady))
	}
	issuing := slices.ContainsFunc(s.Certs, func(c Certificate) bool { return c.Kind == KindIssuer && c.InUse })
	if s.Document != nil && !issuing && !slices.ContainsFunc(s.Certs, func(c Certificate) bool { return c.Kind == KindRoot && c.InUse }) {
		all = append(all, Found("issuer.missing", Critical, "trust domain "+s.TrustDomain, "has no active issuer"))
	}
	return append(all, s.judgeBundleKey()...)
}

func (s *State) judgeCertificate(c *Certificate) []Finding {
	now := s.Time
	left := c.NotAfter.Sub(now)
	switch {
	case c.Kind == KindRoot && !c.InUse && left <= 0:
		return []Finding{Found("root.ended", Warning, c.Name(), "is still trusted though it ended %s ago, at %s", Span(-left), stamp(c.NotAfter))}
	case !c.InUse:
		return nil // a retired issuer may end; nothing is signed under a root that is not in use
	case now.Before(c.NotBefore):
		return []Finding{Found("certificate.not-begun", Critical, c.Name(), "begins in %s, at %s", Span(-now.Sub(c.NotBefore)), stamp(c.NotBefore))}
	case left <= 0 && !s.Running && c.Kind == KindIssuer && s.RenewedBy == RenewedByParent:
		return []Finding{Found("certificate.ended", Warning, c.Name(), "ended %s ago, at %s; a server that starts asks its parent for another one", Span(-left), stamp(c.NotAfter))}
	case left <= 0 && !s.Running && c.Kind == KindIssuer && s.RenewedBy == RenewedByServer:
		return []Finding{Found("certificate.ended", Warning, c.Name(), "ended %s ago, at %s; a server that starts makes a new one", Span(-left), stamp(c.NotAfter))}
	case left <= 0:
		return []Finding{Found("certificate.ended", Critical, c.Name(), "ended %s ago, at %s", Span(-left), stamp(c.NotAfter))}
	}
	return s.judgeLife(c, left)
}

func (s *State) judgeLife(c *Certificate, left time.Duration) []Finding {
	life, self := c.life(), s.RenewedBy == RenewedByServer
	warn := warnShare
	if s.RenewedBy == RenewedByFiles && c.Kind != KindServer {
		warn = warnFiles
	}
	share := left.Seconds() / life.Seconds()
	says := fmt.Sprintf("has %s left, %.0f %% of its life; it ends at %s", Span(left), 100*share, stamp(c.NotAfter))
	if need := s.rootNeeds(); c.Kind == KindRoot && self && left < need {
		return []Finding{Found("root.too-short", Critical, c.Name(), "%s, before what a new issuer and its certificates would need (%s)", says, Span(need))}
	}
	if share < criticalShare {
		return []Finding{Found("certificate.ending", Critical, c.Name(), "%s", says)}
	}
	late := s.Time.Sub(c.NotBefore.Add(life / 2))
	if c.Kind == KindIssuer && self && s.Running && late > max(overdueLeast, time.Duration(overdueShare*float64(life))) && !s.young() {
		return []Finding{Found("issuer.overdue", Critical, c.Name(), "should have been renewed %s ago, and %s", Span(late), says)}
	}
	if share < warn {
		return []Finding{Found("certificate.ending", Warning, c.Name(), "%s", says)}
	}
	return nil
}

// rootNeeds is how long a root should live so that a whole issuer, and a whole certificate at its end, fit under it.
func (s *State) rootNeeds() time.Duration {
	need := time.Duration(s.MaxTTL * float64(time.Second))
	for i := range s.Certs {
		if c := &s.Certs[i]; c.Kind == KindIssuer && c.InUse {
			need += c.life()
		}
	}
	return need
}

func (s *State) judgeKey(k *Key) []Finding {
	severity := Critical
	if !strings.HasPrefix(k.Name, KindIssuer+" ") {
		severity = Warning // needed at the next renewal only
	}
	subject := "key of " + k.Name
	switch {
	case k.Unknown != "":
		return []Finding{Found("unchecked", Warning, subject, "could not be checked: %s", k.Unknown)}
	case k.Error != "":
		return []Finding{Found("key.failed", severity, subject, "(%s) does not sign: %s", k.Store, k.Error)}
	case k.Waiting != nil && s.Time.Sub(*k.Waiting) > silentKey:
		return []Finding{Found("key.slow", Warning, subject, "(%s) has not answered for %s", k.Store, Span(s.Time.Sub(*k.Waiting)))}
	case k.SignSeconds > slowKey.Seconds():
		return []Finding{Found("key.slow", Warning, subject, "(%s) took %.1f s for a signature", k.Store, k.SignSeconds)}
	case s.Running && k.Waiting == nil && (k.Checked == nil && !s.young() || k.Checked != nil && s.Time.Sub(*k.Checked) > staleKey):
		return []Finding{Found("key.unwatched", Warning, subject, "was not checked within the last %s", Span(staleKey))}
	}
	return nil
}

func (s *State) judgeLogs() (all []Finding) {
	if a := s.AuditLog; a != nil {
		if a.Error != "" {
			all = append(all, Found("audit-log.failed", Critical, "audit log "+a.Path, "cannot be written: %s", a.Error))
		}
		if a.Moved {
			all = append(all, Found("audit-log.moved", Critical, "audit log "+a.Path, "is not the file that the server writes to"))
		}
	}
	l := s.IssuanceLog
	if l == nil {
		return all
	}
	subject := "issuance log " + l.Dir
	late := l.Size > l.Covered && l.Sequenced != nil && s.Time.Sub(*l.Sequenced) > lateSequence
	switch {
	case l.Error != "":
		all = append(all, Found("issuance-log.failed", Critical, subject, "cannot be written: %s", l.Error))
	case l.CheckpointError != "":
		all = append(all, Found("issuance-log.late", Warning, subject, "%d entries wait for a checkpoint: %s", l.Size-l.Covered, l.CheckpointError))
	case late:
		all = append(all, Found("issuance-log.late", Warning, subject, "%d entries have waited for a checkpoint for %s", l.Size-l.Covered, Span(s.Time.Sub(*l.Sequenced))))
	}
	return all
}

// judgeCRLs looks at CRLs that may have been made late, incompletely or not at all, and at agents that lack them.
func (s *State) judgeCRLs() (all []Finding) {
	c := s.CRLs
	if c == nil {
		return nil
	}
	const subject = "revocation"
	for _, why := range c.Off {
		all = append(all, Found("crl.off", Warning, subject, "publishes no CRL: %s", why))
	}
	for _, what := range c.Stale {
		all = append(all, Found("crl.incomplete", Warning, subject, "has a CRL that lacks something: %s", what))
	}
	if c.Error != "" && c.Failing != nil && s.Time.Sub(*c.Failing) >= failCRL {
		all = append(all, Found("crl.stale", Critical, subject, "has not been brought up to date for %s: %s", Span(s.Time.Sub(*c.Failing)), c.Error))
	}
	if c.Ends != nil && len(c.Off) == 0 && !s.young() {
		if short, left := s.crlEnds(c); short {
			severity := Warning
			if left < endingCRL {
				severity = Critical
			}
			all = append(all, Found("crl.stale", severity, subject, "has a CRL that should have been signed anew and ends in %s, at %s", Span(left), stamp(*c.Ends)))
		}
	}
	if n := c.Agents - min(c.Agents, c.Acknowledged); n > 0 && c.Published != nil && s.Time.Sub(*c.Published) >= lateAgent {
		all = append(all, Found("crl.unacknowledged", Warning, subject, "has %d of %d connected agents that lack the roots and CRLs of %s ago", n, c.Agents, Span(s.Time.Sub(*c.Published))))
	}
	return all
}

// crlEnds reports whether the first CRL to end is overdue, and what it has left. One that ends with its issuer is not.
func (s *State) crlEnds(c *CRLs) (short bool, left time.Duration) {
	left = c.Ends.Sub(s.Time)
	for i := range s.Certs {
		if x := &s.Certs[i]; (x.Kind == KindIssuer || x.Kind == KindIntermediate || x.Kind == KindRoot) && x.NotAfter.Sub(*c.Ends).Abs() < time.Minute {
			return false, left
		}
	}
	return left < shortCRL, left
}

func (s *State) judgeClusters() (all []Finding) {
	some := slices.ContainsFunc(s.Clusters, func(c Cluster) bool { return c.NotReady == "" })
	for _, c := range s.Clusters {
		switch {
		case c.NotReady == "":
		case c.WasReady && some:
			all = append(all, Found("cluster.lost", Warning, "cluster "+c.Name, "was ready and is not now: %s", c.NotReady))
		case c.WasReady:
			all = append(all, Found("cluster.lost", Critical, "cluster "+c.Name, "was ready and is not now, and no other is: %s", c.NotReady))
		default:
			all = append(all, Found("cluster.not-ready", s.unlessStarting(Critical), "cluster "+c.Name, "has not been ready since the start: %s", c.NotReady))
		}
	}
	return all
}

// Outcomes that say something of the server, not of who asked. They are those of package csr.
const (
	internal = "INTERNAL"
	busy     = "BUSY"
)

func (s *State) judgeRequests() (all []Finding) {
	if s.Requests == nil {
		return nil
	}
	for _, reason := range slices.Sorted(maps.Keys(s.Requests.Reasons)) {
		n := s.Requests.Reasons[reason]
		switch {
		case reason == internal && n.Hour > 0:
			all = append(all, Found("requests.internal", Warning, "requests", "%d ended in an internal error in the last hour", n.Hour))
		case reason == busy && n.Minute > 0:
			all = append(all, Found("requests.busy", Warning, "requests", "%d were turned away in the last minute because too many came", n.Minute))
		}
	}
	return all
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Span writes a time span for people, in two units at most.
func Span(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < 0:
		return "-" + Span(-d)
	case d >= 10*day:
		return fmt.Sprintf("%d d", d/day)
	case d >= day:
		return fmt.Sprintf("%d d %d h", d/day, d%day/time.Hour)
	case d >= time.Hour:
		return fmt.Sprintf("%d h %d min", d/time.Hour, d%time.Hour/time.Minute)
	case d >= time.Minute:
		return fmt.Sprintf("%d min %d s", d/time.Minute, d%time.Minute/time.Second)
	}
	return fmt.Sprintf("%d s", d/time.Second)
}
