package signers

import (
	"context"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/pkcs10"
	"github.com/chancery-project/chancery/trust"
)

// Named is what a CertificateSigningRequest says that has been approved.
type Named struct {
	Object   string   // name and UID of the request, for the audit log
	User     string   // who made it, as the API server knows
	Request  []byte   // PKCS #10 in PEM
	Usages   []string // as the API spells them
	Lifetime time.Duration
}

// usages are those that a certificate of a workload has; of an RSA key key encipherment if the profile says so.
var usages = []string{"digital signature", "key encipherment", "server auth", "client auth"}

// Named decides on an approved CertificateSigningRequest and has it signed. The name is the request's: the one exception from invariant 2,
// bounded by what the config allows its requester (decision D17).
func (s *Signer) Named(ctx context.Context, n Named) (*Signed, *Refusal) {
	who := audit.Requester{Method: "CertificateSigningRequest", User: n.User, Cluster: s.config.Cluster, CredentialID: "CertificateSigningRequest " + n.Object}
	signed, asked, r := s.named(ctx, n, who)
	if r != nil {
		s.denied(r, asked, who)
	}
	return signed, r
}

func (s *Signer) named(ctx context.Context, n Named, who audit.Requester) (_ *Signed, asked string, _ *Refusal) {
	allowed := s.config.Requesters[n.User]
	if allowed == nil {
		return nil, "", never(ReasonRequester, "user %.200q may not have certificates of this signer: it is not listed in signing.csrSigner.requesters of the server's config", n.User)
	}
	for _, u := range n.Usages {
		if !slices.Contains(usages, u) {
			return nil, "", never(ReasonUsages, "usage %.100q is not issued; the usages are %s", u, strings.Join(usages, ", "))
		}
	}
	id, req, r := readNamed(n.Request)
	if r != nil {
		return nil, "", r
	}
	switch {
	case id.Reserved():
		return nil, id.String(), never(ReasonNames, "paths under /chancery/ are reserved; %s is never issued this way", id)
	case !allowed.AllowsPath(id):
		return nil, id.String(), never(ReasonNames, "user %.200q may not have %s: its ids in signing.csrSigner.requesters do not cover that", n.User, id)
	}
	ttl := n.Lifetime
	if ttl > 0 {
		ttl = max(ttl, ca.MinTTL)
	}
	signed, r := s.sign(ctx, order{id: id, exact: true, key: req.PublicKey, ttl: ttl, root: s.config.Root, requester: who, node: s.config.Cluster})
	if r != nil && r.Reason == csr.ReasonIdentity { // such as another trust domain: the request will always ask for it
		r = never(ReasonNames, "%s", r.Detail)
	}
	return signed, id.String(), r
}

// readNamed reads a request for one SPIFFE ID.
func readNamed(text []byte) (trust.ID, *pkcs10.Request, *Refusal) {
	if len(text) > 2*maxCSR { // before the decoder works on it
		return trust.ID{}, nil, never(ReasonRequest, "spec.request has %d bytes of PEM; at most %d are read", len(text), 2*maxCSR)
	}
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || strings.TrimSpace(string(rest)) != "" {
		return trust.ID{}, nil, never(ReasonRequest, "spec.request should be one PEM block of type CERTIFICATE REQUEST")
	}
	req, r := parse(block.Bytes)
	if r != nil {
		return trust.ID{}, nil, r
	}
	if err := noAuthority(block.Bytes); err != nil {
		return trust.ID{}, nil, never(ReasonRequest, "%v", err)
	}
	names, err := namesOf(req)
	switch {
	case err != nil:
		return trust.ID{}, nil, never(ReasonNames, "%v", err)
	case len(names) != 1:
		return trust.ID{}, nil, never(ReasonNames, "the request has %d URIs; an SVID has exactly one, its SPIFFE ID", len(names))
	}
	id, err := trust.ParseID(names[0])
	if err != nil {
		return trust.ID{}, nil, never(ReasonNames, "%v", err)
	}
	return id, req, nil
}

// noAuthority refuses a request for a signing certificate. None would be given; but who asks for one should hear that.
func noAuthority(der []byte) error {
	x, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return fmt.Errorf("the PKCS #10 request does not parse: %w", err)
	}
	for _, e := range x.Extensions {
		if !e.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 19}) {
			continue
		}
		var constraints struct {
			IsCA       bool `asn1:"optional"`
			MaxPathLen int  `asn1:"optional,default:-1"`
		}
		if rest, err := asn1.Unmarshal(e.Value, &constraints); err != nil || len(rest) > 0 || constraints.IsCA {
			return errors.New("the request asks for a CA certificate (basicConstraints); this signer issues none")
		}
	}
	return nil
}

// namesOf returns the URIs that a request names. Any other name is an error: crypto/x509 skips some types of names in silence. Istio's
// requests have an organisation with an empty value, which names nobody.
func namesOf(req *pkcs10.Request) (uris []string, err error) {
	for _, a := range req.Subject {
		if len(a.Value) > 0 {
			return nil, fmt.Errorf("the request's subject has %.80q; leave the subject empty", a.Value)
		}
	}
	if req.SAN == nil {
		return nil, nil
	}
	der, names := cryptobyte.String(req.SAN), cryptobyte.String(nil)
	if !der.ReadASN1(&names, cbasn1.SEQUENCE) || !der.Empty() {
		return nil, errors.New("the request's subject alternative names do not parse")
	}
	for !names.Empty() {
		var name cryptobyte.String
		var tag cbasn1.Tag
		switch {
		case !names.ReadAnyASN1(&name, &tag):
			return nil, errors.New("the request's subject alternative names do not parse")
		case tag != cbasn1.Tag(6).ContextSpecific():
			return nil, fmt.Errorf("the request asks for a name of type %d (%.80q); only a SPIFFE ID as a URI is issued", tag&0x1f, []byte(name))
		case len(uris) > 0:
			return nil, errors.New("the request has more than one URI; an SVID has exactly one")
		}
		uris = append(uris, string(name))
	}
	return uris, nil
}
