package issuelog

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json/v2"
	"errors"
	"fmt"
	"strings"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// Entry is one leaf of the tree: a record of the audit log, and the certificate where it reports one.
type Entry struct {
	audit.Record
	Certificate []byte `json:"certificate,omitempty"` // DER, in entries of event issued
}

// MaxEntry is what the length of two bytes in a bundle allows.
const MaxEntry = 1<<16 - 1

// MaxBundle is what 256 such entries can have.
const MaxBundle = tiles.Width * (2 + MaxEntry)

// maxField bounds each text of a requester, so that no token can have claims so long that its entry does not fit.
const maxField = 512

// appendEntry writes a record as an entry, length first, as bundles have it. What is not about a certificate is left
// out, and ok is false.
func appendEntry(b []byte, r audit.Record) (_ []byte, ok bool, err error) {
	switch r.Event {
	case audit.Intent, audit.Issued, audit.Failed:
	default:
		return b, false, nil
	}
	if r.Serial == "" { // a CRL: it is public, and has no serial to be found by
		return b, false, nil
	}
	for _, s := range []*string{
		&r.Requester.Remote, &r.Requester.Method, &r.Requester.User, &r.Requester.Cluster, &r.Requester.Namespace,
		&r.Requester.ServiceAccount, &r.Requester.Pod, &r.Requester.PodUID, &r.Requester.Node, &r.Requester.CredentialID, &r.Detail,
	} {
		if len(*s) > maxField {
			*s = strings.ToValidUTF8((*s)[:maxField], "")
		}
	}
	start := len(b)
	b = r.AppendJSON(append(b, 0, 0))
	if len(r.Certificate) > 0 {
		b = append(b[:len(b)-1], `,"certificate":"`...)
		b = append(base64.StdEncoding.AppendEncode(b, r.Certificate), `"}`...)
	}
	n := len(b) - start - 2
	if n > MaxEntry {
		return b[:start], false, fmt.Errorf("the entry of serial %s has %d bytes; at most %d fit", r.Serial, n, MaxEntry)
	}
	binary.BigEndian.PutUint16(b[start:], uint16(n))
	return b, true, nil
}

// DecodeEntry reads an entry, strictly.
func DecodeEntry(data []byte) (*Entry, error) {
	if len(data) > MaxEntry {
		return nil, fmt.Errorf("an entry of %d bytes; at most %d are allowed", len(data), MaxEntry)
	}
	e := new(Entry)
	if err := json.Unmarshal(data, e, json.RejectUnknownMembers(true)); err != nil {
		return nil, fmt.Errorf("decoding entry: %w", err)
	}
	switch {
	case e.Serial == "":
		return nil, errors.New("decoding entry: no serial")
	case e.Event != audit.Intent && e.Event != audit.Issued && e.Event != audit.Failed:
		return nil, fmt.Errorf("decoding entry: event %q is none of this log", e.Event)
	case (e.Event == audit.Issued) != (len(e.Certificate) > 0):
		return nil, fmt.Errorf("decoding entry: a certificate in event %q, or none where one belongs", e.Event)
	}
	return e, nil
}
