package csr

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/trust"
)

// identity returns the ID to issue and its attestation: the caller's own, or, for a node agent, that of a pod on its
// node (ImpersonatedIdentity, decisions D16 to D18).
func (s *Service) identity(ctx context.Context, c caller, asked string) (trust.ID, *ca.Attestation, *Denial) {
	if asked == "" || asked == c.ID.String() {
		return c.ID, &c.attestation, nil
	}
	id, err := trust.ParseID(asked)
	if err != nil {
		return trust.ID{}, nil, notAllowed("%v", err)
	}
	namespace, account, ok := id.Workload()
	switch {
	case id.Domain() != s.domain:
		return trust.ID{}, nil, notAllowed("%s is not in trust domain %s", id, s.domain)
	case id.Reserved() || !ok:
		return trust.ID{}, nil, notAllowed("%s is not a workload's identity", id)
	case c.Method != MethodToken || c.PodUID == "":
		return trust.ID{}, nil, &Denial{Code: codes.PermissionDenied, Reason: ReasonTokenNoPod, Detail: fmt.Sprintf("to ask for %s, %s needs its pod's token", id, c.ID)}
	}
	if err := s.clusters[c.Cluster].Cluster.OnNode(ctx, c.Caller, namespace, account); err != nil {
		return trust.ID{}, nil, asDenial(err)
	}
	return id, &ca.Attestation{Cluster: c.Cluster, Node: c.Node, Time: c.AttestedAt}, nil
}

func notAllowed(format string, args ...any) *Denial {
	return &Denial{Code: codes.PermissionDenied, Reason: ReasonIdentity, Detail: fmt.Sprintf(format, args...)}
}
