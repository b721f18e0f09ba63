package log

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/cmd/chancery/admin"
	"github.com/chancery-project/chancery/cmd/chancery/process"
)

func auditCommand() *cobra.Command {
	var where sources
	var server admin.Flags
	var against, format string
	cmd := &cobra.Command{
		Use: "audit --against agents", Short: "Find certificates in use that no log has", Args: process.NoArgs,
		Long: "Asks the server which SVIDs its agents say they serve, and looks each up in the logs. One that no log has was not signed by\n" +
			"the servers that keep them. Exit code 1: there are such; each is named. 2: not all logs or agents could be asked.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := process.CheckFormat(format, "text", "json"); err != nil {
				return err
			}
			if against != "agents" {
				return fmt.Errorf("log audit: --against %q is not known; use --against agents", against)
			}
			server.Config = where.config
			var resp *chanceryv1.ListServedResponse
			err := server.Call(cmd.Context(), time.Minute, func(ctx context.Context, c chanceryv1.AdminClient) (err error) {
				resp, err = c.ListServed(ctx, new(chanceryv1.ListServedRequest))
				return err
			})
			if err != nil {
				return fmt.Errorf("log audit: %w", err)
			}
			return where.audit(cmd.Context(), resp, format, cmd.OutOrStdout())
		},
	}
	where.add(cmd)
	server.AddSocket(cmd)
	cmd.Flags().StringVar(&against, "against", "", "whose certificates: agents")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// inUse is a certificate that an agent says it serves.
type inUse struct {
	Serial   string    `json:"serial"`
	SPIFFEID string    `json:"spiffeId"`
	NotAfter time.Time `json:"notAfter"`
	Agents   []string  `json:"agents"`  // who serve it
	Problem  string    `json:"problem"` // why it is not the log's

	hash   string // of the certificate; hex
	logged bool   // the log has an intent of it
}

// audited is the outcome of an audit.
type audited struct {
	Agents       int      `json:"agents"`
	Certificates int      `json:"certificates"`
	NotLogged    []*inUse `json:"notLogged"`
	Omitted      uint64   `json:"omitted"` // reported, and not looked up
}

// lag is how long an entry may take from the signature into the tree.
const lag = 2 * time.Second

// audit looks up what agents serve. What is not found is looked for once more a moment later: it may be new.
func (s *sources) audit(ctx context.Context, served *chanceryv1.ListServedResponse, format string, out io.Writer) error {
	certs := collect(served)
	var missing []error
	for try := range 2 {
		readers, absent, err := s.open(ctx)
		if err != nil {
			return fmt.Errorf("log audit: %w", err)
		}
		missing = absent
		for _, r := range readers {
			if err := lookUp(ctx, r, certs); err != nil {
				missing = append(missing, err)
			}
		}
		if !slices.ContainsFunc(certs, func(c *inUse) bool { return c.fault() != "" }) || try == 1 {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(lag):
		}
	}
	v := audited{Agents: len(served.GetAgents()), Certificates: len(certs), NotLogged: []*inUse{}, Omitted: served.GetOmitted()}
	for _, c := range certs {
		if c.Problem = c.fault(); c.Problem != "" {
			v.NotLogged = append(v.NotLogged, c)
		}
	}
	if err := v.print(out, format); err != nil {
		return err
	}
	if v.Omitted > 0 {
		missing = append(missing, fmt.Errorf("%d SVIDs that agents serve were too many for the server to keep", v.Omitted))
	}
	found := fmt.Errorf("log audit: %d certificates in use are in no log", len(v.NotLogged))
	switch err := incomplete(missing); {
	case err != nil && len(v.NotLogged) > 0:
		return &process.ExitError{Code: 2, Err: errors.Join(found, err)}
	case err != nil:
		return err
	case len(v.NotLogged) > 0:
		return found
	}
	return nil
}

func (c *inUse) fault() string {
	switch {
	case !c.logged:
		return "no log has this serial"
	case c.Problem != "":
		return c.Problem
	}
	return ""
}

// collect joins what several agents serve.
func collect(served *chanceryv1.ListServedResponse) []*inUse {
	var all []*inUse
	known := map[string]*inUse{}
	for _, a := range served.GetAgents() {
		who := a.GetSpiffeId() + " at " + a.GetRemote()
		for _, x := range a.GetServed() {
			serial := hex.EncodeToString(new(big.Int).SetBytes(x.GetSerial()).Bytes())
			hash := hex.EncodeToString(x.GetCertificateHash())
			c := known[serial+hash]
			if c == nil {
				c = &inUse{Serial: serial, SPIFFEID: x.GetSpiffeId(), NotAfter: x.GetNotAfter().AsTime(), hash: hash}
				known[serial+hash] = c
				all = append(all, c)
			}
			c.Agents = append(c.Agents, who)
		}
	}
	slices.SortFunc(all, func(a, b *inUse) int { return bytes.Compare([]byte(a.SPIFFEID+a.Serial), []byte(b.SPIFFEID+b.Serial)) })
	return all
}

var serialMark = []byte(`"serial":"`)

// lookUp reads a log once and marks what it has.
func lookUp(ctx context.Context, r *verify.Reader, certs []*inUse) error {
	wanted := map[string][]*inUse{}
	for _, c := range certs {
		wanted[c.Serial] = append(wanted[c.Serial], c)
	}
	keep := func(raw []byte) bool {
		_, rest, ok := bytes.Cut(raw, serialMark)
		serial, _, end := bytes.Cut(rest, []byte(`"`))
		return ok && end && wanted[string(serial)] != nil
	}
	return r.Search(ctx, verify.Query{Keep: keep}, func(f verify.Found) error {
		for _, c := range wanted[f.Entry.Serial] {
			switch e := f.Entry; {
			case e.Event == audit.Intent && e.SPIFFEID != c.SPIFFEID:
				c.logged, c.Problem = true, "the log has this serial for "+e.SPIFFEID
			case e.Event == audit.Intent:
				c.logged = true
			case e.Event == audit.Issued && c.hash != "" && e.CertHash != c.hash:
				c.Problem = "the log has another certificate with this serial, of SHA-256 " + e.CertHash
			case e.Event == audit.Failed:
				c.Problem = "the log says that signing it failed"
			}
		}
		return nil
	})
}

func (v *audited) print(out io.Writer, format string) error {
	if format == "json" {
		return process.WriteJSON(out, v)
	}
	fmt.Fprintf(out, "%d agents serve %d certificates; %d of them are in no log\n", v.Agents, v.Certificates, len(v.NotLogged))
	for _, c := range v.NotLogged {
		fmt.Fprintln(out, process.Printable(fmt.Sprintf("%s  serial %s  until %s  served by %s: %s",
			c.SPIFFEID, c.Serial, c.NotAfter.Format(time.RFC3339), c.Agents[0], c.Problem)))
	}
	return nil
}
