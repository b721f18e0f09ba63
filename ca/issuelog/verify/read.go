package verify

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// Reader reads a log from its folder, also while a server writes to it. What it returns is checked only where its
// methods say so.
type Reader struct {
	Dir        string
	PublicKey  string
	Checkpoint *issuelog.Checkpoint

	edge map[string][]byte // partial tiles and bundle of the checkpoint: a server replaces them with every new one
}

// OpenReader reads the checkpoint of a log. An empty public key stands for the one in the folder, which whoever can
// write to the folder can change.
func OpenReader(dir, publicKey string) (*Reader, error) {
	if publicKey == "" {
		var err error
		if publicKey, err = issuelog.PublicKey(dir); err != nil {
			return nil, err
		}
	}
	r := &Reader{Dir: dir, PublicKey: publicKey}
	for {
		data, err := issuelog.ReadSmall(filepath.Join(dir, issuelog.CheckpointFile))
		if err != nil {
			return nil, fmt.Errorf("reading checkpoint: %w", err)
		}
		if r.Checkpoint != nil && string(data) == r.Checkpoint.Note {
			return r, nil // nothing changed since; what was not found is not there
		}
		if r.Checkpoint, err = issuelog.ParseCheckpoint(data, publicKey); err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(dir, issuelog.CheckpointFile), err)
		}
		if r.readEdge() {
			return r, nil
		}
	}
}

// readEdge reads what is not full, and reports whether all of it was there.
func (r *Reader) readEdge() bool {
	r.edge = map[string][]byte{}
	size := r.Checkpoint.Size
	names := []string{tiles.BundlePath(size/tiles.Width, int(size%tiles.Width))}
	for level := 0; size>>(8*level) > 0; level++ {
		names = append(names, tiles.Path(level, size>>(8*(level+1)), int(size>>(8*level)%tiles.Width)))
	}
	complete := true
	for _, name := range names {
		if filepath.Base(name) == "0" { // of width 0: all are full
			continue
		}
		data, err := readBounded(filepath.Join(r.Dir, name), issuelog.MaxBundle)
		if err == nil {
			r.edge[name] = data
		}
		complete = complete && err == nil
	}
	return complete
}

func (r *Reader) read(name string) ([]byte, error) {
	if data, ok := r.edge[name]; ok {
		return data, nil
	}
	data, err := readBounded(filepath.Join(r.Dir, name), issuelog.MaxBundle)
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.New("it is missing")
	}
	return data, err
}

func readBounded(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > most {
		return nil, fmt.Errorf("it has %d bytes; at most %d are read", info.Size(), most)
	}
	data := make([]byte, info.Size())
	_, err = io.ReadFull(f, data)
	return data, err
}

// bundles returns the number of bundles, and width the number of entries in one of them.
func (r *Reader) bundles() int64 { return (r.Checkpoint.Size + tiles.Width - 1) / tiles.Width }

func (r *Reader) width(n int64) int { return int(min(tiles.Width, r.Checkpoint.Size-n*tiles.Width)) }

// hashes returns a reader of the tree's hashes that verifies what it reads against the checkpoint.
func (r *Reader) hashes() tlog.HashReader {
	return tlog.TileHashReader(tlog.Tree{N: r.Checkpoint.Size, Hash: r.Checkpoint.Root}, tileReader{r})
}

// tileReader reads tiles for package tlog.
type tileReader struct{ r *Reader }

func (tileReader) Height() int { return 8 }

func (t tileReader) ReadTiles(wanted []tlog.Tile) ([][]byte, error) {
	var all [][]byte
	for _, x := range wanted {
		name := tiles.Path(x.L, x.N, x.W)
		data, err := t.r.read(name)
		if err == nil && len(data) != x.W*tlog.HashSize {
			err = fmt.Errorf("it has %d bytes; %d hashes are %d", len(data), x.W, x.W*tlog.HashSize)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(t.r.Dir, name), err)
		}
		all = append(all, data)
	}
	return all, nil
}

func (tileReader) SaveTiles([]tlog.Tile, [][]byte) {}

// inOrder does work for 0 to n-1 on all processors and takes the results in order. Few results wait at a time.
func inOrder[T any](n int64, work func(int64) T, take func(int64, T) error) error {
	workers := runtime.GOMAXPROCS(0)
	queue := make(chan chan T, 2*workers)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		defer close(queue)
		slots := make(chan struct{}, workers)
		for i := range n {
			result := make(chan T, 1)
			select {
			case slots <- struct{}{}:
			case <-stop:
				return
			}
			go func() {
				result <- work(i)
				<-slots
			}()
			select {
			case queue <- result:
			case <-stop:
				return
			}
		}
	}()
	var i int64
	for result := range queue {
		if err := take(i, <-result); err != nil {
			return err
		}
		i++
	}
	return nil
}
