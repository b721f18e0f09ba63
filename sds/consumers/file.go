package consumers

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/document/strict"
	"github.com/chancery-project/chancery/ca/durable"
)

// format of the file.
const format = 1

// maxFile bounds a file that is read. A table of maxConsumers with two SVIDs each is smaller.
const maxFile = 32 << 20

// content is the file.
type content struct {
	Format int      `json:"format"`
	Agent  hexBytes `json:"agent"`
	Rows   []row    `json:"rows"`
}

// Open reads a table, or begins one where there is none that can be read: then the agent has another ID, and whoever counts on the
// table before it waits until all that was in it has ended. A file that cannot be written is an error.
func Open(c Config) (*Table, error) {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	t := &Table{file: c.File, logger: c.Logger, boot: bootID(), opened: time.Now(), live: map[Process]*consumer{}, changed: make(chan struct{})}
	var err error
	if t.lock, err = hold(c.File + ".lock"); err != nil {
		return nil, err
	}
	data, err := readFile(c.File)
	if err == nil {
		err = t.load(data)
	}
	if err == nil {
		t.prune(t.now())
		return t, nil
	}
	t.live, t.gone = map[Process]*consumer{}, nil
	if _, err := rand.Read(t.id[:]); err != nil {
		return nil, err
	}
	if errors.Is(err, fs.ErrNotExist) {
		c.Logger.Info("a table of consumers is begun; what an earlier one has said counts until its SVIDs have ended", "file", c.File, "agent", fmt.Sprintf("%x", t.id))
	} else {
		c.Logger.Error("the table of consumers is lost, and another one is begun: rotations wait until the SVIDs that were handed out have ended",
			"file", c.File, "agent", fmt.Sprintf("%x", t.id), "reason", err.Error())
	}
	t.mu.Lock()
	b := t.join()
	t.mu.Unlock()
	if <-b.done; b.err != nil {
		return nil, errors.Join(b.err, t.Close())
	}
	return t, nil
}

// hold keeps other processes from the file. The kernel lets go of it with the process.
func hold(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("table of consumers: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("table of consumers: %s is held by another agent (%w); give each agent a file of its own", path, err)
	}
	return f, nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is no file")
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("it is larger than %d bytes", maxFile)
	}
	return data, err
}

// load takes a file over, strictly.
func (t *Table) load(data []byte) error {
	var c content
	if err := strict.JSON(data, &c); err != nil {
		return err
	}
	switch {
	case c.Format != format:
		return fmt.Errorf("its format is %d; this version reads %d", c.Format, format)
	case len(c.Agent) != len(t.id):
		return fmt.Errorf("the agent's ID has %d bytes, not %d", len(c.Agent), len(t.id))
	case len(c.Rows) > 2*maxConsumers:
		return fmt.Errorf("it has %d rows", len(c.Rows))
	}
	copy(t.id[:], c.Agent)
	for i := range c.Rows {
		r := &c.Rows[i]
		if err := r.check(); err != nil {
			return fmt.Errorf("row %d: %w", i, err)
		}
		for j := range r.SVIDs {
			r.SVIDs[j].saved, r.SVIDs[j].life = true, t.now().up+time.Until(r.SVIDs[j].NotAfter)
		}
		one := &consumer{row: *r, streams: map[*Stream]struct{}{}}
		switch p := r.process(); {
		case r.Boot == "" || r.Boot != t.boot:
			t.gone = append(t.gone, one)
		case t.live[p] != nil:
			return fmt.Errorf("row %d is of the same process as one before", i)
		default:
			t.live[p] = one
		}
	}
	return nil
}

// join returns the next write, which has all that is in the table now. mu is held.
func (t *Table) join() *batch {
	if t.next == nil {
		t.next = &batch{done: make(chan struct{})}
	}
	if !t.writing {
		t.writing = true
		go t.write()
	}
	return t.next
}

// write writes as long as somebody waits for it. Those that come while it does share the next write.
func (t *Table) write() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.next != nil {
		b := t.next
		t.next = nil
		data, written, err := t.encode()
		wasDirty := t.dirty
		t.dirty = false
		t.mu.Unlock()
		if err == nil {
			err = durable.Replace(t.file, data, 0o600)
		}
		t.mu.Lock()
		if err != nil { // what is in the table and not in the file was handed to nobody; it stays in the table, to be safe
			b.err = fmt.Errorf("writing the table of consumers: %w", err)
			t.dirty = t.dirty || wasDirty
			t.logger.Error("the table of consumers cannot be written; consumers keep the SVIDs that they have", "file", t.file, "reason", err.Error())
		} else {
			t.saved = time.Now()
			for _, w := range written {
				if i := w.of.find(w.name, w.version); i >= 0 {
					w.of.SVIDs[i].saved = true
				}
			}
		}
		close(b.done)
	}
	t.writing = false
}

// unsaved is an SVID that a write is the first to have.
type unsaved struct {
	of            *consumer
	name, version string
}

// encode returns the file, and what is in it for the first time. mu is held.
func (t *Table) encode() ([]byte, []unsaved, error) {
	c := content{Format: format, Agent: t.id[:], Rows: []row{}}
	var news []unsaved
	add := func(one *consumer) {
		if len(one.SVIDs) == 0 {
			return
		}
		c.Rows = append(c.Rows, one.row)
		for _, h := range one.SVIDs {
			if !h.saved {
				news = append(news, unsaved{one, h.Name, h.Version})
			}
		}
	}
	for _, one := range t.gone {
		add(one)
	}
	for _, one := range t.live {
		add(one)
	}
	data, err := json.Marshal(&c)
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("it would have %d bytes; %d are the most", len(data), maxFile)
	}
	return data, news, err
}

// bootID returns what the kernel calls this run of the machine; empty if it does not say: then no row is taken for that of a
// process that is there.
func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil || len(data) > 2*maxNode {
		return ""
	}
	return strings.TrimSpace(string(data))
}
