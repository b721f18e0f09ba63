package verify

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"

	"golang.org/x/crypto/cryptobyte"
	cbasn1 "golang.org/x/crypto/cryptobyte/asn1"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog"
)

// fact is what Log needs to know of an entry.
type fact struct {
	hash    tlog.Hash
	hashed  bool
	event   audit.Event
	serial  string
	what    [sha256.Size]byte // over the SPIFFE ID and the hash of the to-be-signed bytes: as the intent says, or of the certificate
	problem string            // of the entry by itself
}

// factOf reads an entry.
func factOf(data []byte) fact {
	f := fact{hash: tlog.RecordHash(data), hashed: true}
	e, err := issuelog.DecodeEntry(data)
	if err != nil {
		f.serial, f.problem = guessSerial(data), err.Error()
		return f
	}
	f.event, f.serial = e.Event, e.Serial
	switch e.Event {
	case audit.Intent:
		sum, err := hex.DecodeString(e.TBSHash)
		if err != nil || len(sum) != sha256.Size {
			f.problem = "its tbs_sha256 is not a SHA-256"
		}
		f.what = sha256.Sum256(append(sum, e.SPIFFEID...))
	case audit.Issued:
		tbs, serial, err := splitCertificate(e.Certificate)
		sum := sha256.Sum256(e.Certificate)
		switch {
		case err != nil:
			f.problem = err.Error()
		case hex.EncodeToString(serial.Bytes()) != e.Serial:
			f.problem = fmt.Sprintf("its certificate has serial %x", serial)
		case hex.EncodeToString(sum[:]) != e.CertHash:
			f.problem = "its cert_sha256 is not that of its certificate"
		case !bytes.Contains(tbs, uriName(e.SPIFFEID)):
			f.problem = "its certificate does not name " + e.SPIFFEID
		}
		announced := sha256.Sum256(tbs)
		f.what = sha256.Sum256(append(announced[:], e.SPIFFEID...))
	}
	return f
}

// uriName returns how a certificate names a URI: a GeneralName with a tag of its own, 6, in DER.
func uriName(uri string) []byte {
	var b cryptobyte.Builder
	b.AddASN1(cbasn1.Tag(6).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes([]byte(uri)) })
	return b.BytesOrPanic() // too long only from 2^32 bytes on
}

// splitCertificate returns the to-be-signed bytes of a certificate and its serial.
func splitCertificate(der []byte) (tbs []byte, serial *big.Int, err error) {
	in := cryptobyte.String(der)
	var cert, element, body cryptobyte.String
	serial = new(big.Int)
	if !in.ReadASN1(&cert, cbasn1.SEQUENCE) || !in.Empty() || !cert.ReadASN1Element(&element, cbasn1.SEQUENCE) {
		return nil, nil, errors.New("its certificate does not parse")
	}
	tbs = element
	if !element.ReadASN1(&body, cbasn1.SEQUENCE) || !body.SkipOptionalASN1(cbasn1.Tag(0).ContextSpecific().Constructed()) ||
		!body.ReadASN1Integer(serial) {
		return nil, nil, errors.New("its certificate does not parse")
	}
	return tbs, serial, nil
}

// guessSerial finds the serial in an entry that does not parse.
func guessSerial(data []byte) string {
	const before = `"serial":"`
	at := bytes.Index(data, []byte(before))
	if at < 0 {
		return ""
	}
	rest := data[at+len(before):]
	end := bytes.IndexByte(rest, '"')
	if end < 0 || end > 64 {
		return ""
	}
	for _, c := range rest[:end] {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return ""
		}
	}
	return string(rest[:end])
}

// ledger has the state of each serial. It is all that Log keeps of an entry: 33 bytes, so that a log of a million
// entries needs little memory. Keys and hashes are halves of SHA-256, which nobody can make collide.
type ledger map[[16]byte]standing

type standing struct {
	what  [16]byte
	state state
}

type state uint8

const (
	intended state = iota
	issued
	failed
)

// enter holds an entry to those before it and returns what does not fit.
func (l ledger) enter(f *fact, r *Report) (problem string) {
	sum := sha256.Sum256([]byte(f.serial))
	key := [16]byte(sum[:16])
	s, known := l[key]
	what := [16]byte(f.what[:16])
	switch {
	case f.event == audit.Intent && known:
		return "the serial has an intent already; each is used once"
	case f.event == audit.Intent:
		r.Intents++
		l[key] = standing{what: what}
		return ""
	case !known:
		return "no intent for it comes before: it was signed behind the log's back, or the log was changed"
	case s.state != intended:
		return "the serial has a result already"
	case f.event == audit.Failed:
		r.Failed++
		s.state = failed
	case s.what != what:
		return "the certificate is not the one of its intent: another SPIFFE ID, or another hash of the to-be-signed bytes"
	default:
		r.Certificates++
		s.state = issued
	}
	l[key] = s
	return ""
}
