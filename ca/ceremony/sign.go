package ceremony

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/trust"
)

// Sign does what the plan says: it signs everything, checks the signatures and writes the results. The output folder
// appears last, complete. After an error or a crash there is none; the audit log then has the intents, and results, of
// what was signed and is lost.
func (p *Plan) Sign(ctx context.Context) error {
	if p.options.Log == nil {
		return errors.New("the plan was made for a dry run")
	}
	out, err := newSet(p.path(p.config.Output))
	if err != nil {
		return err
	}
	if err = p.record(""); err == nil {
		err = p.signInto(ctx, out)
	}
	if err != nil {
		return errors.Join(err, out.drop(), p.record("CEREMONY_FAILED"))
	}
	return nil
}

// record says in the audit log that the ceremony begins, or that it ended without a result.
func (p *Plan) record(reason string) error {
	var names []string
	for _, s := range p.steps {
		names = append(names, s.Kind+" "+s.Name)
	}
	return p.options.Log.Append(audit.Record{
		Event: audit.Admin, Actor: p.options.Actor, SPIFFEID: p.domain.URI(), Reason: reason,
		Detail: fmt.Sprintf("ceremony of file %s: %s", p.options.Digest, strings.Join(names, ", ")),
	})
}

func (p *Plan) signInto(ctx context.Context, out *set) error {
	for _, s := range p.steps { // keys first: one that could not be kept should sign nothing
		if s.made.key == nil || s.Key.File != "" {
			continue
		}
		text, err := trust.EncodeKey(s.made.key)
		if err != nil {
			return err
		}
		if err := out.write(s.Name+"-key.pem", text, 0o600); err != nil {
			return err
		}
	}
	for _, s := range p.steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.sign(ctx); err != nil {
			return fmt.Errorf("%s (%s): %w", s.field, s.Name, err)
		}
		kind := "CERTIFICATE"
		if s.Kind == kindCRL {
			kind = "X509 CRL"
		}
		if err := out.write(s.Name+".pem", pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: s.made.der}), 0o644); err != nil {
			return err
		}
	}
	if err := p.verify(); err != nil {
		return err
	}
	// The results above were noted without waiting; with this line they are durable, before anybody can use what was made.
	if err := p.options.Log.Append(audit.Record{
		Event: audit.Admin, Actor: p.options.Actor, SPIFFEID: p.domain.URI(), Detail: "ceremony signed; results go to " + p.path(p.config.Output),
	}); err != nil {
		return err
	}
	return out.commit()
}

func (s *step) sign(ctx context.Context) error {
	token, err := s.made.draft.Prepare()
	if err != nil {
		return err
	}
	if s.Kind == kindCRL {
		s.made.der, err = s.issuer.IssueCRL(ctx, token)
		return err
	}
	c, err := s.issuer.Issue(ctx, token)
	if err != nil {
		return err
	}
	s.made.der = c.DER
	return nil
}

// verify checks what was signed as a stranger would: every signature, and a path from each certificate to a root.
func (p *Plan) verify() error {
	roots, others := x509.NewCertPool(), x509.NewCertPool()
	signers := map[string]*x509.Certificate{}
	var certs []*x509.Certificate
	for name, a := range p.known {
		for _, c := range a.chain {
			certs = append(certs, c)
			signers[name] = a.chain[0]
		}
	}
	for _, s := range p.steps {
		if s.Kind == kindCRL {
			continue
		}
		c, err := x509.ParseCertificate(s.made.der)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		certs, signers[s.Name] = append(certs, c), c
	}
	for _, c := range certs {
		if bytes.Equal(c.RawSubject, c.RawIssuer) {
			roots.AddCert(c)
		} else {
			others.AddCert(c)
		}
	}
	for _, s := range p.steps {
		if s.Kind == kindCRL {
			crl, err := x509.ParseRevocationList(s.made.der)
			if err == nil {
				err = crl.CheckSignatureFrom(signers[s.By])
			}
			if err != nil {
				return fmt.Errorf("checking CRL %s: %w", s.Name, err)
			}
			continue
		}
		if _, err := signers[s.Name].Verify(x509.VerifyOptions{
			Roots: roots, Intermediates: others, CurrentTime: time.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
		}); err != nil {
			return fmt.Errorf("checking certificate %s: %w", s.Name, err)
		}
	}
	return nil
}
