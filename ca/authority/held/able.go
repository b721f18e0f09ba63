package held

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority/swap"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/below"
	"github.com/chancery-project/chancery/trust"
)

// This file says what cannot be made here, and what to do instead.

// Rotatable returns why no other root can be made here or, under the one that there is, no other issuer, and what to do instead; nil if it can. Plugged
// is the folder of plugged-in files, if there is one.
func Rotatable(d *document.Document, td trust.Domain, kind document.AuthorityKind, plugged string, parented bool) error {
	root, err := d.Active(td, document.KindRoot)
	switch {
	case err != nil:
		return err
	case plugged != "" && kind == document.KindRoot:
		return fmt.Errorf("the issuer is plugged in from %s, so its root is rotated by changing the files there, and the server follows: %s", plugged, swap.Steps)
	case plugged != "":
		return fmt.Errorf("the issuer is plugged in from %s: put the next one, under the same root, there; it is used once every server and its agents have its CRL", plugged)
	case root.HasKey():
		return nil
	case kind == document.KindRoot:
		return errors.New("the root's key is kept elsewhere, so that its successor can only be made there. To change the root: (1) make one with its issuer " +
			"where keys are kept (`chancery ceremony`); (2) plug both in by files (`issuer` in the config), beside the old root, by the steps of docs/config.md. " +
			"To renew the issuer alone: `chancery authority csr` and `chancery authority import`")
	case parented:
		return errors.New("the issuer is renewed by a parent (`parent` in the config), which is asked in time; there is nothing to rotate here")
	}
	return ErrOffline
}

// Migratable returns why a line cannot be migrated to a trust domain here, and what to do instead; nil if it can. Both domains need a
// root whose key lies here (decision D10), and servers below pin the one root of one domain.
func Migratable(d *document.Document, td, to trust.Domain, plugged string, parented bool, now time.Time) error {
	root, err := d.Active(td, document.KindRoot)
	switch {
	case err != nil:
		return err
	case plugged != "":
		return fmt.Errorf("the issuer is plugged in from %s: the other trust domain needs a root and an issuer of its own, which this server makes only where it makes its own "+
			"(leave `issuer` out of the config). Instead, set up another authority for the new trust domain, federate the two, and move workloads over", plugged)
	case parented:
		return errors.New("the issuer is renewed by a parent (`parent` in the config), which signs for one trust domain: set up another authority for the new one, federate the two, " +
			"and move workloads over")
	case !root.HasKey():
		return errors.New("the root's key is kept elsewhere, so that a root for the new trust domain can only be made there, too: set up another authority for the new trust domain, " +
			"federate the two, and move workloads over")
	}
	if err := ca.CheckDomain(to); err != nil {
		return err
	}
	var names []string
	for _, x := range below.Under(d.State(td).Below, root.ID, now) {
		names = append(names, fmt.Sprintf("%s until %s", x.To, x.Until.UTC().Format(time.RFC3339)))
	}
	if len(names) > 0 {
		return fmt.Errorf("servers below have issuers under this root, pin it, and sign for one trust domain: %s. Take them out of `issuers` in the config and wait until those have ended",
			strings.Join(names, ", "))
	}
	return nil
}
