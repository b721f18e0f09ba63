// Package ceremony owns the making of authorities by hand: roots, issuers, cross-certificates and CRLs out of one
// reviewed file, shown in full before anything is signed, and written as one set or not at all.
//
// A Plan is made first, always: every certificate and CRL is validated, written and linted, with zlint's lints too, and
// Plan.Print says in words what they hold. Plan.Sign then signs those very bytes, through ca.Draft, so that the audit
// log has an intent before each signature and a result after it (invariants 1 and 10).
//
// It refuses what a lint refuses, dates outside those of the issuer, path lengths that do not fit, a subject or a key
// used for two authorities, more than one trust domain (D10), and to overwrite anything.
package ceremony

// Config is a ceremony as written in its file.
type Config struct {
	// TrustDomain is what all authorities of the ceremony are for, such as example.org. Required.
	TrustDomain string `json:"trustDomain"`
	// AuditLog is the file that gets a line before and after each signature. Required. A dry run does not touch it.
	AuditLog string `json:"auditLog"`
	// Output is the folder that will hold the results, with mode 0700. Required. It must not exist: it appears when all
	// is signed, complete.
	Output string `json:"output"`
	// Existing lists authorities made earlier that sign in this ceremony or get a cross-certificate.
	Existing []ExistingConfig `json:"existing,omitempty"`
	// Steps lists what is made, in order. Required.
	Steps []StepConfig `json:"steps"`
}

// ExistingConfig is an authority that exists already.
type ExistingConfig struct {
	// Name is what steps call it. Required.
	Name string `json:"name"`
	// Certificate is a PEM file with the authority's certificate first and then, if that is no root, its chain up to and
	// with the root. Required.
	Certificate string `json:"certificate"`
	// Key is the PEM file of its private key, mode 0600. Needed only if it signs.
	Key string `json:"key,omitempty"`
}

// StepConfig is one certificate or CRL to be made.
type StepConfig struct {
	// Name is what later steps call it, and the name of its files: NAME.pem, and NAME-key.pem for a key that is made.
	// Lower-case letters, digits and dashes. Required.
	Name string `json:"name"`
	// Kind is root, issuer, cross or crl. Required.
	Kind string `json:"kind"`
	// By names the authority that signs: an earlier step or an existing one. Required but for a root.
	By string `json:"by,omitempty"`
	// Of names the authority that gets a cross-certificate by another. Required for a cross, only there.
	Of string `json:"of,omitempty"`
	// Key says where the key of a root or issuer comes from. Required there, only there.
	Key *KeyConfig `json:"key,omitempty"`
	// NotBefore is when a certificate begins, like 2026-11-30T00:00:00Z; not in the future. Default: when it is signed,
	// less a minute.
	NotBefore string `json:"notBefore,omitempty"`
	// NotAfter is when a certificate ends, like 2036-11-30T00:00:00Z: at most 25 years away for a root and 10 for others,
	// and not after its issuer. Required but for a CRL.
	NotAfter string `json:"notAfter,omitempty"`
	// PathLen is how many signing certificates may stand between it and a leaf; -1 = any number. Default: any for a root,
	// 0 for an issuer, for a cross what the other certificate says.
	PathLen *int `json:"pathLen,omitempty"`
	// Number is the number of a CRL: above that of every earlier one of the same authority. Required for a CRL, from 1.
	Number int `json:"number,omitempty"`
	// ThisUpdate is when a CRL was made, like 2026-11-30T00:00:00Z; not in the future. Default: when it is signed.
	ThisUpdate string `json:"thisUpdate,omitempty"`
	// NextUpdate is when the next CRL comes at the latest, not after the end of its authority. Required for a CRL.
	NextUpdate string `json:"nextUpdate,omitempty"`
	// Revoked lists the certificates in a CRL. Default none: an empty CRL.
	Revoked []RevokedConfig `json:"revoked,omitempty"`
}

// KeyConfig says where a key comes from; one of the two.
type KeyConfig struct {
	// Generate makes a new key of a type: p256, p384, ed25519, rsa or mldsa65. It is written with mode 0600, never shown.
	Generate string `json:"generate,omitempty"`
	// File is an existing private key in PEM, mode 0600.
	File string `json:"file,omitempty"`
}

// RevokedConfig is one certificate in a CRL.
type RevokedConfig struct {
	// Serial is the certificate's serial number in hex, as `chancery inspect` prints it. Required.
	Serial string `json:"serial"`
	// Time is when it was revoked, like 2026-11-30T00:00:00Z. Required.
	Time string `json:"time"`
	// Reason is keyCompromise, cACompromise, affiliationChanged, superseded, cessationOfOperation, privilegeWithdrawn or
	// aACompromise (RFC 5280 section 5.3.1). Default: none is given.
	Reason string `json:"reason,omitempty"`
}
