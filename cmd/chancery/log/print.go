package log

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog/verify"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

func parseQuery(args []string, since string, now time.Time) (q verify.Query, err error) {
	if since != "" {
		if q.Since, err = process.TimeOrAgo("--since", since, now); err != nil {
			return q, err
		}
	}
	switch {
	case len(args) == 0 && since == "":
		return q, errors.New("nothing to look for; give a SPIFFE ID, a serial, or --since")
	case len(args) == 0:
	case strings.HasPrefix(args[0], "spiffe://"):
		id, err := trust.ParseID(args[0])
		if err != nil {
			return q, err
		}
		q.SPIFFEID = id.String()
	default:
		q.Serial, err = process.CleanSerial(args[0])
	}
	return q, err
}

// printer prints entries that a search finds.
func printer(out io.Writer, format string) func(*verify.Reader, verify.Found) error {
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	return func(r *verify.Reader, f verify.Found) error {
		if format == "json" {
			return enc.Encode(map[string]any{"log": r.Checkpoint.Origin, "index": f.Index, "entry": json.RawMessage(f.Raw)})
		}
		_, err := fmt.Fprintf(out, "%d  %s\n", f.Index, describe(f))
		return err
	}
}

// describe says in a line what an entry says.
func describe(f verify.Found) string {
	e := f.Entry
	words := []string{e.Time.UTC().Format(time.RFC3339), fmt.Sprintf("%-6s", e.Event), e.Serial, e.SPIFFEID}
	if e.Event == audit.Intent {
		q := e.Requester
		for _, w := range [][2]string{
			{"profile", e.Profile}, {"issuer", e.Issuer}, {"by", q.Method}, {"user", q.User}, {"as", q.SPIFFEID}, {"cluster", q.Cluster}, {"pod", q.Pod},
			{"pod_uid", q.PodUID}, {"node", q.Node}, {"credential_id", q.CredentialID}, {"remote", q.Remote},
		} {
			if w[1] != "" && w[1] != e.SPIFFEID {
				words = append(words, w[0]+"="+w[1])
			}
		}
		if e.NotAfter != nil {
			words = append(words, "until="+e.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	if e.Reason != "" {
		words = append(words, e.Reason, e.Detail)
	}
	return process.Printable(strings.Join(words, " "))
}

// printProof verifies a proof and says what it proves.
func printProof(out io.Writer, p *verify.Proof, publicKey string, certificate []byte) error {
	c, found, err := p.Check(publicKey, certificate)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s has signed a tree of size %d, root %v, that holds:\n", c.Origin, c.Size, c.Root)
	for i, f := range found {
		fmt.Fprintf(out, "entry %d (%d hashes to the root): %s\n", f.Index, len(p.Entries[i].Proof), describe(f))
	}
	if certificate != nil {
		fmt.Fprintln(out, "The certificate is the one that the intent announced.")
	}
	return nil
}

// readCertificate returns the first certificate in a PEM file as DER; no file gives none.
func readCertificate(file string) ([]byte, error) {
	if file == "" {
		return nil, nil
	}
	data, err := readFile(file)
	if err != nil {
		return nil, fmt.Errorf("--cert: %w", err)
	}
	certs, err := trust.ParseCertificates(data)
	if err != nil {
		return nil, fmt.Errorf("--cert %s: %w", file, err)
	}
	return certs[0].Raw, nil
}
