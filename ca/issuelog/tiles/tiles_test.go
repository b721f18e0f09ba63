package tiles_test

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// reference is the same tree by package tlog, with all hashes in memory.
type reference struct {
	size   int64
	hashes []tlog.Hash
}

func (r *reference) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	var out []tlog.Hash
	for _, i := range indexes {
		out = append(out, r.hashes[i])
	}
	return out, nil
}

// TestTreeIsThatOfTlog adds 140,000 leaves, through two levels of full tiles, and compares root and tiles with package tlog's.
func TestTreeIsThatOfTlog(t *testing.T) {
	var r reference
	tree := new(tiles.Tree)
	rng := rand.New(rand.NewPCG(3, 4))
	root := func() {
		want, err := tlog.TreeHash(r.size, &r)
		if err != nil {
			t.Fatal(err)
		}
		if got := tree.Root(); got != want {
			t.Fatalf("size %d: root %v, want %v", r.size, got, want)
		}
	}
	tile := func(level int, n int64, hashes []tlog.Hash) {
		x := tlog.Tile{H: 8, L: level, N: n, W: len(hashes)}
		want, err := tlog.ReadTileData(x, &r)
		if err != nil {
			t.Fatal(err)
		}
		if string(tiles.EncodeHashes(hashes)) != string(want) {
			t.Fatalf("tile %d/%d is not tlog's", level, n)
		}
		if path := strings.Replace(x.Path(), "tile/8/", "tile/", 1); path != tiles.Path(level, n, len(hashes)) {
			t.Fatalf("path %s, want %s", tiles.Path(level, n, len(hashes)), path)
		}
	}
	root()
	full := 0
	for i := range 140_000 {
		leaf := binary.BigEndian.AppendUint64(nil, rng.Uint64())
		hashes, err := tlog.StoredHashes(r.size, leaf, &r)
		if err != nil {
			t.Fatal(err)
		}
		r.hashes, r.size = append(r.hashes, hashes...), r.size+1
		if err := tree.Add(tlog.RecordHash(leaf), func(level int, n int64, hashes []tlog.Hash) error {
			full++
			tile(level, n, hashes)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if i < 600 || i%4999 == 0 || i%65536 < 2 {
			root()
			for level, hashes := range tree.Levels {
				if len(hashes) > 0 {
					tile(level, tree.Tile(level), hashes)
				}
			}
		}
	}
	if full != 546+2 {
		t.Errorf("%d full tiles, want 548", full)
	}
}

func TestPaths(t *testing.T) {
	for got, want := range map[string]string{
		tiles.Path(0, 0, 256):          "tile/0/000",
		tiles.Path(0, 999, 1):          "tile/0/999.p/1",
		tiles.Path(1, 1000, 256):       "tile/1/x001/000",
		tiles.BundlePath(1234067, 256): "tile/entries/x001/x234/067",
		tiles.BundlePath(1234067, 17):  "tile/entries/x001/x234/067.p/17",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
