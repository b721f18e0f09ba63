package csr

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/csr/lines"
	"github.com/chancery-project/chancery/trust"
)

// grant is what a request gets.
type grant struct {
	by    *answers.Chains // of the issuer that signs it
	id    trust.ID
	att   *ca.Attestation
	exact bool // it was asked for by name, and is that or nothing, whatever a migration's plan says
}

// identity returns the ID to issue, by what, and its attestation: the caller's own, or, for a node agent, that of a pod on its
// node (ImpersonatedIdentity, decisions D16 to D18). The caller's own comes in the trust domain that a migration's plan gives it; one that was
// asked for by name over Istio's API, or by a node agent, as it was asked for or not at all.
func (s *Service) identity(ctx context.Context, call *lines.Call, c caller, a ask) (grant, *Denial) {
	if a.identity == "" {
		return planned(call, c.ID, &c.attestation)
	}
	id, err := trust.ParseID(a.identity)
	if err == nil {
		err = call.Check(id)
	}
	if err != nil {
		return grant{}, notAllowed("%v", err)
	}
	if id.Path() == c.ID.Path() {
		if a.api == apiNative {
			return planned(call, id, &c.attestation)
		}
		return exactly(call, id, &c.attestation)
	}
	namespace, account, ok := id.Workload()
	switch {
	case id.Reserved() || !ok:
		return grant{}, notAllowed("%s is not a workload's identity", id)
	case c.Method != MethodToken || c.PodUID == "":
		return grant{}, &Denial{Code: codes.PermissionDenied, Reason: ReasonTokenNoPod, Detail: fmt.Sprintf("to ask for %s, %s needs its pod's token", id, c.ID)}
	}
	if err := s.clusters[c.Cluster].Cluster.OnNode(ctx, c.Caller, namespace, account); err != nil {
		return grant{}, asDenial(err)
	}
	return exactly(call, id, &ca.Attestation{Cluster: c.Cluster, Node: c.Node, Time: c.AttestedAt})
}

// planned returns an identity in the trust domain in which it gets its certificates now.
func planned(call *lines.Call, id trust.ID, att *ca.Attestation) (grant, *Denial) {
	by, as, err := call.For(id)
	if err != nil {
		return grant{}, notReady(err)
	}
	return grant{by: by, id: as, att: att}, nil
}

// exactly returns an identity as it is, or a denial that says what to ask for (decision D17).
func exactly(call *lines.Call, id trust.ID, att *ca.Attestation) (grant, *Denial) {
	by, denied, err := call.As(id)
	switch {
	case err != nil:
		return grant{}, notReady(err)
	case denied != nil:
		return grant{}, &Denial{Code: codes.PermissionDenied, Reason: ReasonDomain, Detail: denied.Error()}
	}
	return grant{by, id, att, true}, nil
}

func notAllowed(format string, args ...any) *Denial {
	return &Denial{Code: codes.PermissionDenied, Reason: ReasonIdentity, Detail: fmt.Sprintf(format, args...)}
}
