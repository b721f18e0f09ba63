package parents

import (
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
)

// signer signs issuers of servers below. Each is in the authority document before it is given away: a root that some of them are under
// must not be retired, though it may be another replica that does so, months later.
type signer struct {
	domain    trust.Domain
	authority *authority.Keeper
}

func (s signer) sign(ctx context.Context, pub crypto.PublicKey, terms ca.IssuerTerms, who audit.Requester) ([]*x509.Certificate, error) {
	if r := s.authority.Document().Rotating(s.domain); r != nil && r.Migration != nil { // it would pin one root, of one trust domain
		return nil, fmt.Errorf("%w: no issuer for a server below while trust domain %s migrates to %s", ca.ErrNotReady, r.Migration.From, r.Migration.To)
	}
	chain, err := s.authority.SignIssuer(ctx, pub, terms, who)
	if err != nil {
		return nil, err
	}
	given := below.Issuers{To: who.SPIFFEID, Root: document.RootOf(chain), Until: chain[0].NotAfter}
	err = s.authority.ChangeQuietly(ctx, func(next *document.Document) error {
		state := next.State(s.domain)
		root, err := next.Active(s.domain, document.KindRoot)
		if err != nil {
			return err
		}
		if r := state.Rotation; root.ID != given.Root || root.Tainted != nil || r != nil && r.Migration != nil {
			return fmt.Errorf("root %s does not sign any more", given.Root)
		}
		all, changed := below.Note(state.Below, given, time.Now())
		if !changed {
			return replica.ErrUnchanged
		}
		state.Below = all
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("%w: the issuer is not noted in the authority document: %w", ca.ErrNotReady, err)
	}
	return chain, nil
}
