package rotating

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/rotate/staged"
	"github.com/chancery-project/chancery/rotate/stages"
	"github.com/chancery-project/chancery/trust"
)

// target reads where a migration would lead to; nil if a request is about none.
func target(q *chanceryv1.StartRotationRequest) (*stages.Target, error) {
	if q.GetToDomain() == "" {
		if q.Share != nil || len(q.GetNamespaces()) > 0 {
			return nil, status.Error(codes.InvalidArgument, "a share, or namespaces, are for a migration to another trust domain (to_domain), and none is named")
		}
		return nil, nil
	}
	to, err := trust.ParseDomain(q.GetToDomain())
	switch {
	case err != nil:
		return nil, status.Errorf(codes.InvalidArgument, "to_domain: %v", err)
	case q.GetKind() != string(document.KindRoot) || q.GetReason() != "":
		return nil, status.Errorf(codes.InvalidArgument, "a migration to trust domain %s is a rotation of the root, without a reason", to)
	}
	t := &stages.Target{Domain: to, Share: stages.All, Namespaces: q.GetNamespaces()}
	switch {
	case q.Share != nil:
		t.Share = int(min(q.GetShare(), stages.All+1)) // what is too much is refused with the rest
	case len(t.Namespaces) > 0: // they alone
		t.Share = 0
	}
	return t, nil
}

// Refuses says why a config keeps its server from becoming another trust domain (decision D24).
func Refuses(aliases, federated []trust.Domain) func(trust.Domain) error {
	return func(to trust.Domain) error {
		switch {
		case slices.Contains(aliases, to):
			return fmt.Errorf("trust domain %s is among trustDomainAliases, which are issued to nobody: take it out there on each server first", to)
		case slices.Contains(federated, to):
			return fmt.Errorf("trust domain %s is federated (`federation` in the config): its identities are others' (decision D24). End that on each server first, or take another name", to)
		}
		return nil
	}
}

// maxNamed bounds the names of one agent that are told.
const maxNamed = 5

// Former says which agents' consumers ask for resources of a trust domain that is left, as a hub knows them.
func Former(of func(trust.Domain) ([]agents.Former, int)) func(trust.Domain) []staged.Use {
	return func(left trust.Domain) (all []staged.Use) {
		some, n := of(left)
		for _, f := range some {
			names := strings.Join(f.Names[:min(len(f.Names), maxNamed)], ", ")
			if more := len(f.Names) - maxNamed; more > 0 {
				names += fmt.Sprintf(" and %d more", more)
			}
			all = append(all, staged.Use{Kind: "names", Who: f.Agent, Detail: "its consumers ask for " + names, Count: uint64(n)})
		}
		return all
	}
}
