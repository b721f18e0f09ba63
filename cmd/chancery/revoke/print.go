package revoke

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

// predicateJSON is a predicate in -o json.
type predicateJSON struct {
	Serial       string     `json:"serial,omitempty"`
	SPIFFEID     string     `json:"spiffeId,omitempty"`
	IssuedBefore *time.Time `json:"issuedBefore,omitempty"`
	Node         string     `json:"node,omitempty"`
}

func predicateOf(p *chanceryv1.Predicate) predicateJSON {
	out := predicateJSON{Serial: p.GetSerial(), SPIFFEID: p.GetSpiffeId(), Node: p.GetNode()}
	if t := p.GetIssuedBefore(); t != nil {
		at := t.AsTime()
		out.IssuedBefore = &at
	}
	return out
}

func (p predicateJSON) String() string {
	var words []string
	if p.Serial != "" {
		words = append(words, "serial "+p.Serial)
	}
	if p.SPIFFEID != "" {
		words = append(words, p.SPIFFEID)
	}
	if p.Node != "" {
		words = append(words, "node "+p.Node)
	}
	if p.IssuedBefore != nil {
		words = append(words, "issued before "+p.IssuedBefore.Format(time.RFC3339))
	}
	return process.Printable(strings.Join(words, ", "))
}

// certificateJSON is a certificate in -o json.
type certificateJSON struct {
	Serial   string    `json:"serial"`
	SPIFFEID string    `json:"spiffeId"`
	Node     string    `json:"node,omitempty"`
	NotAfter time.Time `json:"notAfter"`
}

// revokedJSON is `chancery revoke -o json`.
type revokedJSON struct {
	Revocation   string            `json:"revocation,omitempty"` // empty after a dry run
	DryRun       bool              `json:"dryRun"`
	Predicate    predicateJSON     `json:"predicate"`
	Count        uint64            `json:"count"`
	Certificates []certificateJSON `json:"certificates"` // at most 1,000
	audienceJSON
	Delayed string `json:"delayed,omitempty"`
}

// audienceJSON says who has it.
type audienceJSON struct {
	Agents       uint32   `json:"agents"`
	Acknowledged uint32   `json:"acknowledged"`
	NotEnforcing []string `json:"notEnforcing"`
	MissingLogs  []string `json:"missingLogs"`
}

func printRevoked(out io.Writer, format string, q *chanceryv1.RevokeRequest, r *chanceryv1.RevokeResponse) error {
	v := revokedJSON{
		Revocation: r.GetRevocation(), DryRun: q.GetDryRun(), Predicate: predicateOf(q.GetPredicate()), Count: r.GetCount(), Certificates: []certificateJSON{},
		audienceJSON: audienceJSON{r.GetAgents(), r.GetAcknowledged(), orEmpty(r.GetNotEnforcing()), orEmpty(r.GetMissingLogs())}, Delayed: r.GetDelayed(),
	}
	for _, c := range r.GetCertificates() {
		v.Certificates = append(v.Certificates, certificateJSON{c.GetSerial(), c.GetSpiffeId(), c.GetNode(), c.GetNotAfter().AsTime()})
	}
	if format == "json" {
		if err := process.WriteJSON(out, v); err != nil {
			return err
		}
		return v.incomplete(v.Delayed)
	}
	if v.DryRun {
		fmt.Fprintf(out, "DRY RUN: nothing is changed. Revoking %s would mean ", v.Predicate)
	} else {
		fmt.Fprintf(out, "Revoked: %s (revocation %s). It means ", v.Predicate, v.Revocation)
	}
	fmt.Fprintf(out, "%s.\n", certificates(v.Count))
	for _, c := range v.Certificates {
		node := ""
		if c.Node != "" {
			node = "  node " + c.Node
		}
		fmt.Fprintf(out, "  %s  %s  until %s\n", c.Serial, process.Printable(c.SPIFFEID+node), c.NotAfter.Format(time.RFC3339))
	}
	if n := v.Count - uint64(len(v.Certificates)); n > 0 {
		fmt.Fprintf(out, "  and %d more\n", n)
	}
	switch {
	case v.Count == 0 && v.Predicate.Serial != "":
		fmt.Fprintln(out, "No log here has a certificate with this serial that has not ended. It goes onto every CRL that there is all the same.")
	case v.Predicate.SPIFFEID != "" && !v.DryRun:
		fmt.Fprintf(out, "%s gets no new certificate until `chancery restore %s`.\n", v.Predicate, v.Predicate)
	}
	v.print(out)
	return v.incomplete(v.Delayed)
}

func certificates(n uint64) string {
	switch n {
	case 0:
		return "no certificate that has not ended"
	case 1:
		return "1 certificate"
	}
	return fmt.Sprintf("%d certificates", n)
}

// print says who has it, and who does not act on it.
func (a audienceJSON) print(out io.Writer) {
	fmt.Fprintf(out, "Agents: %d connected to this server, %d of them have the last CRLs.\n", a.Agents, a.Acknowledged)
	if len(a.NotEnforcing) > 0 {
		fmt.Fprintln(out, "Not enforced by:")
		for _, w := range a.NotEnforcing {
			fmt.Fprintf(out, "  - %s\n", process.Printable(w))
		}
	}
	fmt.Fprintln(out, "Connections that stand go on until their next handshake. Consumers that look at no CRL, such as Envoy's SPIFFE validator (SDS\n"+
		"name ALL), accept what is revoked until it ends.")
}

// incomplete is the error with exit code 2, if something was left out.
func (a audienceJSON) incomplete(delayed string) error {
	var words []string
	if len(a.MissingLogs) > 0 {
		words = append(words, "INCOMPLETE: what these have issued is not looked at here: "+strings.Join(a.MissingLogs, "; "))
	}
	if delayed != "" {
		words = append(words, "INCOMPLETE: what is stored is not all in effect yet; the server tries again: "+delayed)
	}
	if len(words) == 0 {
		return nil
	}
	return &process.ExitError{Code: 2, Err: errors.New(strings.Join(words, ". "))}
}

func orEmpty(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// revocationJSON is one revocation in `revoke list -o json`.
type revocationJSON struct {
	ID        string        `json:"id"`
	Predicate predicateJSON `json:"predicate"`
	Reason    string        `json:"reason,omitempty"`
	Time      time.Time     `json:"time"`
	Actor     string        `json:"actor"`
	Restored  *time.Time    `json:"restored,omitempty"`
	Count     uint64        `json:"count"`
}

func printList(out io.Writer, format string, r *chanceryv1.ListRevocationsResponse) error {
	v := struct {
		Revocations []revocationJSON `json:"revocations"`
		audienceJSON
		Delayed string `json:"delayed,omitempty"`
	}{[]revocationJSON{}, audienceJSON{r.GetAgents(), r.GetAcknowledged(), orEmpty(r.GetNotEnforcing()), orEmpty(r.GetMissingLogs())}, r.GetDelayed()}
	for _, x := range r.GetRevocations() {
		one := revocationJSON{x.GetId(), predicateOf(x.GetPredicate()), x.GetReason(), x.GetTime().AsTime(), x.GetActor(), nil, x.GetCount()}
		if t := x.GetRestored(); t != nil {
			at := t.AsTime()
			one.Restored = &at
		}
		v.Revocations = append(v.Revocations, one)
	}
	if format == "json" {
		if err := process.WriteJSON(out, v); err != nil {
			return err
		}
		return v.incomplete(v.Delayed)
	}
	if len(v.Revocations) == 0 {
		fmt.Fprintln(out, "Nothing is revoked.")
	}
	for _, x := range v.Revocations {
		words := []string{x.ID, x.Time.Format(time.RFC3339), x.Predicate.String(), certificates(x.Count), "by " + x.Actor}
		if x.Reason != "" {
			words = append(words, "reason "+x.Reason)
		}
		if x.Restored != nil {
			words = append(words, "restored "+x.Restored.Format(time.RFC3339))
		}
		fmt.Fprintln(out, process.Printable(strings.Join(words, "  ")))
	}
	v.print(out)
	return v.incomplete(v.Delayed)
}
