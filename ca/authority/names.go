package authority

import (
	"github.com/chancery-project/chancery/ca/authority/held"
	"github.com/chancery-project/chancery/ca/document"
)

// What package document owns, under the names by which those know it who deal with a Keeper.
type (
	// Document is the authority document.
	Document = document.Document
	// Authority is a root or an issuer in it.
	Authority = document.Authority
	// LogState names one replica's log in it.
	LogState = document.LogState
	// Key is an authority's key as it enters the document.
	Key = document.Key
	// Revocation is a predicate that was revoked.
	Revocation = document.Revocation
	// CRLSigner is an issuer that verifiers need a CRL of.
	CRLSigner = held.CRLSigner
	// Predicate says which certificates are revoked.
	Predicate = document.Predicate
)

// Kinds and states of authorities.
const (
	KindRoot   = document.KindRoot
	KindIssuer = document.KindIssuer

	StatePrepared = document.StatePrepared
	StateActive   = document.StateActive
	StateRetiring = document.StateRetiring
)

// NewLogID returns a log ID at random.
func NewLogID() uint32 { return document.NewLogID() }

// DecodeDocument reads and authenticates a document; see document.Decode.
var DecodeDocument = document.Decode
