package svid

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// svidJSON is one SVID in JSON.
type svidJSON struct {
	SPIFFEID  string    `json:"spiffeId"`
	Serial    string    `json:"serial"` // hex
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	Issuer    string    `json:"issuer"`
	Hint      string    `json:"hint"`
}

// crlJSON is one CRL in JSON.
type crlJSON struct {
	Issuer     string    `json:"issuer"`
	Number     string    `json:"number"`
	ThisUpdate time.Time `json:"thisUpdate"`
	NextUpdate time.Time `json:"nextUpdate"`
	Revoked    []string  `json:"revoked"` // serials, hex
}

// svidsJSON is the whole answer in JSON; bundles hold PEM certificates by trust domain.
type svidsJSON struct {
	SVIDs   []svidJSON          `json:"svids"`
	Bundles map[string][]string `json:"bundles"`
	CRLs    []crlJSON           `json:"crls"`
}

// show writes and prints one answer; again means that more follow.
func (f *flags) show(out io.Writer, c *workloadapi.X509Context, again bool) error {
	lists, err := f.crls.parse()
	if err != nil {
		return err
	}
	if f.write != "" {
		if err := writeSVID(f.write, c, f.crls.pem()); err != nil {
			return fmt.Errorf("--write %s: %w", f.write, err)
		}
	}
	var text bytes.Buffer // written at once, so that what cannot be written is an error
	switch {
	case f.format == "json" && again:
		return json.NewEncoder(out).Encode(toJSON(c, lists))
	case f.format == "json":
		return process.WriteJSON(out, toJSON(c, lists))
	case f.format == "pem":
		if err := showPEM(&text, c); err != nil {
			return err
		}
	default:
		showText(&text, c, lists)
	}
	_, err = out.Write(text.Bytes())
	return err
}

func toJSON(c *workloadapi.X509Context, crls []*x509.RevocationList) svidsJSON {
	j := svidsJSON{SVIDs: []svidJSON{}, Bundles: map[string][]string{}, CRLs: []crlJSON{}}
	for _, s := range c.SVIDs {
		leaf := s.Certificates[0]
		j.SVIDs = append(j.SVIDs, svidJSON{
			s.ID.String(), fmt.Sprintf("%x", leaf.SerialNumber.Bytes()), leaf.NotBefore.UTC(), leaf.NotAfter.UTC(), leaf.Issuer.String(), s.Hint,
		})
	}
	for _, b := range c.Bundles.Bundles() {
		var certs []string
		for _, r := range b.X509Authorities() {
			certs = append(certs, string(trust.EncodeCertificates(r)))
		}
		j.Bundles[b.TrustDomain().Name()] = certs
	}
	for _, l := range crls {
		list := crlJSON{l.Issuer.String(), fmt.Sprint(l.Number), l.ThisUpdate.UTC(), l.NextUpdate.UTC(), []string{}}
		for _, e := range l.RevokedCertificateEntries {
			list.Revoked = append(list.Revoked, fmt.Sprintf("%x", e.SerialNumber.Bytes()))
		}
		j.CRLs = append(j.CRLs, list)
	}
	return j
}

func showText(out io.Writer, c *workloadapi.X509Context, crls []*x509.RevocationList) {
	for _, s := range c.SVIDs {
		leaf := s.Certificates[0]
		fmt.Fprintf(out, "%s\n  serial %x\n  valid  %s to %s (%s left)\n  issuer %s\n", s.ID, leaf.SerialNumber.Bytes(),
			leaf.NotBefore.UTC().Format(time.RFC3339), leaf.NotAfter.UTC().Format(time.RFC3339),
			time.Until(leaf.NotAfter).Round(time.Second), process.Printable(leaf.Issuer.String()))
	}
	for _, b := range c.Bundles.Bundles() {
		for _, r := range b.X509Authorities() {
			fmt.Fprintf(out, "trusts %s by %s until %s\n", b.TrustDomain().Name(), process.Printable(r.Subject.String()), r.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	for _, l := range crls {
		fmt.Fprintf(out, "CRL %s of %s revokes %d, until %s\n", l.Number, process.Printable(l.Issuer.String()), len(l.RevokedCertificateEntries), l.NextUpdate.UTC().Format(time.RFC3339))
	}
}

func showPEM(out io.Writer, c *workloadapi.X509Context) error {
	for _, s := range c.SVIDs {
		key, err := trust.EncodeKey(s.PrivateKey)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%s%s", trust.EncodeCertificates(s.Certificates...), key)
	}
	roots, err := ownRoots(c)
	if err != nil {
		return err
	}
	_, err = out.Write(roots)
	return err
}

// ownRoots returns the roots of the default SVID's trust domain, in PEM: in one flat pool there is no other (decision D24).
func ownRoots(c *workloadapi.X509Context) ([]byte, error) {
	bundle, err := c.Bundles.GetX509BundleForTrustDomain(c.DefaultSVID().ID.TrustDomain())
	if err != nil {
		return nil, fmt.Errorf("reading the agent's answer: %w", err)
	}
	return trust.EncodeCertificates(bundle.X509Authorities()...), nil
}
