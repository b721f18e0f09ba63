package authority

import (
	"context"
	"crypto"

	"github.com/chancery-project/chancery/ca/keys"
)

// This file is about the keys of authorities, in the key store.

// dropKeys deletes the keys that were before and are not needed any more, after a change of ours.
func (a *Keeper) dropKeys(ctx context.Context, before, after *Document) {
	if a.config.Keys != nil {
		keys.DropUnneeded(ctx, a.config.Keys, before.KeyRefs(), after.KeyRefs(), a.config.Logger)
	}
}

// Keys returns the keys to be checked: those of the issuers that sign, which the server cannot work without, and of the roots above them,
// where they lie here.
func (a *Keeper) Keys() []keys.Watched {
	out := []keys.Watched{}
	if in := a.inUse.Load(); in != nil {
		out = append(out, keys.Watched{Name: a.KeyName(), Open: func(context.Context) (crypto.Signer, error) { return in.Key, nil }})
	}
	state := a.stateOf(a.Document())
	if p := a.pair.Load(); p != nil && p.Second.Issuer != nil {
		out = append(out, keys.Watched{Name: a.SecondKey(), Open: func(context.Context) (crypto.Signer, error) { return p.Second.Key, nil }})
	}
	for i := range state.Authorities {
		root := &state.Authorities[i]
		if root.Kind != KindRoot || !root.HasKey() || root.State != StateActive && (state.Second() == nil || root.ID != state.Rotation.ToRoot) {
			continue
		}
		out = append(out, keys.Watched{Name: "root " + root.ID, Open: func(ctx context.Context) (crypto.Signer, error) {
			return root.OpenKey(ctx, a.config.Domain, a.config.Sealer, a.config.Keys)
		}})
	}
	return out
}

// SecondKey names the key of the issuer of a migration's other trust domain, as in Keys; empty if none signs.
func (a *Keeper) SecondKey() string {
	if p := a.pair.Load(); p != nil && p.Second.Issuer != nil {
		return "issuer " + p.Second.SKI()
	}
	return ""
}

// KeyName names the active issuer's key, as in Keys.
func (a *Keeper) KeyName() string {
	if in := a.inUse.Load(); in != nil {
		return "issuer " + in.SKI()
	}
	return ""
}

// KeyPlace says in words where new keys lie.
func (a *Keeper) KeyPlace() string {
	if a.config.Keys == nil {
		return "sealed in the authority document, each by itself"
	}
	return "in the key store, under a reference of its own"
}
