package ceremony

import (
	"cmp"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/tbs"
)

// Print says in words what every certificate and CRL will hold, byte for byte what Sign signs.
//
// In a dry run three things are not known yet: serial numbers, keys that are to be made, with the key IDs and subjects
// that follow from them, and times that the file leaves to the moment of signing. They are named, and not shown with
// values that will be others: two dry runs of one file print the same.
func (p *Plan) Print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Ceremony of trust domain %s: %d steps, into the new folder %s\n", p.domain, len(p.steps), p.config.Output)
	fmt.Fprintf(&b, "SHA-256 of the file: %s\n", p.options.Digest)
	for _, e := range p.config.Existing {
		cert := p.known[e.Name].cert
		fmt.Fprintf(&b, "\nExisting authority %s, in %s\n", e.Name, e.Certificate)
		line(&b, "subject", cert.Subject.String())
		line(&b, "valid", span(cert.NotBefore, cert.NotAfter))
		line(&b, "key", keyText(cert))
		line(&b, "key ID", hex.EncodeToString(cert.SubjectKeyId))
		if e.Key == "" {
			line(&b, "signs", "nothing here: its key is not given")
		} else {
			line(&b, "signs", "with the key in "+e.Key)
		}
	}
	for i, s := range p.steps {
		fmt.Fprintf(&b, "\nStep %d: %s, %s, into %s.pem\n", i+1, s.Name, kindNames[s.Kind], s.Name)
		if s.Kind == kindCRL {
			p.printCRL(&b, s)
		} else {
			p.printCertificate(&b, s)
		}
	}
	text := b.String()
	if p.options.Log == nil {
		text = p.withoutMadeKeys(text) + "\nDry run: nothing was signed, logged or written. --sign does what stands above.\n"
	}
	_, err := io.WriteString(w, text)
	return err
}

var kindNames = map[string]string{kindRoot: "a root", kindIssuer: "an issuer", kindCross: "a cross-certificate", kindCRL: "a CRL"}

// withoutMadeKeys replaces the IDs of keys that only this dry run has.
func (p *Plan) withoutMadeKeys(text string) string {
	for _, s := range p.steps {
		if s.made.key == nil || s.Key.File != "" {
			continue
		}
		id := hex.EncodeToString(s.made.draft.Certificate().SubjectKeyId)
		text = strings.ReplaceAll(text, id, "<ID of "+s.Name+"-key.pem>")
		text = strings.ReplaceAll(text, id[:12], "<ID of "+s.Name+"-key.pem>") // in subjects
	}
	return text
}

func (p *Plan) printCertificate(b *strings.Builder, s *step) {
	c := s.made.draft.Certificate()
	line(b, "version", strconv.Itoa(c.Version))
	line(b, "serial", p.serialText(c))
	line(b, "signature", c.SignatureAlgorithm.String()+by(s))
	line(b, "issuer", c.Issuer.String())
	line(b, "subject", c.Subject.String())
	if s.Kind == kindCross {
		line(b, "", "the same subject and key as "+s.Of)
	}
	if p.options.Log == nil && s.NotBefore == "" {
		line(b, "valid", fmt.Sprintf("from when it is signed, less %s, to %s", ca.DefaultBackdate, stamp(c.NotAfter)))
	} else {
		line(b, "valid", span(c.NotBefore, c.NotAfter))
	}
	key := keyText(c)
	switch {
	case s.Key == nil:
	case s.Key.File != "":
		key += ", in " + s.Key.File
	default:
		key += ", to be made, into " + s.Name + "-key.pem with mode 0600"
	}
	line(b, "key", key)
	line(b, "SPIFFE ID", c.URIs[0].String())
	pathLen := "any number of CAs below it"
	if c.MaxPathLen >= 0 {
		pathLen = fmt.Sprintf("path length %d", c.MaxPathLen)
	}
	line(b, "CA", fmt.Sprintf("%v, %s", c.IsCA, pathLen))
	line(b, "key usage", usages(c.KeyUsage))
	line(b, "key ID", hex.EncodeToString(c.SubjectKeyId))
	line(b, "issuer key", hex.EncodeToString(c.AuthorityKeyId))
	line(b, "extensions", extensions(c))
}

// usages names all bits of a key usage (RFC 5280 section 4.2.1.3), not only those that are expected.
func usages(u x509.KeyUsage) string {
	var out []string
	for bit, name := range []string{"digitalSignature", "contentCommitment", "keyEncipherment", "dataEncipherment", "keyAgreement",
		"keyCertSign", "cRLSign", "encipherOnly", "decipherOnly"} {
		if u&(1<<bit) != 0 {
			out = append(out, name)
		}
	}
	return strings.Join(out, ", ")
}

// extensions names every extension, by number if it is none that should be there.
func extensions(c *x509.Certificate) string {
	names := map[string]string{
		tbs.OIDKeyUsage.String(): "key usage", tbs.OIDBasic.String(): "basic constraints", tbs.OIDSKI.String(): "key ID",
		tbs.OIDAKI.String(): "issuer key", tbs.OIDSAN.String(): "SPIFFE ID",
	}
	var out []string
	for _, e := range c.Extensions {
		name := cmp.Or(names[e.Id.String()], e.Id.String())
		if e.Critical {
			name += " (critical)"
		}
		out = append(out, name)
	}
	return strings.Join(out, ", ")
}

func (p *Plan) serialText(c *x509.Certificate) string {
	if p.options.Log == nil {
		return "drawn when signed: 20 octets, 128 bits of them random"
	}
	return hex.EncodeToString(c.SerialNumber.Bytes())
}

// by says whose key signs a step.
func by(s *step) string {
	if s.Kind == kindRoot {
		return " by itself"
	}
	return " by " + s.By
}

func (p *Plan) printCRL(b *strings.Builder, s *step) {
	c := s.made.draft.CRL()
	line(b, "version", "2")
	line(b, "number", c.Number.String())
	line(b, "signature", s.made.draft.CRL().SignatureAlgorithm.String()+by(s))
	line(b, "issuer", c.Issuer.String())
	if p.options.Log == nil && s.ThisUpdate == "" {
		line(b, "valid", "from when it is signed to "+stamp(c.NextUpdate))
	} else {
		line(b, "valid", span(c.ThisUpdate, c.NextUpdate))
	}
	line(b, "issuer key", hex.EncodeToString(c.AuthorityKeyId))
	if len(c.RevokedCertificateEntries) == 0 {
		line(b, "revoked", "none")
	}
	names := map[int]string{}
	for _, name := range slices.Sorted(maps.Keys(reasons)) {
		names[reasons[name]] = name
	}
	for _, e := range c.RevokedCertificateEntries {
		text := hex.EncodeToString(e.SerialNumber.Bytes()) + " at " + stamp(e.RevocationTime)
		if e.ReasonCode != 0 {
			text += ", " + names[e.ReasonCode]
		}
		line(b, "revoked", text)
	}
}

// line adds one property. Names come from files that others may have written, and go to a terminal.
func line(b *strings.Builder, name, value string) {
	value = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, value)
	fmt.Fprintf(b, "  %-10s  %s\n", name, value)
}

func keyText(c *x509.Certificate) string {
	t, err := ca.TypeOf(c.PublicKey)
	if err != nil {
		return err.Error()
	}
	return string(t)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func span(from, to time.Time) string {
	return fmt.Sprintf("from %s to %s (%.0f days)", stamp(from), stamp(to), to.Sub(from).Hours()/24)
}
