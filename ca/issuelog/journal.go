package issuelog

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// A journal holds what is not in the tree yet, as frames; each was written as one before the next one was begun. There are two
// journals: entries are written to one while those of the other go into the tree.

// magic begins each frame.
const magic = "chlogfrm"

// headerBytes is the length of a frame's header: magic, length of the payload (4 bytes), index of the first entry
// (8), number of entries (4), CRC-32C of all that and the payload (4).
const headerBytes = len(magic) + 4 + 8 + 4 + 4

// maxFrame bounds the payload of a frame.
const maxFrame = 32 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// frame is a group of entries on its way into a journal.
type frame struct {
	data  []byte // header and payload
	count uint32
}

func newFrame(spare []byte) *frame {
	return &frame{data: append(spare[:0], make([]byte, headerBytes)...)}
}

// finish fills in the header.
func (f *frame) finish(first int64) {
	h := f.data
	copy(h, magic)
	binary.BigEndian.PutUint32(h[8:], uint32(len(h)-headerBytes))
	binary.BigEndian.PutUint64(h[12:], uint64(first))
	binary.BigEndian.PutUint32(h[20:], f.count)
	binary.BigEndian.PutUint32(h[24:], checksum(h[:24], h[headerBytes:]))
}

func checksum(header, payload []byte) uint32 {
	return crc32.Update(crc32.Update(0, castagnoli, header), castagnoli, payload)
}

// ErrTorn: the rest of a journal is no frame.
var ErrTorn = errors.New("cut off")

// errDamaged: a part of a journal is no frame, though frames follow it. Those who wrote them had been told before that
// the damaged one is written.
var errDamaged = errors.New("damaged: frames follow a part that is none")

// ReadJournal gives each entry of a journal with its index. ErrTorn says that the journal ends in a frame that was not
// written whole; all before it were given.
func ReadJournal(f io.ReadSeeker, each func(index int64, entry []byte) error) error {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	r := bufio.NewReaderSize(f, 1<<16)
	var offset int64
	var payload []byte
	for {
		first, count, p, err := readFrame(r, payload)
		switch {
		case err == io.EOF:
			return nil
		case errors.Is(err, ErrTorn):
			return judgeTail(f, offset)
		case err != nil:
			return err
		}
		payload = p
		offset += int64(headerBytes + len(p))
		for i := range int64(count) {
			entry, rest, ok := tiles.CutEntry(p)
			if !ok {
				return fmt.Errorf("%w: entry %d does not fit its frame", errDamaged, first+i)
			}
			p = rest
			if err := each(first+i, entry); err != nil {
				return err
			}
		}
		if len(p) > 0 {
			return fmt.Errorf("%w: %d bytes after entry %d, the last of its frame", errDamaged, len(p), first+int64(count)-1)
		}
	}
}

func readFrame(r *bufio.Reader, spare []byte) (first int64, count uint32, payload []byte, err error) {
	var h [headerBytes]byte
	if n, err := io.ReadFull(r, h[:]); err == io.EOF && n == 0 {
		return 0, 0, nil, io.EOF
	} else if err == io.ErrUnexpectedEOF {
		return 0, 0, nil, ErrTorn
	} else if err != nil {
		return 0, 0, nil, err
	}
	n := binary.BigEndian.Uint32(h[8:])
	if string(h[:8]) != magic || n > maxFrame {
		return 0, 0, nil, ErrTorn
	}
	if uint32(cap(spare)) < n {
		spare = make([]byte, n)
	}
	payload = spare[:n]
	if _, err := io.ReadFull(r, payload); err == io.EOF || err == io.ErrUnexpectedEOF {
		return 0, 0, nil, ErrTorn
	} else if err != nil {
		return 0, 0, nil, err
	}
	if checksum(h[:24], payload) != binary.BigEndian.Uint32(h[24:]) {
		return 0, 0, nil, ErrTorn
	}
	return int64(binary.BigEndian.Uint64(h[12:])), binary.BigEndian.Uint32(h[20:]), payload, nil
}

// judgeTail tells a tail that a crash cut off from damage in the middle: after the former no whole frame follows.
func judgeTail(f io.ReadSeeker, offset int64) error {
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	rest, err := io.ReadAll(io.LimitReader(f, maxJournal+maxFrame))
	if err != nil {
		return err
	}
	for at := 1; at < len(rest); at++ {
		next := bytes.Index(rest[at:], []byte(magic))
		if next < 0 {
			break
		}
		at += next
		if claimed := rest[at:]; len(claimed) < headerBytes || int64(binary.BigEndian.Uint32(claimed[8:])) > int64(len(claimed)-headerBytes) {
			continue // it goes beyond the end: nothing to be allocated for it
		}
		if _, _, _, err := readFrame(bufio.NewReader(bytes.NewReader(rest[at:])), nil); err == nil {
			return fmt.Errorf("%w, at byte %d", errDamaged, offset)
		}
	}
	return ErrTorn
}

// firstIndex returns the index of a journal's first entry, or -1 for a journal without a whole frame.
func firstIndex(f io.ReaderAt) int64 {
	first, _, _, err := readFrame(bufio.NewReader(io.NewSectionReader(f, 0, 1<<62)), nil)
	if err != nil {
		return -1
	}
	return first
}
