package rotate

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// lines are lines of text for people. What others wrote is made printable as a line is added.
type lines []string

func (l *lines) add(format string, args ...any) {
	*l = append(*l, process.Printable(checkup.OneLine(fmt.Sprintf(format, args...))))
}

func (l lines) print(out io.Writer) error {
	for _, line := range l {
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func printPlan(out io.Writer, format, flags string, q *chanceryv1.StartRotationRequest, r *chanceryv1.PlanRotationResponse) error {
	p := planOf(q, r)
	if format == "json" {
		return process.WriteJSON(out, p)
	}
	var l lines
	if p.ToDomain != "" {
		l.add("A migration to %s would replace%s. Nothing has been changed.", p.ToDomain, authorities(p.FromRoot, p.FromIssuer))
	} else {
		l.add("A rotation of the %s would replace%s. Nothing has been changed.", p.Kind, authorities(p.FromRoot, p.FromIssuer))
	}
	aside := ""
	for i, x := range p.Phases {
		if l.add("%d. %-10s  %s", i+1, x.Phase, x.Does); x.Phase != phaseIssue || len(x.WaitsFor) == 0 {
			l.add("   takes:      %s", between(x.Least, x.Most))
		} else {
			aside = ", phase issue aside"
		}
		for _, w := range x.WaitsFor {
			l.add("   waits for:  %s", w)
		}
	}
	l.add("In all%s: %s, if nobody pauses it and nobody stays behind for longer than a certificate lives.", aside, between(p.Least, p.Most))
	for _, n := range p.Notes {
		l.add("Note: %s", n)
	}
	l.add("Start it with `%s%s`.", startOf(q), flags)
	return l.print(out)
}

// startOf is the command that asks for a rotation.
func startOf(q *chanceryv1.StartRotationRequest) string {
	if q.GetToDomain() == "" {
		again := "chancery rotate start --" + q.GetKind()
		if q.GetReason() != "" {
			again += " --reason " + q.GetReason()
		}
		return again
	}
	again := migrate + " start --to " + q.GetToDomain()
	if q.Share != nil {
		again += fmt.Sprintf(" --share %d", q.GetShare())
	}
	for _, ns := range q.GetNamespaces() {
		again += " --namespace " + ns
	}
	return again
}

// between writes how long something takes.
func between(least, most float64) string {
	span := func(s float64) string { return checkup.Span(time.Duration(s * float64(time.Second))) }
	switch {
	case most < 1:
		return "a moment"
	case least < 1:
		return "at most " + span(most)
	case span(least) == span(most):
		return span(most)
	}
	return span(least) + " to " + span(most)
}

// authorities names root and issuer, as far as they are known.
func authorities(root, issuer string) string {
	words := ""
	if root != "" {
		words += " root " + root
	}
	if root != "" && issuer != "" {
		words += " and"
	}
	if issuer != "" {
		words += " issuer " + issuer
	}
	return words
}

// printChanged prints what a command that changes something has led to. The flags are those with which the same server is asked again.
func printChanged(out io.Writer, format, flags, did string, r *chanceryv1.RotationStatus) error {
	s := statusOf(r)
	if format == "json" {
		return process.WriteJSON(out, s)
	}
	var l lines
	switch x := s.Rotation; {
	case x == nil && len(s.Past) > 0: // such as after an abort
		l.add("%s", pastLine(&s.Past[0]))
		l = append(l, afterwards(&s.Past[0])...)
	case x == nil:
		l.add("No rotation is under way.")
	case did == "started":
		l.add("%s has started: it replaces%s.", title(x), authorities(x.FromRoot, x.FromIssuer))
		l.add("Watch it with `%s status -w%s`.", command(x), flags)
	default:
		l = append(l, table(&s)...)
	}
	return l.print(out)
}

func printStatus(out io.Writer, format string, r *chanceryv1.RotationStatus) error {
	s := statusOf(r)
	if format == "json" {
		return process.WriteJSON(out, s)
	}
	return append(table(&s), past(&s)...).print(out)
}

// past says how rotations have ended.
func past(s *statusJSON) (l lines) {
	for i := range s.Past {
		l.add("%s", pastLine(&s.Past[i]))
	}
	return l
}

func pastLine(x *rotationJSON) string {
	took, at := "", ""
	if x.Ended != nil {
		took, at = ", after "+checkup.Span(x.Ended.Sub(x.Started)), " at "+stamp(*x.Ended)
	}
	words := fmt.Sprintf("%s, %s: %s%s%s.", title(x), why(x), x.Outcome, at, took)
	switch n := len(x.Overrides); {
	case n == 1:
		words += " A gate was overridden."
	case n > 1:
		words += fmt.Sprintf(" %d gates were overridden.", n)
	}
	return words
}

// why says who or what started a rotation.
func why(x *rotationJSON) string {
	switch x.Reason {
	case "policy":
		return "started by policy"
	case "files":
		return "started by a change of plugged-in files"
	case "compromised":
		return "COMPROMISED, started by " + x.Actor
	}
	return "started by " + x.Actor
}

// migrate is the command for migrations; phaseIssue is the phase that they alone have.
const migrate, phaseIssue = "chancery trust migrate", "issue"

// command is the one with which what is under way is changed.
func command(x *rotationJSON) string {
	if x.ToDomain != "" {
		return migrate
	}
	return "chancery rotate"
}

// title says what is under way. After a rollback a migration leads back, and keeps its name.
func title(x *rotationJSON) string {
	from, to := x.FromDomain, x.ToDomain
	if x.Back {
		from, to = to, from
	}
	if to != "" {
		return fmt.Sprintf("Migration %s from %s to %s", x.ID, from, to)
	}
	return fmt.Sprintf("Rotation %s of the %s", x.ID, x.Kind)
}

// kindOf is what to call it in the middle of a sentence.
func kindOf(x *rotationJSON) string {
	if x.ToDomain != "" {
		return "migration"
	}
	return "rotation"
}

// phases are those of a rotation, in order.
func phases(x *rotationJSON) []string {
	switch {
	case x.ToDomain != "":
		return []string{"prepare", "distribute", phaseIssue, "activate", "reissue", "retire"}
	case x.Kind == "issuer": // the root stays, so nothing leaves the bundle
		return []string{"prepare", "distribute", "activate", "reissue"}
	}
	return []string{"prepare", "distribute", "activate", "reissue", "retire"}
}

// shown is a phase as the table has it. Those of a migration have the name of what they are for.
func shown(x *rotationJSON, phase string) string {
	switch {
	case x.ToDomain == "":
	case phase == "prepare" || phase == "distribute":
		return "accept: " + phase
	case phase == "activate" || phase == "reissue":
		return "only: " + phase
	}
	return phase
}

// table shows the rotation under way.
func table(s *statusJSON) (l lines) {
	x := s.Rotation
	if x == nil {
		l.add("No rotation is under way.")
		return l
	}
	l.add("%s, %s, %s ago", title(x), why(x), checkup.Span(max(0, s.Time.Sub(x.Started))))
	if x.Back {
		l.add("ROLLED BACK: what it had brought is taken out again")
	}
	l.add("from%s", authorities(x.FromRoot, x.FromIssuer))
	if to := authorities(x.ToRoot, x.ToIssuer); to != "" {
		l.add("to  %s", to)
	}
	if x.Paused != nil {
		l.add("PAUSED by %s, %s ago: no gate passes until `%s resume`", x.PausedBy, checkup.Span(max(0, s.Time.Sub(*x.Paused))), command(x))
	}
	if x.Share != nil && !x.Back {
		l.add("new domain: %s", moved(x))
	}
	state := "done"
	for _, p := range phases(x) {
		if p != x.Phase {
			if x.Back && (p == "prepare" || p == "distribute" || p == phaseIssue) {
				continue // it went back from a later phase
			}
			l.add("  %-5s %s", state, shown(x, p))
			continue
		}
		state = "later"
		estimate := ""
		if x.PhaseEstimate != nil {
			estimate = "; estimated: " + between(0, *x.PhaseEstimate)
		}
		l.add("  now   %s, for %s%s", shown(x, p), checkup.Span(max(0, s.Time.Sub(x.Since))), estimate)
		for i := range x.Gates {
			l = append(l, gateLines(s.Time, &x.Gates[i])...)
		}
	}
	l = append(l, former(s)...)
	if x.Trouble != "" {
		l.add("TROUBLE: %s", x.Trouble)
	}
	for _, o := range x.Overrides {
		l.add("overridden: gate %s of %s, by %s at %s: %s", o.Gate, o.Phase, o.Actor, stamp(o.Time), o.Because)
	}
	l.add("%s", ends(s))
	return l
}

// moved says who is given the new domain of a migration.
func moved(x *rotationJSON) string {
	switch n := len(x.Namespaces); {
	case x.Phase == "prepare" || x.Phase == "distribute":
		return "given to nobody before everybody accepts it"
	case x.Phase != phaseIssue || *x.Share >= 100:
		return "given to all"
	case n == 0:
		return fmt.Sprintf("given to %d of 100 identities", *x.Share)
	case *x.Share == 0:
		return "given to namespaces " + strings.Join(x.Namespaces, ", ")
	}
	return fmt.Sprintf("given to namespaces %s, and to %d of 100 identities of all others", strings.Join(x.Namespaces, ", "), *x.Share)
}

// former says what still has to do with the domain that a migration leaves.
func former(s *statusJSON) (l lines) {
	last := ""
	for _, u := range s.Former {
		if u.Kind != last {
			count := ""
			if last = u.Kind; u.Count > 0 {
				count = fmt.Sprintf(" (%d in all)", u.Count)
			}
			l.add("still %s %s%s:", u.Kind, s.Rotation.FromDomain, count)
		}
		l.add("    - %s: %s", u.Who, u.Detail)
	}
	return l
}

// afterwards says what to do once a migration is done.
func afterwards(x *rotationJSON) (l lines) {
	if x.ToDomain != "" && x.Outcome == "done" && !x.Back {
		l.add("Now set trustDomain to %s in the config of each server and agent, when it suits you: %s goes on to work there. Take %s out of what names it", x.ToDomain, x.FromDomain, x.FromDomain)
		l.add("(SAN matchers, policies), and replace copies of roots.pem.")
	}
	return l
}

// ends says when a rotation ends.
func ends(s *statusJSON) string {
	x := s.Rotation
	elapsed := "elapsed " + checkup.Span(max(0, s.Time.Sub(x.Started)))
	switch {
	case x.Paused != nil:
		return elapsed + "; it does not end while it is paused"
	case x.Latest == nil:
		return elapsed + "; when it ends cannot be told"
	}
	return fmt.Sprintf("%s; it ends in %s at the latest, at %s, unless somebody pauses it", elapsed, checkup.Span(max(0, x.Latest.Sub(s.Time))), stamp(*x.Latest))
}

// barWidth is that of a progress bar.
const barWidth = 20

// bar draws how much of something is there.
func bar(have, want uint64) string {
	full := barWidth
	if want > 0 {
		full = int(min(have, want) * barWidth / want)
	}
	return "[" + strings.Repeat("#", full) + strings.Repeat("-", barWidth-full) + "]"
}

func gateLines(now time.Time, g *gateJSON) (l lines) {
	count := strings.Repeat(" ", barWidth+2)
	if g.Want > 0 {
		count = fmt.Sprintf("%s %d of %d", bar(g.Have, g.Want), g.Have, g.Want)
	}
	state := "waits"
	switch {
	case g.Overridden:
		state = "OVERRIDDEN"
	case g.Passed:
		state = "passed"
	case g.Until != nil:
		state += fmt.Sprintf(", %s at the most", checkup.Span(max(0, g.Until.Sub(now))))
	}
	l.add("          %-10s  %s  %s", g.Name, count, state)
	if g.Passed {
		return l
	}
	for _, w := range g.Waiting {
		l.add("            - %s", w)
	}
	return l
}

// short is the rotation in one line, for logs: what changes in it is worth a new line.
func short(s *statusJSON) string {
	x := s.Rotation
	name := title(x)
	words := []string{strings.ToLower(name[:1]) + name[1:], "phase " + shown(x, x.Phase)}
	if x.Back {
		words = append(words, "ROLLED BACK")
	}
	if x.Paused != nil {
		words = append(words, "PAUSED by "+x.PausedBy)
	}
	for i := range x.Gates {
		g := &x.Gates[i]
		one := g.Name + " "
		switch {
		case g.Overridden:
			one += "OVERRIDDEN"
		case g.Passed:
			one += "passed"
		default:
			one += "waits"
		}
		if g.Want > 0 {
			one += fmt.Sprintf(" (%d of %d)", g.Have, g.Want)
		}
		if !g.Passed && len(g.Waiting) > 0 {
			one += ": " + strings.Join(g.Waiting, "; ")
		}
		words = append(words, one)
	}
	if x.Trouble != "" {
		words = append(words, "TROUBLE: "+x.Trouble)
	}
	return process.Printable(checkup.OneLine(strings.Join(words, ", ")))
}
