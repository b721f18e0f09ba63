// Package tiles owns the shape of a tiled Merkle tree as C2SP tlog-tiles has it: hashes in tiles of 256, entries in bundles
// of 256, their paths, and the right edge of a tree, which is all that is needed to append to it.
//
// It refuses to know what entries say, and where files lie.
package tiles

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/mod/sumdb/tlog"
)

// Width is the number of hashes in a full tile, and of entries in a full bundle (C2SP tlog-tiles).
const Width = 256

// Tree is the right edge of a Merkle tree (RFC 6962): all that is needed to append to it.
type Tree struct {
	Size   int64
	Levels [][]tlog.Hash // by level, the hashes in its last tile, which is not full
	Bundle []byte        // the entries in the last bundle, which is not full
}

// Full is told of each tile that an append has filled.
type Full func(level int, n int64, hashes []tlog.Hash) error

// Add appends the hash of a leaf.
func (t *Tree) Add(h tlog.Hash, full Full) error {
	t.Size++
	for level := 0; ; level++ {
		if level == len(t.Levels) {
			t.Levels = append(t.Levels, nil)
		}
		t.Levels[level] = append(t.Levels[level], h)
		if len(t.Levels[level]) < Width {
			return nil
		}
		if err := full(level, t.Tile(level)-1, t.Levels[level]); err != nil {
			return err
		}
		h = perfect(t.Levels[level])
		t.Levels[level] = t.Levels[level][:0:0] // fresh memory: the filled tile may be in use
	}
}

// Tile returns the number of the last tile of a level.
func (t *Tree) Tile(level int) int64 { return t.Size >> (8 * (level + 1)) }

// perfect returns the root of a tree whose size is a power of two.
func perfect(hashes []tlog.Hash) tlog.Hash {
	hs := slices.Clone(hashes)
	for n := len(hs); n > 1; n /= 2 {
		for i := range n / 2 {
			hs[i] = tlog.NodeHash(hs[2*i], hs[2*i+1])
		}
	}
	return hs[0]
}

// Root returns the hash of the whole tree: its perfect subtrees joined, the smallest first.
func (t *Tree) Root() tlog.Hash {
	var root tlog.Hash
	have := false
	for _, hs := range t.Levels {
		for n := len(hs); n > 0; {
			width := n & -n
			sub := perfect(hs[n-width : n])
			if have {
				root = tlog.NodeHash(sub, root)
			} else {
				root, have = sub, true
			}
			n -= width
		}
	}
	if !have {
		return sha256.Sum256(nil) // of the empty tree
	}
	return root
}

// Clone returns a tree that can grow by itself.
func (t *Tree) Clone() *Tree {
	c := &Tree{Size: t.Size, Bundle: slices.Clone(t.Bundle)}
	for _, hs := range t.Levels {
		c.Levels = append(c.Levels, slices.Clone(hs))
	}
	return c
}

// number writes the number of a tile as a path: 1234067 is x001/x234/067.
func number(n int64) string {
	s := fmt.Sprintf("%03d", n%1000)
	for n /= 1000; n > 0; n /= 1000 {
		s = fmt.Sprintf("x%03d/%s", n%1000, s)
	}
	return s
}

// partial is added to the path of a tile or bundle that is not full.
func partial(width int) string {
	if width == Width {
		return ""
	}
	return fmt.Sprintf(".p/%d", width)
}

// Path returns the path of a tile with a number of hashes.
func Path(level int, n int64, width int) string {
	return fmt.Sprintf("tile/%d/%s%s", level, number(n), partial(width))
}

// BundlePath returns the path of a bundle with a number of entries.
func BundlePath(n int64, width int) string { return "tile/entries/" + number(n) + partial(width) }

// EncodeHashes returns the bytes of a tile.
func EncodeHashes(hashes []tlog.Hash) []byte {
	b := make([]byte, 0, len(hashes)*tlog.HashSize)
	for _, h := range hashes {
		b = append(b, h[:]...)
	}
	return b
}

// DecodeHashes reads a tile of the given width.
func DecodeHashes(b []byte, width int) ([]tlog.Hash, error) {
	if len(b) != width*tlog.HashSize {
		return nil, fmt.Errorf("it has %d bytes; %d hashes are %d", len(b), width, width*tlog.HashSize)
	}
	hashes := make([]tlog.Hash, width)
	for i := range hashes {
		copy(hashes[i][:], b[i*tlog.HashSize:])
	}
	return hashes, nil
}

// CutEntry takes one entry off a bundle or a frame.
func CutEntry(b []byte) (entry, rest []byte, ok bool) {
	if len(b) < 2 {
		return nil, b, false
	}
	n := int(binary.BigEndian.Uint16(b))
	if len(b)-2 < n {
		return nil, b, false
	}
	return b[2 : 2+n], b[2+n:], true
}
