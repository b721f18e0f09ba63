// Package rotate owns what changes with time: the keeper that renews a leaf before it ends, and shows it with the roots
// and CRLs of each moment. Staged rotation of roots and issuers, and migration of trust domains, will stand here too.
//
// It refuses to give up a working identity: a renewal that fails, or brings something that does not verify, leaves
// the old one in place until it ends (invariant 7). It does not know how a certificate is got: its owner hands it a
// function.
package rotate
