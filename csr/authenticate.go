package csr

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

// DefaultMaxRenewalAge is how long after its last token an SVID may renew itself by certificate (decision D16).
const DefaultMaxRenewalAge = 24 * time.Hour

// defaultRetry is when to try again where nobody knows better.
const defaultRetry = time.Second

// ClusterConfig is one cluster whose workloads may ask.
type ClusterConfig struct {
	Cluster       Cluster
	MaxRenewalAge time.Duration // 0 = DefaultMaxRenewalAge
}

// credentialsOf is what a call brings along.
type credentialsOf struct {
	token   string
	cluster string // metadata clusterid; empty if absent
	certs   []*x509.Certificate
	remote  string
}

func readCredentials(ctx context.Context) (credentialsOf, *Denial) {
	var c credentialsOf
	if p, ok := peer.FromContext(ctx); ok { // first, so that a refusal of the rest names its sender
		c.remote = p.Addr.String()
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			c.certs = info.State.PeerCertificates
		}
	}
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md.Get("authorization"); len(v) > 1 {
		return c, unauthenticated(ReasonTokenMalformed, "there are %d authorization values; send one", len(v))
	} else if len(v) == 1 {
		scheme, token, ok := strings.Cut(v[0], " ")
		if !ok || !strings.EqualFold(scheme, "Bearer") || token == "" {
			return c, unauthenticated(ReasonTokenMalformed, "the authorization value is not of the form: Bearer TOKEN")
		}
		c.token = token
	}
	if v := md.Get("clusterid"); len(v) > 1 {
		return c, unauthenticated(ReasonCluster, "there are %d clusterid values; send one", len(v))
	} else if len(v) == 1 {
		c.cluster = v[0]
	}
	return c, nil
}

func unauthenticated(reason, format string, args ...any) *Denial {
	return &Denial{Code: codes.Unauthenticated, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// caller is a Caller with what its new certificate will say of its last token (decision D16).
type caller struct {
	Caller
	attestation ca.Attestation
	remote      string
	shown       *x509.Certificate     // by which the caller authenticated; nil for a token
	paths       [][]*x509.Certificate // from it to roots; likewise
	svidEnds    time.Time             // as the request says, or of the certificate that the connection shows, verified or not: for admission only
}

// authenticate finds out who calls. A token comes first, since it renews the attestation; where it is refused, and
// the call also shows a valid SVID, the SVID is taken: the token of a long-lived machine may have run out.
func (s *Service) authenticate(ctx context.Context) (caller, *Denial) {
	cred, denial := readCredentials(ctx)
	if denial != nil {
		return caller{remote: cred.remote}, denial
	}
	if cred.token == "" && len(cred.certs) == 0 {
		return caller{remote: cred.remote}, unauthenticated(ReasonNoCredential, "send a token as authorization: Bearer TOKEN, or a client certificate")
	}
	var c caller
	if cred.token != "" {
		if c, denial = s.byToken(ctx, cred); denial == nil {
			return c, nil
		}
		if denial.Code != codes.Unauthenticated || len(cred.certs) == 0 {
			return caller{remote: cred.remote}, denial
		}
	}
	c, certDenial := s.byCertificate(ctx, cred)
	if certDenial == nil {
		if denial != nil {
			s.warnOfToken(c, denial)
		}
		return c, nil
	}
	if denial != nil && certDenial.Code == codes.Unauthenticated { // of two final refusals the token's says more
		denial = &Denial{Code: denial.Code, Reason: denial.Reason, Detail: denial.Detail + "; and the client certificate: " + certDenial.Error()}
		return caller{remote: cred.remote}, denial
	}
	return caller{remote: cred.remote}, certDenial
}

// authenticateApart is authenticate on a goroutine of its own. Reading tokens and certificates takes a stack many times as large as a
// stream needs that is silent for half an hour, and a stack that has grown stays with its goroutine.
func (s *Service) authenticateApart(ctx context.Context) (c caller, d *Denial) {
	var failed any
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { failed = recover() }()
		c, d = s.authenticate(ctx)
	}()
	if <-done; failed != nil {
		panic(failed) // of the call that met it
	}
	return c, d
}

// warnOfToken says that a certificate stood in for a token: what is wrong with the token, such as an audience that was
// taken out of the config, would else show only once certificates alone are not enough, for a whole fleet at a time.
func (s *Service) warnOfToken(c caller, d *Denial) {
	if s.denials.Allow() {
		s.logger.Warn("token refused; renewing by certificate until that needs a token again", "reason", d.Reason, "detail", shorten(d.Detail),
			"remote", c.remote, "spiffe_id", c.ID.String())
	}
}

func (s *Service) byToken(ctx context.Context, cred credentialsOf) (caller, *Denial) {
	name, cluster, denial := s.cluster(cred.cluster)
	if denial != nil {
		return caller{}, denial
	}
	who, err := cluster.Cluster.Authenticate(ctx, cred.token)
	if err != nil {
		return caller{}, asDenial(err)
	}
	who.Cluster, who.Method = name, MethodToken
	if who.ID, err = trust.WorkloadID(s.present(), who.Namespace, who.ServiceAccount); err != nil {
		return caller{}, unauthenticated(ReasonTokenMalformed, "namespace and service account make no SPIFFE ID: %v", err)
	}
	who.AttestedAt = time.Now()
	c := caller{Caller: who, remote: cred.remote}
	if len(cred.certs) > 0 {
		c.svidEnds = cred.certs[0].NotAfter
	}
	c.attestation = ca.Attestation{Cluster: name, Node: who.Node, Time: who.AttestedAt}
	if who.PodUID != "" {
		c.attestation.PodHash = PodHash(name, who.PodUID)
	}
	return c, nil
}

// cluster chooses by name; without one only if there is no choice (decision D18). The token's own issuer plays no part.
func (s *Service) cluster(name string) (string, ClusterConfig, *Denial) {
	if name == "" && len(s.clusters) == 1 {
		for name, c := range s.clusters {
			return name, c, nil
		}
	}
	if c, ok := s.clusters[name]; ok && name != "" {
		return name, c, nil
	}
	return "", ClusterConfig{}, unauthenticated(ReasonCluster, "clusterid %.80q is not configured here; known are %v", name, s.clusterNames())
}

func (s *Service) clusterNames() []string {
	var names []string
	for name := range s.clusters {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// byCertificate accepts a current SVID of ours for a renewal of the same identity, as long as its last token is not
// too old and its pod lives (decision D16).
func (s *Service) byCertificate(ctx context.Context, cred credentialsOf) (caller, *Denial) {
	pair, err := s.issuers()
	if err != nil {
		return caller{}, notReady(err)
	}
	id, paths, err := trust.Verify(cred.certs, trust.Only(pair.First.Bundle()), time.Now()) // of each trust domain of ours by its own roots
	if err != nil {
		return caller{}, unauthenticated(ReasonSVID, "%v", err)
	}
	namespace, account, ok := id.Workload()
	if !ok || id.Reserved() {
		return caller{}, unauthenticated(ReasonSVID, "%s is not a workload's identity", id)
	}
	att, err := ca.AttestationOf(cred.certs[0])
	if err != nil || att == nil {
		return caller{}, unauthenticated(ReasonSVID, "the certificate of %s does not say when a token last proved it; come with a token", id)
	}
	if d := cmp.Or(s.notRevoked(id, cred.certs[0]), s.notTainted(paths)); d != nil {
		return caller{}, d
	}
	cluster, ok := s.clusters[att.Cluster]
	if !ok || cred.cluster != "" && cred.cluster != att.Cluster {
		return caller{}, unauthenticated(ReasonCluster, "the certificate of %s was issued for cluster %.80q", id, att.Cluster)
	}
	limit := cluster.MaxRenewalAge
	if limit == 0 {
		limit = DefaultMaxRenewalAge
	}
	if age := time.Since(att.Time); age > limit {
		return caller{}, unauthenticated(ReasonAttestationAge, "the last token of %s was seen %s ago; after %s a token is needed", id, age.Round(time.Second), limit)
	}
	if err := cluster.Cluster.Alive(ctx, namespace, account, att.Node, att.PodHash); err != nil {
		return caller{}, asDenial(err)
	}
	return caller{remote: cred.remote, attestation: *att, shown: cred.certs[0], paths: paths, svidEnds: cred.certs[0].NotAfter, Caller: Caller{
		ID: id, Method: MethodMTLS, Cluster: att.Cluster, Namespace: namespace, ServiceAccount: account, Node: att.Node,
		CredentialID: fmt.Sprintf("serial=%x", cred.certs[0].SerialNumber.Bytes()), AttestedAt: att.Time, Ends: cred.certs[0].NotAfter,
	}}, nil
}

// notRevoked refuses a certificate that is revoked, whatever for: who has it may not be who should (decision D16). A token
// helps, unless the identity itself is revoked.
func (s *Service) notRevoked(id trust.ID, cert *x509.Certificate) *Denial {
	set := s.revocations()
	switch {
	case set.Identity(id.String()):
		return revoked(id)
	case cert == nil: // a token came
		return nil
	}
	switch revoked, sure := set.Certificate(cert); {
	case revoked:
		return unauthenticated(ReasonSVIDRevoked, "certificate %x is revoked; come with a token", cert.SerialNumber)
	case !sure:
		return notReady(errors.New("what is revoked is being read from the issuance log"))
	}
	return nil
}

// notTainted refuses a certificate that only leads to a root by way of a key which others may have: whoever has that can make one for
// anybody (decision D16). A token helps.
func (s *Service) notTainted(paths [][]*x509.Certificate) *Denial {
	for _, path := range paths {
		if !slices.ContainsFunc(path[1:], s.tainted) {
			return nil
		}
	}
	if len(paths) == 0 { // a token came
		return nil
	}
	return unauthenticated(ReasonSVIDTainted, "certificate %x leads to a root by a tainted authority only; come with a token", paths[0][0].SerialNumber)
}

// stillAllowed looks once more, before anything is signed: requests wait for their turn, those of a batch one after the other.
func (s *Service) stillAllowed(id trust.ID, c caller) *Denial {
	if d := cmp.Or(s.notRevoked(id, c.shown), s.notTainted(c.paths)); d != nil {
		return d
	}
	if _, err := s.issuers(); err != nil { // such as one that was told of a taint meanwhile (decision D4)
		return notReady(err)
	}
	return nil
}

func asDenial(err error) *Denial {
	if d, ok := errors.AsType[*Denial](err); ok {
		if d.Code == codes.Unavailable && d.RetryAfter == 0 {
			d = &Denial{Code: d.Code, Reason: d.Reason, Detail: d.Detail, RetryAfter: defaultRetry}
		}
		return d
	}
	return &Denial{Code: codes.Internal, Reason: ReasonInternal, Detail: err.Error()}
}

func notReady(err error) *Denial {
	return &Denial{Code: codes.Unavailable, Reason: ReasonNotReady, Detail: err.Error(), RetryAfter: defaultRetry}
}
