package trust

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	base "github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/spiffebundle"
)

// domainJSON is a trust domain in -o json. docs/federation.md promises its shape.
type domainJSON struct {
	TrustDomain  string            `json:"trustDomain"`
	Standing     string            `json:"standing"` // own, kin, former or federated
	Sequence     *uint64           `json:"sequence,omitempty"`
	Roots        []rootJSON        `json:"roots"`
	Since        *time.Time        `json:"since,omitempty"` // when this bundle came; absent if there is none yet
	From         string            `json:"from,omitempty"`  // the URL, or the admin, that it came from
	Relationship *relationshipJSON `json:"relationship,omitempty"`
	Trouble      string            `json:"trouble,omitempty"` // why the server's bundle cannot be read
}

type rootJSON struct {
	ID        string    `json:"id"` // subject key identifier in hex
	Subject   string    `json:"subject"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	SHA256    string    `json:"sha256"` // of the certificate
}

// relationshipJSON says how a foreign bundle is kept up to date.
type relationshipJSON struct {
	URL            string     `json:"url"`
	Profile        string     `json:"profile"`
	EndpointID     string     `json:"endpointID,omitempty"`
	RefreshSeconds float64    `json:"refreshHintSeconds,omitempty"`
	LastSuccess    *time.Time `json:"lastSuccess,omitempty"` // as far as this server knows
	LastTry        *time.Time `json:"lastTry,omitempty"`
	NextTry        *time.Time `json:"nextTry,omitempty"` // absent: another server does
	Error          string     `json:"error,omitempty"`   // of the last try
}

func timeOf(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}

func domainOf(d *chanceryv1.TrustedDomain) domainJSON {
	x := domainJSON{TrustDomain: d.GetTrustDomain(), Standing: d.GetStanding(), Roots: []rootJSON{}, Since: timeOf(d.GetSince()), From: d.GetActor()}
	switch b, err := parse(d.GetTrustDomain(), d.GetBundle()); {
	case err != nil:
		x.Trouble = err.Error()
	case b != nil:
		if b.HasSequence {
			x.Sequence = &b.Sequence
		}
		x.Roots = rootsOf(b.Roots)
	}
	if r := d.GetRelationship(); r != nil {
		x.Relationship = &relationshipJSON{
			URL: r.GetUrl(), Profile: r.GetProfile(), EndpointID: r.GetEndpointSpiffeId(), RefreshSeconds: r.GetRefreshHint().AsDuration().Seconds(),
			LastSuccess: timeOf(r.GetLastSuccess()), LastTry: timeOf(r.GetLastTry()), NextTry: timeOf(r.GetNextTry()), Error: r.GetError(),
		}
	}
	return x
}

func rootsOf(certs []*x509.Certificate) []rootJSON {
	all := []rootJSON{}
	for _, c := range certs {
		sum := sha256.Sum256(c.Raw)
		all = append(all, rootJSON{hex.EncodeToString(c.SubjectKeyId), c.Subject.String(), c.NotBefore.UTC(), c.NotAfter.UTC(), hex.EncodeToString(sum[:])})
	}
	return all
}

// text makes a line out of what others wrote.
func text(s string) string { return process.Printable(checkup.OneLine(s)) }

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func printList(out io.Writer, format string, domains []*chanceryv1.TrustedDomain, now time.Time) error {
	all := []domainJSON{}
	for _, d := range domains {
		all = append(all, domainOf(d))
	}
	if format == "json" {
		return process.WriteJSON(out, map[string]any{"time": now.UTC(), "domains": all})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "TRUST DOMAIN\tSTANDING\tROOTS\tSEQUENCE\tAGE\tNEXT REFRESH\tTROUBLE")
	for i := range all {
		x := &all[i]
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", text(x.TrustDomain), text(x.Standing), len(x.Roots), x.number(), x.age(now), x.next(now), x.trouble())
	}
	return w.Flush()
}

func (x *domainJSON) number() string {
	if x.Sequence == nil {
		return "-"
	}
	return fmt.Sprint(*x.Sequence)
}

func (x *domainJSON) age(now time.Time) string {
	if x.Since == nil {
		return "-"
	}
	return checkup.Span(max(0, now.Sub(*x.Since)))
}

func (x *domainJSON) next(now time.Time) string {
	switch r := x.Relationship; {
	case x.Standing != "federated":
		return "-"
	case r == nil:
		return "never"
	case r.NextTry == nil:
		return "elsewhere" // the server that renews issuers does it
	default:
		return "in " + checkup.Span(max(0, r.NextTry.Sub(now)))
	}
}

func (x *domainJSON) trouble() string {
	switch r := x.Relationship; {
	case x.Trouble != "":
		return text(x.Trouble)
	case r != nil && r.Error != "":
		return text(r.Error)
	case x.Since == nil:
		return "there is no bundle yet"
	case len(x.Roots) == 0 && x.Standing != "former":
		return "nothing of it is trusted"
	}
	return "-"
}

// lines are lines of text for people.
type lines []string

func (l *lines) add(format string, args ...any) { *l = append(*l, text(fmt.Sprintf(format, args...))) }

func (l lines) print(out io.Writer) error {
	for _, line := range l {
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}

func printDomain(out io.Writer, format string, d *chanceryv1.TrustedDomain, now time.Time) error {
	x := domainOf(d)
	if format == "json" {
		return process.WriteJSON(out, x)
	}
	var l lines
	l.add("trust domain %s (%s)", x.TrustDomain, x.Standing)
	switch {
	case x.Since == nil:
		l.add("  bundle    there is none yet")
	case x.From != "":
		l.add("  bundle    number %s, taken over at %s (%s ago), from %s", x.number(), stamp(*x.Since), x.age(now), x.From)
	default:
		l.add("  bundle    number %s, with a root of %s (%s ago)", x.number(), stamp(*x.Since), x.age(now))
	}
	if r := x.Relationship; r != nil {
		how := r.Profile
		if r.EndpointID != "" {
			how += " as " + r.EndpointID
		}
		l.add("  endpoint  %s (%s)", r.URL, how)
		if r.LastTry != nil && r.LastSuccess != nil {
			l.add("  fetched   at %s; last tried at %s", stamp(*r.LastSuccess), stamp(*r.LastTry))
		} else if r.LastTry != nil {
			l.add("  fetched   not since this server started; last tried at %s", stamp(*r.LastTry))
		}
		l.add("  next      %s", x.next(now))
	}
	if t := x.trouble(); t != "-" {
		l.add("  trouble   %s", t)
	}
	for i := range x.Roots {
		l.add("  root      %s", x.Roots[i].line())
		l.add("            SHA-256 %s", x.Roots[i].SHA256)
	}
	return l.print(out)
}

func (r *rootJSON) line() string {
	return fmt.Sprintf("%s, %s, ends %s", r.ID, r.Subject, stamp(r.NotAfter))
}

// printBundle prints a bundle for others to read.
func printBundle(out io.Writer, form string, d *chanceryv1.TrustedDomain) error {
	b, err := parse(d.GetTrustDomain(), d.GetBundle())
	if err != nil {
		return fmt.Errorf("trust export: %w", err)
	}
	if b == nil {
		return fmt.Errorf("trust export: the server has no bundle of %s yet", d.GetTrustDomain())
	}
	if form == "pem" {
		_, err = out.Write(base.EncodeCertificates(b.Roots...))
	} else {
		_, err = fmt.Fprintf(out, "%s\n", d.GetBundle())
	}
	return err
}

func printDiff(out io.Writer, format string, from, to *spiffebundle.Bundle, gone, came []*x509.Certificate) error {
	if format == "json" {
		return process.WriteJSON(out, map[string]any{"trustDomain": from.Domain.String(), "same": len(gone)+len(came) == 0, "gone": rootsOf(gone), "came": rootsOf(came)})
	}
	var l lines
	for _, side := range []struct {
		sign  string
		roots []*x509.Certificate
	}{{"-", gone}, {"+", came}} {
		for _, r := range rootsOf(side.roots) {
			l.add("%s %s", side.sign, r.line())
		}
	}
	if len(l) == 0 {
		l.add("The roots of %s are the same, %d.", from.Domain, len(to.Roots))
	}
	if from.HasSequence && to.HasSequence && from.Sequence != to.Sequence {
		l.add("The number of the bundle goes from %d to %d.", from.Sequence, to.Sequence)
	}
	return l.print(out)
}

func printImported(out io.Writer, format string, b *spiffebundle.Bundle, changed bool) error {
	if format == "json" {
		return process.WriteJSON(out, map[string]any{"trustDomain": b.Domain.String(), "changed": changed, "roots": rootsOf(b.Roots)})
	}
	var l lines
	if !changed {
		l.add("The server has that very bundle of %s already.", b.Domain)
		return l.print(out)
	}
	l.add("The bundle of %s is taken over. Its identities are verified by these roots, %d:", b.Domain, len(b.Roots))
	for _, r := range rootsOf(b.Roots) {
		l.add("+ %s", r.line())
	}
	for _, why := range b.Ignored {
		l.add("Passed over: %s.", why)
	}
	return l.print(out)
}

func printForgotten(out io.Writer, format, domain string) error {
	if format == "json" {
		return process.WriteJSON(out, map[string]any{"trustDomain": domain, "forgotten": true})
	}
	var l lines
	l.add("%s is forgotten: no identity of it is accepted any more.", domain)
	return l.print(out)
}
