package board

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

// Bounds of what a note says.
const (
	// MaxRevoked bounds the revoked certificates. As many of one log fit into a note of store.MaxNote bytes; some stores take less.
	MaxRevoked = 50_000
	// MaxCheckpoint is what agents read of one, in bytes.
	MaxCheckpoint = 4 << 10

	maxSerial = 20 // bytes (RFC 5280 section 4.1.2.2)
	maxIssuer = 64 // bytes of a key identifier
	revBytes  = 8  // of a revocation's ID
)

// Note is what a replica says of itself.
type Note struct {
	Replica  string    // whose it is: the name that it lies under
	Instance uint64    // drawn by each process
	Sequence uint64    // counts what that process wrote
	Seen     time.Time // when it was written, by the writer's clock
	Format   int       // highest format of the document that the replica reads
	LogID    uint32    // leads the serials that it issues
	// Checkpoint is the last one of its issuance log, as signed; empty without a log.
	Checkpoint string
	// Acknowledged is the version of the document that the replica works by: it can open the key of the issuer which waits to
	// sign, if any, and has published CRLs of all issuers to its own agents.
	Acknowledged uint64
	// Resolved is the version of the document whose revocations it has looked for in its own log.
	Resolved uint64
	Revoked  []Revoked // what it found there, in the order of compare; empty without a log
	Omitted  uint64    // how many more it found, which did not fit
	Evidence Evidence  // what it knows of the consumers that it serves
}

// Revoked is a certificate that a revocation in the document means.
type Revoked struct {
	Serial     string    // hex, as in the document
	NotAfter   time.Time // in whole seconds
	Revocation string    // ID of the revocation
	Issuer     string    // ID of the certificate's issuer; empty: not known
}

// compare is the order in a note: what differs seldom comes first.
func compare(a, b Revoked) int {
	return cmp.Or(cmp.Compare(a.Revocation, b.Revocation), cmp.Compare(a.Issuer, b.Issuer), cmp.Compare(a.Serial, b.Serial))
}

// says reports whether two notes say the same, but for when they were written.
func (n *Note) says(o *Note) bool {
	return n.Checkpoint == o.Checkpoint && n.means(o) && n.Evidence.says(&o.Evidence)
}

// means is says without what changes each second on a busy server: the checkpoint, and who has reached the goal.
func (n *Note) means(o *Note) bool {
	return n.Format == o.Format && n.LogID == o.LogID && n.Acknowledged == o.Acknowledged && n.Resolved == o.Resolved && n.Omitted == o.Omitted &&
		n.Evidence.Goal.Equal(o.Evidence.Goal) && slices.Equal(n.Revoked, o.Revoked)
}

// version of the encoding. The first had no evidence; it is read as such that vouches for nobody.
const version = 2

const macBytes = 32

// bound returns what a note's authentication code is over. The document's codes are over JSON, which never begins like this.
func bound(td trust.Domain, replica string, body []byte) []byte {
	b := []byte("chancery note\x00")
	for _, name := range []string{td.String(), replica} {
		b = binary.AppendUvarint(b, uint64(len(name)))
		b = append(b, name...)
	}
	return append(b, body...)
}

// unhex reads hex in lower case, the one form in which it is compared.
func unhex(s string) ([]byte, bool) {
	b, err := hex.DecodeString(s)
	return b, err == nil && hex.EncodeToString(b) == s
}

// encode returns a note's bytes for the store: version, fields in order, and the code. Numbers are uvarints. Certificates are
// grouped by revocation and issuer; of a serial that begins as the one before only the rest is written, so that 20 bytes each
// do for all of a log.
func (n *Note) encode(s *keys.Sealer, td trust.Domain) ([]byte, error) {
	for i := range n.Revoked {
		if i > 0 && compare(n.Revoked[i-1], n.Revoked[i]) >= 0 {
			return nil, errors.New("the certificates of a note are not in order")
		}
	}
	first := base(n.Revoked)
	if first < 0 {
		return nil, fmt.Errorf("a certificate ended at %s", time.Unix(first, 0).UTC())
	}
	if len(n.Revoked) > MaxRevoked || len(n.Checkpoint) > MaxCheckpoint || n.Format < 0 || n.Seen.UnixMilli() < 0 {
		return nil, fmt.Errorf("a note with %d certificates (at most %d) and a checkpoint of %d bytes (at most %d), format %d, at %s", len(n.Revoked),
			MaxRevoked, len(n.Checkpoint), MaxCheckpoint, n.Format, n.Seen)
	}
	b := append(make([]byte, 0, 256+len(n.Checkpoint)+24*len(n.Revoked)), version)
	b = binary.BigEndian.AppendUint64(b, n.Instance)
	b = binary.BigEndian.AppendUint32(b, n.LogID)
	for _, x := range []uint64{n.Sequence, uint64(n.Seen.UnixMilli()), uint64(n.Format), n.Acknowledged, n.Resolved, n.Omitted, uint64(len(n.Checkpoint))} {
		b = binary.AppendUvarint(b, x)
	}
	b = append(b, n.Checkpoint...)
	b, err := n.Evidence.append(b)
	if err != nil {
		return nil, err
	}
	b = binary.AppendUvarint(b, uint64(first))
	if b, err = appendRevoked(b, n.Revoked, first); err != nil {
		return nil, err
	}
	return append(b, s.MAC(bound(td, n.Replica, b))...), nil
}

// Fit puts certificates into the order of a note, without doubles, and returns those that fit into one of this board's store, and
// how many do not. Of two entries with one serial and revocation the later in all is left out.
func (b *Board) Fit(all []Revoked) (fit []Revoked, omitted int) {
	return fitInto(all, store.NoteRoom(b.config.Store))
}

func fitInto(all []Revoked, room int) (fit []Revoked, omitted int) {
	slices.SortStableFunc(all, compare)
	fit = slices.CompactFunc(all, func(a, b Revoked) bool { return compare(a, b) == 0 })
	if len(fit) > MaxRevoked {
		fit, omitted = fit[:MaxRevoked], len(fit)-MaxRevoked
	}
	for {
		b, err := appendRevoked(nil, fit, base(fit))
		if err != nil || len(b) <= room-restOfNote {
			return fit, omitted
		}
		keep := len(fit) * (room - restOfNote) / len(b) * 99 / 100
		fit, omitted = fit[:keep], omitted+len(fit)-keep
	}
}

// restOfNote is more than the rest of a note has whose evidence names nobody.
const restOfNote = MaxCheckpoint + 512 + MaxLeave*(1+maxIssuer)

// base returns the earliest end, from which the others are counted.
func base(all []Revoked) int64 {
	least := int64(math.MaxInt64)
	for _, r := range all {
		least = min(least, r.NotAfter.Unix())
	}
	if len(all) == 0 {
		return 0
	}
	return least
}

func appendRevoked(b []byte, all []Revoked, base int64) (_ []byte, err error) {
	for len(all) > 0 {
		if b, all, err = appendGroup(b, all, base); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// appendGroup writes the certificates at the head of all that have one revocation and issuer.
func appendGroup(b []byte, all []Revoked, base int64) (_ []byte, rest []Revoked, _ error) {
	head := all[0]
	end := slices.IndexFunc(all, func(r Revoked) bool { return r.Revocation != head.Revocation || r.Issuer != head.Issuer })
	if end < 0 {
		end = len(all)
	}
	id, ok := unhex(head.Revocation)
	if !ok || len(id) != revBytes {
		return nil, nil, fmt.Errorf("revocation %.40q should be %d bytes in hex", head.Revocation, revBytes)
	}
	issuer, ok := unhex(head.Issuer)
	if !ok || len(issuer) > maxIssuer {
		return nil, nil, fmt.Errorf("issuer %.140q should be hex of at most %d bytes", head.Issuer, maxIssuer)
	}
	b = append(b, id...)
	b = append(b, byte(len(issuer)))
	b = append(b, issuer...)
	b = binary.AppendUvarint(b, uint64(end))
	var last []byte
	for _, r := range all[:end] {
		serial, ok := unhex(r.Serial)
		if !ok || len(serial) == 0 || len(serial) > maxSerial {
			return nil, nil, fmt.Errorf("serial %.50q should be hex of 1 to %d bytes", r.Serial, maxSerial)
		}
		same := shared(last, serial)
		b = append(b, byte(min(same, 7)<<5|(len(serial)-same)))
		if same >= 7 { // it rarely needs more than three bits
			b = append(b, byte(same-7))
		}
		b = append(b, serial[same:]...)
		b = binary.AppendUvarint(b, uint64(r.NotAfter.Unix()-base))
		last = serial
	}
	return b, all[end:], nil
}

// shared returns how many bytes two serials have in common at their beginning.
func shared(a, b []byte) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// decode reads the note of a replica and authenticates it. Each note has one encoding: another is refused.
func decode(data []byte, s *keys.Sealer, td trust.Domain, replica string) (*Note, error) {
	if len(data) > store.MaxNote || len(data) < 1+macBytes {
		return nil, fmt.Errorf("it has %d bytes; %d to %d are read", len(data), 1+macBytes, store.MaxNote)
	}
	body, have := data[:len(data)-macBytes], data[len(data)-macBytes:]
	if !s.CheckMAC(bound(td, replica, body), have) {
		return nil, errors.New("it was not written with this sealing key for this replica and trust domain, or was changed since")
	}
	if body[0] != 1 && body[0] != version {
		return nil, fmt.Errorf("it has version %d; this binary knows 1 and %d: use a newer one", body[0], version)
	}
	r := &reader{rest: body[1:]}
	n := &Note{Replica: replica, Instance: binary.BigEndian.Uint64(r.take(8)), LogID: binary.BigEndian.Uint32(r.take(4))}
	n.Sequence = r.number(math.MaxUint64)
	n.Seen = time.UnixMilli(int64(r.number(maxTime * 1000))).UTC()
	n.Format = int(r.number(math.MaxInt32))
	n.Acknowledged, n.Resolved, n.Omitted = r.number(math.MaxUint64), r.number(math.MaxUint64), r.number(math.MaxUint64)
	n.Checkpoint = string(r.take(int(r.number(MaxCheckpoint))))
	if body[0] > 1 {
		n.Evidence = r.evidence()
	}
	base := int64(r.number(maxTime))
	least := int64(math.MaxInt64)
	for !r.bad && len(r.rest) > 0 {
		n.Revoked = r.group(n.Revoked, base, &least)
	}
	if len(n.Revoked) == 0 {
		least = 0
	}
	if r.bad || least != base {
		return nil, errors.New("it does not read as a note")
	}
	return n, nil
}

// maxTime is the last second of the year 9999, as certificates have it.
const maxTime = 253402300799

// reader reads the parts of a note. After what does not fit, bad is set and all else is zero.
type reader struct {
	rest []byte
	bad  bool
}

func (r *reader) take(n int) []byte {
	if r.bad || n > len(r.rest) {
		r.bad = true
		return make([]byte, min(n, 8)) // enough for the numbers of fixed size
	}
	out := r.rest[:n]
	r.rest = r.rest[n:]
	return out
}

// number reads a uvarint of at most limit, in its one shortest form.
func (r *reader) number(limit uint64) uint64 {
	x, n := binary.Uvarint(r.rest)
	if r.bad || n <= 0 || x > limit || n > 1 && r.rest[n-1] == 0 {
		r.bad = true
		return 0
	}
	r.rest = r.rest[n:]
	return x
}

// group reads one group of certificates; see appendGroup.
func (r *reader) group(all []Revoked, base int64, least *int64) []Revoked {
	head := Revoked{Revocation: hex.EncodeToString(r.take(revBytes))}
	issuer := int(r.take(1)[0])
	if issuer > maxIssuer {
		r.bad = true
		return all
	}
	head.Issuer = hex.EncodeToString(r.take(issuer))
	count := int(r.number(MaxRevoked))
	if r.bad || count == 0 || len(all)+count > MaxRevoked || 3*count > len(r.rest) {
		r.bad = true
		return all
	}
	if len(all) > 0 && cmp.Or(cmp.Compare(all[len(all)-1].Revocation, head.Revocation), cmp.Compare(all[len(all)-1].Issuer, head.Issuer)) >= 0 {
		r.bad = true
		return all
	}
	all = slices.Grow(all, count)
	var last []byte
	for range count {
		serial := r.serial(last)
		at := base + int64(r.number(maxTime-uint64(base)))
		if r.bad || bytes.Compare(last, serial) >= 0 {
			r.bad = true
			return all
		}
		*least = min(*least, at)
		one := head
		one.Serial, one.NotAfter = hex.EncodeToString(serial), time.Unix(at, 0).UTC()
		all, last = append(all, one), serial
	}
	return all
}

// serial reads the serial that follows another.
func (r *reader) serial(last []byte) []byte {
	mark := r.take(1)[0]
	same, more := int(mark>>5), int(mark&0x1f)
	if same == 7 {
		same += int(r.take(1)[0])
	}
	if r.bad || same > len(last) || same+more == 0 || same+more > maxSerial {
		r.bad = true
		return nil
	}
	out := slices.Concat(last[:same], r.take(more))
	if r.bad || shared(last, out) != same {
		r.bad = true
		return nil
	}
	return out
}
