package board

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var td = must(trust.ParseDomain("cluster.local"))

func newSealer(t testing.TB) *keys.Sealer {
	return must(keys.CreateSealer(filepath.Join(t.TempDir(), "k")))
}

// many returns certificates of one log, of a number of revocations and two issuers.
func many(n, revocations int) []Revoked {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	out := make([]Revoked, 0, n)
	for range n {
		b := make([]byte, 20)
		copy(b, []byte{1, 2, 3, 4})
		for j := 4; j < 20; j++ {
			b[j] = byte(r.Uint32())
		}
		out = append(out, Revoked{
			Serial: hex.EncodeToString(b), NotAfter: time.Unix(1_800_000_000+r.Int64N(24*3600), 0).UTC(),
			Revocation: fmt.Sprintf("%016x", r.IntN(revocations)), Issuer: strings.Repeat(fmt.Sprintf("%02x", r.IntN(2)), 20),
		})
	}
	slices.SortFunc(out, compare)
	return out
}

func sample() Note {
	return Note{
		Replica: "a", Instance: 1 << 63, Sequence: 7, Seen: time.UnixMilli(1_800_000_000_123).UTC(), Format: 2, LogID: 0x01020304, Checkpoint: "origin\n3\nroot\n",
		Acknowledged: 1<<32 | 9, Resolved: 1<<32 | 8, Omitted: 3, Revoked: []Revoked{
			{Serial: "01", NotAfter: time.Unix(1_800_000_000, 0).UTC(), Revocation: "00000000000000aa"},
			{Serial: "010203", NotAfter: time.Unix(1_800_000_001, 0).UTC(), Revocation: "00000000000000aa"},
			{Serial: "0102030405060708090a0b", NotAfter: time.Unix(1_800_000_002, 0).UTC(), Revocation: "00000000000000ab", Issuer: "cc"},
			{Serial: "0102030405060708090a0c", NotAfter: time.Unix(1_800_000_003, 0).UTC(), Revocation: "00000000000000ab", Issuer: "cc"},
		},
		Evidence: Evidence{
			Goal: document.Goal{Generation: 1<<32 | 4, Leave: []string{"00", "aa", "aabb"}}, Ahead: time.Unix(1_800_000_500, 0).UTC(), Lost: time.Unix(1_800_000_400, 0).UTC(),
			Total: 12, Settled: []uint64{0, 3, 1<<64 - 1}, Behind: []Behind{
				{0, time.Unix(1_800_000_009, 0).UTC(), true}, {1, time.Unix(1_800_000_008, 0).UTC(), false}, {1 << 63, time.Unix(1_800_003_600, 0).UTC(), false},
			},
			Sample: []Laggard{{1, "agent spiffe://cluster.local/ns/a/sa/b", "proxy 7: no such thing"}, {2, "", "π"}},
		},
	}
}

// behindOf returns as many consumers.
func behindOf(n int) (all []Behind) {
	r := rand.New(rand.NewPCG(2, uint64(n)))
	for range n {
		all = append(all, Behind{r.Uint64(), time.Unix(1_800_000_000+r.Int64N(24*3600), 0).UTC(), r.IntN(2) == 0})
	}
	slices.SortFunc(all, func(a, b Behind) int { return cmp.Compare(a.Consumer, b.Consumer) })
	return all
}

func settledOf(n int) (all []uint64) {
	for _, b := range behindOf(n) {
		all = append(all, b.Consumer)
	}
	return all
}

// TestNoteSurvives: what is written is read, to the last field, and nobody else's place or key will do.
func TestNoteSurvives(t *testing.T) {
	s := newSealer(t)
	for name, n := range map[string]Note{"all": sample(), "nothing": {Replica: "a", Seen: time.UnixMilli(0).UTC()}, "many": {Replica: "a", Seen: time.UnixMilli(1).UTC(), Revoked: many(1000, 3)}} {
		data := must(n.encode(s, td))
		got := must(decode(data, s, td, "a"))
		if !reflect.DeepEqual(*got, n) {
			t.Errorf("%s: wrote %+v and read %+v", name, n, *got)
		}
		for where, err := range map[string]error{
			"another replica": errOf(decode(data, s, td, "b")), "another trust domain": errOf(decode(data, s, must(trust.ParseDomain("other")), "a")),
			"another sealing key": errOf(decode(data, newSealer(t), td, "a")), "a part": errOf(decode(data[:len(data)-1], s, td, "a")),
		} {
			if err == nil {
				t.Errorf("%s: %s is accepted", name, where)
			}
		}
		for i := 0; i < len(data); i += max(1, len(data)/300) {
			bad := bytes.Clone(data)
			bad[i] ^= 1
			if _, err := decode(bad, s, td, "a"); err == nil {
				t.Errorf("%s: byte %d was changed, and nobody saw", name, i)
			}
		}
	}
	// What the document's code is over can be no note's.
	if bytes.HasPrefix(bound(td, "a", nil), []byte("{")) {
		t.Error("a note's code may be a document's")
	}
}

func errOf(_ *Note, err error) error { return err }

// TestNoteHasRoomForALog: as many certificates as all CRLs have fit into the note of one replica.
func TestNoteHasRoomForALog(t *testing.T) {
	n := Note{Replica: "a", Seen: time.Now(), Checkpoint: strings.Repeat("x", MaxCheckpoint), Revoked: many(MaxRevoked, 100)}
	data := must(n.encode(newSealer(t), td))
	t.Logf("%d certificates: %d bytes", len(n.Revoked), len(data))
	if len(data) > store.MaxNote {
		t.Errorf("%d certificates need %d bytes; a note has %d", len(n.Revoked), len(data), store.MaxNote)
	}
}

// TestNoteThatIsTooSmall: what does not fit is counted, and the rest can be written.
func TestNoteThatIsTooSmall(t *testing.T) {
	s := newSealer(t)
	wide := many(MaxRevoked, MaxRevoked) // a revocation for each
	for i := range wide {
		wide[i].Issuer = strings.Repeat("ab", maxIssuer)
	}
	for name, c := range map[string]struct {
		all     []Revoked
		omitted bool
	}{"nothing": {nil, false}, "a log": {many(MaxRevoked, 5), false}, "one more": {many(MaxRevoked+1, 5), true}, "long": {wide, true}} {
		fit, omitted := fitInto(slices.Clone(c.all), store.MaxNote)
		if (omitted > 0) != c.omitted || len(fit)+omitted > len(c.all) {
			t.Errorf("%s: %d fit and %d do not, of %d", name, len(fit), omitted, len(c.all))
		}
		n := Note{Replica: "a", Seen: time.Now(), Checkpoint: strings.Repeat("x", MaxCheckpoint), Revoked: fit}
		if data := must(n.encode(s, td)); len(data) > store.MaxNote || c.omitted && name == "long" && len(data) < store.MaxNote*9/10 {
			t.Errorf("%s: %d bytes", name, len(data))
		}
	}
	twice := append(many(10, 1), many(10, 1)...)
	if fit, omitted := fitInto(twice, store.MaxNote); len(fit) != 10 || omitted != 0 {
		t.Errorf("doubles: %d fit, %d do not", len(fit), omitted)
	}
}

// TestNoteRefusesToSay: what a reader would refuse is not written.
func TestNoteRefusesToSay(t *testing.T) {
	s := newSealer(t)
	for name, change := range map[string]func(*Note){
		"order":              func(n *Note) { slices.Reverse(n.Revoked) },
		"twice":              func(n *Note) { n.Revoked[1] = n.Revoked[0] },
		"serial":             func(n *Note) { n.Revoked[3].Serial = strings.Repeat("7f", 21) },
		"no serial":          func(n *Note) { n.Revoked[0].Serial = "" },
		"upper case":         func(n *Note) { n.Revoked[3].Serial = "0A" },
		"issuer":             func(n *Note) { n.Revoked[3].Issuer = "z" },
		"revocation":         func(n *Note) { n.Revoked[0].Revocation = "" },
		"time":               func(n *Note) { n.Revoked[0].NotAfter = time.Unix(-1, 0) },
		"checkpoint":         func(n *Note) { n.Checkpoint = strings.Repeat("x", MaxCheckpoint+1) },
		"many":               func(n *Note) { n.Revoked = many(MaxRevoked+1, 1) },
		"consumers in order": func(n *Note) { slices.Reverse(n.Evidence.Behind) },
		"a consumer twice":   func(n *Note) { n.Evidence.Behind[1].Consumer = n.Evidence.Behind[0].Consumer },
		"a consumer without": func(n *Note) { n.Evidence.Behind[1].Until = time.Time{} },
		"settled in order":   func(n *Note) { slices.Reverse(n.Evidence.Settled) },
		"settled twice":      func(n *Note) { n.Evidence.Settled[1] = 0 },
		"sample in order":    func(n *Note) { slices.Reverse(n.Evidence.Sample) },
		"long name":          func(n *Note) { n.Evidence.Sample[0].Name = strings.Repeat("x", MaxName+1) },
		"long words":         func(n *Note) { n.Evidence.Sample[0].Why = strings.Repeat("x", MaxWhy+1) },
		"no text":            func(n *Note) { n.Evidence.Sample[0].Why = "\xff" },
		"goal in order":      func(n *Note) { slices.Reverse(n.Evidence.Goal.Leave) },
		"goal":               func(n *Note) { n.Evidence.Goal.Leave[2] = "AB" },
		"long goal":          func(n *Note) { n.Evidence.Goal.Leave[2] = strings.Repeat("ab", maxIssuer+1) },
		"announced":          func(n *Note) { n.Evidence.Ahead = time.Unix(-5, 0) },
		"many behind":        func(n *Note) { n.Evidence.Behind = behindOf(MaxBehind + 1) },
		"many settled":       func(n *Note) { n.Evidence.Settled = settledOf(MaxBehind + 1) },
		"many words":         func(n *Note) { n.Evidence.Sample = make([]Laggard, MaxSample+1) },
	} {
		n := sample()
		if change(&n); errOfEncode(n.encode(s, td)) == nil {
			t.Errorf("%s: it was written", name)
		}
	}
}

func errOfEncode(_ []byte, err error) error { return err }

// TestNotesOfOtherBinaries: during an upgrade a note may be newer than who reads it, or older: then it vouches for no consumer.
func TestNotesOfOtherBinaries(t *testing.T) {
	s := newSealer(t)
	signed := func(body []byte) []byte { return append(body, s.MAC(bound(td, "a", body))...) }
	if _, err := decode(signed([]byte{version + 1, 1, 2, 3}), s, td, "a"); err == nil || !strings.Contains(err.Error(), "version 3") {
		t.Errorf("got %v", err)
	}
	n := sample()
	n.Evidence = Evidence{}
	data := must(n.encode(s, td))
	none := must((&Evidence{}).append(nil))
	body := bytes.Replace(data[:len(data)-macBytes], slices.Concat([]byte("root\n"), none), []byte("root\n"), 1)
	body[0] = 1
	got := must(decode(signed(body), s, td, "a"))
	if !reflect.DeepEqual(*got, n) || !got.Evidence.Goal.IsZero() {
		t.Errorf("of the first version %+v was read", got)
	}
}

// FuzzNote: whatever lies in the store does not make us panic; what is accepted has this one encoding, and without the sealing
// key nothing is.
func FuzzNote(f *testing.F) {
	s := newSealer(f)
	for _, n := range []Note{sample(), {Replica: "a", Seen: time.UnixMilli(0)}, {Replica: "a", Seen: time.UnixMilli(5), Revoked: many(20, 3), Evidence: Evidence{Behind: behindOf(5), Settled: settledOf(3)}}} {
		data := must(n.encode(s, td))
		f.Add(data[:len(data)-macBytes])
	}
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 7, 0, 2, 9, 8, 0, 1, 'c', 0})
	f.Fuzz(func(t *testing.T, body []byte) {
		if _, err := decode(body, s, td, "a"); err == nil {
			t.Fatalf("%x was accepted without an authentication code of ours", body)
		}
		data := append(bytes.Clone(body), s.MAC(bound(td, "a", body))...)
		n, err := decode(data, s, td, "a")
		if err != nil {
			return
		}
		again, err := n.encode(s, td)
		if body[0] == 1 {
			if e := n.Evidence; err != nil || !e.says(&Evidence{}) || !reflect.DeepEqual(must(decode(again, s, td, "a")), n) {
				t.Fatalf("%x was read as %+v (%v)", data, n, err)
			}
			return
		}
		if err != nil || !bytes.Equal(again, data) {
			t.Fatalf("%x was read and is written as %x (%v)", data, again, err)
		}
	})
}
