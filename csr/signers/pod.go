package signers

import (
	"context"
	"crypto"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/pkcs10"
	"github.com/chancery-project/chancery/trust"
)

// maxCSR bounds a CSR in DER: an RSA-8192 request with a 2,048-byte ID has under 5 kB.
const maxCSR = 16 << 10

// Pod is what a PodCertificateRequest says, as the API server admitted it: a node asks for a pod that runs on it.
type Pod struct {
	Namespace, Name, UID, ServiceAccount, Node string
	Request                                    []byte        // PKCS #10, DER
	MaxLife                                    time.Duration // of NotAfter - NotBefore
	Annotations                                map[string]string
	Object                                     string // name of the request, for the audit log
}

// Pod decides on a PodCertificateRequest and has it signed.
func (s *Signer) Pod(ctx context.Context, p Pod) (*Signed, *Refusal) {
	who := audit.Requester{
		Method: "PodCertificateRequest", Cluster: s.config.Cluster, Namespace: p.Namespace, ServiceAccount: p.ServiceAccount, Pod: p.Name, PodUID: p.UID,
		Node: p.Node, CredentialID: "PodCertificateRequest " + p.Namespace + "/" + p.Object,
	}
	signed, r := s.pod(ctx, p, who)
	if r != nil {
		s.denied(r, "", who)
	}
	return signed, r
}

func (s *Signer) pod(ctx context.Context, p Pod, who audit.Requester) (*Signed, *Refusal) {
	if len(p.Annotations) > 0 {
		return nil, never(ReasonAnnotations, "no annotations are known here, and the volume has userAnnotations %.200s", strings.Join(slices.Sorted(maps.Keys(p.Annotations)), ", "))
	}
	id, err := trust.WorkloadID(s.config.Domain, p.Namespace, p.ServiceAccount)
	if err != nil {
		return nil, never(ReasonRequest, "%v", err)
	}
	key, r := keyOf(p.Request)
	if r != nil {
		return nil, r
	}
	if p.MaxLife < leastLife {
		return nil, never(ReasonRequest, "maxExpirationSeconds is %s; it should be at least %s", p.MaxLife, leastLife)
	}
	hash := csr.PodHash(s.config.Cluster, p.UID)
	// The API server has compared the request with the pod, which may have gone since.
	if err := s.config.Alive(ctx, p.Namespace, p.ServiceAccount, p.Node, hash); err != nil {
		if d, ok := errors.AsType[*csr.Denial](err); ok {
			return nil, later(d.Reason, "%s", d.Detail)
		}
		return nil, later(csr.ReasonInternal, "%v", err)
	}
	return s.sign(ctx, order{
		id: id, key: key, least: leastLife, most: min(s.config.PodLife, p.MaxLife), requester: who, node: s.config.Cluster + "/" + p.Node,
		attestation: &ca.Attestation{Cluster: s.config.Cluster, PodHash: hash, Node: p.Node, Time: time.Now()},
	})
}

// keyOf returns the key of a request that proves possession of it and names nobody: the kubelet's are empty (invariant 2).
func keyOf(der []byte) (crypto.PublicKey, *Refusal) {
	req, r := parse(der)
	if r != nil {
		return nil, r
	}
	names, err := namesOf(req)
	switch {
	case err != nil:
		return nil, never(ReasonNames, "%v", err)
	case len(names) > 0:
		return nil, never(ReasonNames, "stubPKCS10Request asks for %.200q; it should have no names, the identity is the pod's", names[0])
	}
	return req.PublicKey, nil
}

// parse reads a request and checks the proof of possession.
func parse(der []byte) (*pkcs10.Request, *Refusal) {
	if len(der) == 0 || len(der) > maxCSR {
		return nil, never(ReasonRequest, "the PKCS #10 request has %d bytes of DER; 1 to %d are read", len(der), maxCSR)
	}
	req, err := pkcs10.Parse(der)
	if err != nil {
		return nil, never(ReasonRequest, "the PKCS #10 request does not parse: %v", err)
	}
	if _, err := ca.TypeOf(req.PublicKey); err != nil { // before the signature, whose cost grows with the key
		return nil, never(ReasonKeyType, "%v; such as keyType ECDSAP256", err)
	}
	if err := req.CheckSignature(); err != nil {
		return nil, never(ReasonRequest, "the PKCS #10 request's signature does not prove possession of its key: %v", err)
	}
	return req, nil
}
