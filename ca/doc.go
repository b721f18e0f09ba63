// Package ca owns issuing: profiles, the issuer, and the one way in which a certificate or CRL gets signed.
//
// Issuing has two steps (invariant 1). Prepare validates a request against a Profile, builds the to-be-signed bytes,
// lints those bytes and writes the intent to the audit log; it returns a one-shot Token. Issue takes a Token and
// signs its bytes. There is no other call that signs, so a signature without validation, lint and log entry cannot be
// written down in Go. The lints run before the key is used, on the very bytes that are then signed.
//
//	token, err := issuer.Prepare(profile, ca.Request{ID: id, PublicKey: csr.PublicKey})
//	cert, err := issuer.Issue(ctx, token)
//
// Where people shall see it first, Draft does all of Prepare but the log, and Draft.Prepare the rest. CRLs take the same
// steps: DraftCRL, Draft.Prepare, IssueCRL.
//
// It refuses a lifetime beyond the profile or any certificate of the chain (invariant 3), a key type the profile does
// not list, an ID outside the profile's name rules, and to sign while the log cannot be written (invariant 10). It
// does not know who asks: that is package csr.
package ca
