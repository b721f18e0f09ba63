package board

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	mrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/trust"
)

const (
	// Beat is how often a note is written though nothing in it has changed, so that others see that its replica lives.
	Beat = time.Minute
	// writeEvery is how far apart writes are at least; what changes meanwhile goes into one.
	writeEvery = time.Second
	// checkpointEvery is how often a note is written of which only the checkpoint has changed, where there are others to read it.
	checkpointEvery = 10 * time.Second
	// evidenceEvery is the same for a note of which only those have changed that have not reached the goal; the last of them need not wait.
	evidenceEvery = 10 * time.Second
	// readEvery is how often notes are read though nobody woke us; readApart how far apart that is at least.
	readEvery = 10 * time.Second
	readApart = 100 * time.Millisecond
	// maxBackoff bounds the time between tries while the store fails.
	maxBackoff = 30 * time.Second
	// storeTime bounds one call of the store.
	storeTime = 10 * time.Second
	// twinTime is how long a second process under this replica's name is remembered after it wrote last.
	twinTime = 3 * Beat
)

// Config is what a Board is made of.
type Config struct {
	Store   store.Notes
	Sealer  *keys.Sealer
	Domain  trust.Domain
	Replica string
	Format  int // highest format of the document that this process reads
	Logger  *slog.Logger
}

// Board is one replica's place among the others. All methods are safe for concurrent use.
type Board struct {
	config    Config
	started   time.Time
	wake      chan struct{} // something was asked of Run
	calls     sync.Mutex    // held over reads and writes, so that none is overtaken by a later one
	announced atomic.Int64  // see Announced

	mu      sync.Mutex        // guards all below
	own     Note              // what it should say,
	ready   bool              // once somebody has said so
	stored  *Note             // what was written last; nil: nothing yet, or it does not lie there any more
	written Note              // what was written last,
	wrote   time.Time         // and when
	news    bool              // somebody called Wake
	others  map[string]*other // by replica
	list    []Note            // of others
	listed  func(string) bool // see Keep; nil: not known yet
	changed chan struct{}     // closed at the next change of list or Err
	read    time.Time         // when all notes were read last; zero: never
	failing [2]error          // why the last write and the last read failed
	since   time.Time         // when the first of these failed
	loud    bool              // the log has it as an error
	beat    time.Duration     // after wrote, when the same is written again
	former  *Note             // what our last run left; see Former
	looked  bool              // for it
	hurry   bool              // the next write need not wait for evidenceEvery
	last    func()            // see Last
	twin    time.Time         // when another process's note was found in place of ours; zero: never
	twinSum [sha256.Size]byte // of that note
}

// other is what is known of another replica's note.
type other struct {
	sum     [sha256.Size]byte // of what lies in the store; zero: it is gone
	note    *Note             // the last good one; nil: none yet
	raw     []byte            // as it lay in the store
	trouble string            // why what lies in the store is not taken; empty: it is
}

// Open returns a board that nobody has read or written yet.
func Open(c Config) *Board {
	var b [8]byte
	rand.Read(b[:])
	return &Board{
		config: c, started: time.Now(), wake: make(chan struct{}, 1), others: map[string]*other{}, changed: make(chan struct{}),
		own: Note{Replica: c.Replica, Instance: binary.BigEndian.Uint64(b[:]), Format: c.Format},
	}
}

// Replica returns the own name.
func (b *Board) Replica() string { return b.config.Replica }

// Own changes what the own note says; it is written soon. Before the first call nothing is written: the note of the run before stands, which
// knows more than we do at first. change must not keep the note, and what it puts into it must not
// change later. Instance, Sequence and Seen are the board's own.
func (b *Board) Own(change func(*Note)) {
	b.mu.Lock()
	before := b.own
	change(&b.own)
	b.own.Replica, b.own.Instance, b.own.Sequence, b.own.Seen = before.Replica, before.Instance, before.Sequence, before.Seen
	same := b.own.says(&before) && b.ready
	b.ready = true
	b.mu.Unlock()
	if !same {
		b.poke()
	}
}

// Vouch changes what the own note says of consumers. Before the first call of Own it is not written.
func (b *Board) Vouch(change func(*Evidence)) {
	b.mu.Lock()
	before := b.own.Evidence
	change(&b.own.Evidence)
	same := b.own.Evidence.says(&before)
	b.mu.Unlock()
	if !same {
		b.poke()
	}
}

// Hurry has a change of the own evidence written without waiting for others to come along.
func (b *Board) Hurry() {
	b.mu.Lock()
	b.hurry = true
	b.mu.Unlock()
	b.poke()
}

// Announced returns up to when certificates may end according to the own note as it lies in the store (see Evidence.Ahead), in Unix
// seconds; 0 before the first. It costs nothing: each certificate asks.
func (b *Board) Announced() int64 { return b.announced.Load() }

// Former returns the note that the last process of this replica left; nil if there is none. known is false until the store was asked.
func (b *Board) Former() (n *Note, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.former, b.looked
}

// Last sets what is called before Run writes the own note the last time.
func (b *Board) Last(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = f
}

// All returns the notes of all replicas: the own one as it was written last, if it was, and those of Others, dead ones among them.
func (b *Board) All() []Note {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := slices.Clone(b.list)
	if b.wrote.IsZero() {
		return out
	}
	return append(out, b.written)
}

// Mine returns the own note, as it is to be.
func (b *Board) Mine() Note {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.own
}

// Others returns the last good note of each other replica, by name. Notes that are gone from the store are among them until
// Keep. Callers must not change them.
func (b *Board) Others() []Note {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.list
}

// Changed is closed at the next change of what Others, Trouble or Err return. Ask for it before those.
func (b *Board) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed
}

// Wake makes Run read the notes soon. It does not block: it is for store.Watch.
func (b *Board) Wake() {
	b.mu.Lock()
	b.news = true
	b.mu.Unlock()
	b.poke()
}

func (b *Board) poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Err says why this replica must not serve: another live process writes under its name.
func (b *Board) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.twin.IsZero() || time.Since(b.twin) > twinTime {
		return nil
	}
	return fmt.Errorf("another process writes into the store as replica %s, last seen at %s: each replica needs a name of its own, set as `state.replica`, "+
		"and a folder of its own for its logs", b.config.Replica, b.twin.UTC().Format(time.RFC3339))
}

// Fresh returns when the notes were read last (zero: never), and why they could not be written or read at the last try.
func (b *Board) Fresh() (read time.Time, why error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.read, errors.Join(b.failing[:]...)
}

// Trouble returns why the note of a replica that lies in the store is not taken, by replica. What it said before stands.
func (b *Board) Trouble() map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := map[string]string{}
	for name, o := range b.others {
		if o.trouble != "" {
			out[name] = o.trouble
		}
	}
	return out
}

// Keep says which replicas the document lists. The notes of others are forgotten; a note of one of these that is gone from the store
// is put back by whoever has it, since a replica that starts now would take what it said for unsaid.
func (b *Board) Keep(listed func(note string) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listed = listed
	known := len(b.others)
	maps.DeleteFunc(b.others, func(name string, o *other) bool {
		return !listed(name) && (o.note == nil || o.sum == [sha256.Size]byte{})
	})
	if len(b.others) != known {
		b.tell()
	}
}

// mend puts back notes that are gone from the store.
func (b *Board) mend(ctx context.Context) error {
	lost := map[string][]byte{}
	var over []string
	b.mu.Lock()
	for name, o := range b.others {
		if n := o.note; n != nil && b.listed != nil && !b.listed(name) && name != b.config.Replica && time.Since(n.Seen) > ca.LeafTTLLimit+time.Hour {
			over = append(over, name) // nobody writes under that name any more, and all that it speaks of has ended
		}
		if o.note != nil && o.sum == [sha256.Size]byte{} && b.listed != nil && b.listed(name) {
			lost[name] = o.raw
		}
	}
	b.mu.Unlock()
	for _, name := range over {
		if err := b.config.Store.DropNote(ctx, name); err != nil {
			return err
		}
	}
	for name, raw := range lost {
		b.config.Logger.Warn("the note of a replica was gone from the store; putting it back", "replica", name)
		if err := b.put(ctx, name, raw); err != nil {
			return err
		}
	}
	return nil
}

func (b *Board) put(ctx context.Context, name string, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	return b.config.Store.PutNote(ctx, name, data)
}

// HeirName is where the last note of a replica stays whose log was lost, while another log goes on under its name.
func HeirName(replica string, logID uint32) string {
	id := fmt.Sprintf(".%d", logID)
	return replica[:min(len(replica), store.MaxName-len(id))] + id
}

// remember takes over what our last run left, once; until somebody says more, its evidence stands. Caller holds mu.
func (b *Board) remember(raw []byte) {
	if b.looked {
		return
	}
	b.looked = true
	n, err := decode(raw, b.config.Sealer, b.config.Domain, b.config.Replica)
	if err != nil { // there is none, or none that can be told from a forged one
		return
	}
	b.former = n
	if none := (Evidence{}); b.own.Evidence.says(&none) {
		b.own.Evidence = n.Evidence
	}
}

// bequeath keeps the note that lies under the own name, if it is about another log than ours: what was revoked in that stays revoked.
func (b *Board) bequeath(ctx context.Context, logID uint32) error {
	all, err := b.config.Store.Notes(ctx)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.remember(all[b.config.Replica])
	former := b.former
	b.mu.Unlock()
	if former == nil || former.LogID == logID || len(former.Revoked) == 0 { // there is none, or none that says anything
		return nil
	}
	old := *former
	old.Replica = HeirName(b.config.Replica, old.LogID)
	old.Evidence = Evidence{} // the own note has it
	data, err := old.encode(b.config.Sealer, b.config.Domain)
	if err != nil {
		return err
	}
	b.config.Logger.Warn("this replica has another log than before; what was revoked in the former one is kept", "log_id", old.LogID)
	return b.put(ctx, old.Replica, data)
}

// tell makes the list anew and wakes who waits for changes. Caller holds mu.
func (b *Board) tell() {
	b.list = nil
	for _, name := range slices.Sorted(maps.Keys(b.others)) {
		if n := b.others[name].note; n != nil {
			b.list = append(b.list, *n)
		}
	}
	close(b.changed)
	b.changed = make(chan struct{})
}

// Read reads the notes now. What it returned without an error is at least as new as the call.
func (b *Board) Read(ctx context.Context) error {
	b.calls.Lock()
	defer b.calls.Unlock()
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	b.mu.Lock()
	b.news = false // what comes from here on may not be in the answer
	b.mu.Unlock()
	all, err := b.config.Store.Notes(ctx)
	if err == nil {
		b.take(all)
	}
	b.result(ctx, 1, err)
	return err
}

// take takes over what the store has.
func (b *Board) take(all map[string][]byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.read = time.Now()
	b.remember(all[b.config.Replica])
	anew := false
	for name, raw := range all {
		if name == b.config.Replica {
			anew = b.look(raw) || anew
			continue
		}
		o := b.others[name]
		if o == nil {
			o = new(other)
			b.others[name] = o
		}
		if sum := sha256.Sum256(raw); sum != o.sum {
			o.sum = sum
			b.adopt(name, o, raw)
			anew = true
		}
	}
	if _, there := all[b.config.Replica]; !there {
		b.stored = nil // it is to be written again
	}
	for name, o := range b.others {
		if _, there := all[name]; there {
			continue
		}
		if o.note == nil {
			delete(b.others, name)
		}
		if o.sum != [sha256.Size]byte{} {
			o.sum, o.trouble = [sha256.Size]byte{}, "it is gone from the store"
			anew = true
		}
	}
	if anew {
		b.tell()
	}
}

// adopt takes over the note of another replica, if it is good and no older than what we have. Caller holds mu.
func (b *Board) adopt(name string, o *other, raw []byte) {
	n, err := decode(raw, b.config.Sealer, b.config.Domain, name)
	if err == nil && o.note != nil && n.Instance == o.note.Instance && n.Sequence < o.note.Sequence {
		err = errors.New("it is older than one that was there before: somebody put it back")
	}
	before := o.trouble
	if err == nil {
		o.note, o.raw, o.trouble = n, raw, ""
		return
	}
	if o.trouble = err.Error(); o.trouble != before {
		b.config.Logger.Error("the note of another replica is not taken", "replica", name, "reason", o.trouble)
	}
}

// look looks at the own note as it lies in the store: one of another process that came after ours was written by a twin. What lay
// there before us is from our last run. It reports whether Err changes. Caller holds mu.
func (b *Board) look(raw []byte) bool {
	if b.stored == nil {
		return false
	}
	n, err := decode(raw, b.config.Sealer, b.config.Domain, b.config.Replica)
	switch {
	case err == nil && n.Instance == b.own.Instance && n.Sequence >= b.stored.Sequence:
		return false
	case err != nil || n.Instance == b.own.Instance || n.Seen.Before(b.started): // spoilt, or put back: it is to be written again
		b.stored = nil
		return false
	}
	sum := sha256.Sum256(raw)
	if sum == b.twinSum { // it was seen already
		return false
	}
	first := b.twin.IsZero() || time.Since(b.twin) > twinTime
	if b.twin, b.twinSum = time.Now(), sum; first {
		b.config.Logger.Error("another process writes into the store under this replica's name", "replica", b.config.Replica)
	}
	return first
}

// Write writes the own note now, if the store does not have it as it is to be.
func (b *Board) Write(ctx context.Context) error { return b.write(ctx, false) }

func (b *Board) write(ctx context.Context, beat bool) error {
	b.calls.Lock()
	defer b.calls.Unlock()
	b.mu.Lock()
	if !b.ready || b.stored != nil && b.own.says(b.stored) && !beat {
		b.mu.Unlock()
		return nil
	}
	logID, first := b.own.LogID, b.wrote.IsZero()
	b.mu.Unlock()
	if first {
		if err := b.bequeath(ctx, logID); err != nil {
			b.result(ctx, 0, err)
			return err
		}
	}
	b.mu.Lock()
	b.own.Sequence++
	b.own.Seen = time.Now().UTC()
	b.hurry = false
	n := b.own
	b.mu.Unlock()
	data, shown, err := b.encode(&n)
	if err != nil {
		return fmt.Errorf("writing this replica's note: %w", err)
	}
	if err = b.put(ctx, b.config.Replica, data); err == nil {
		b.mu.Lock()
		b.stored, b.written, b.wrote, b.beat = &n, *shown, time.Now(), Beat-mrand.N(Beat/10) // two under one name are soon out of step
		b.announced.Store(int64(seconds(n.Evidence.Ahead)))
		b.mu.Unlock()
	}
	b.result(ctx, 0, err)
	return err
}

// encode returns a note's bytes, and what they say: of the evidence as much as there is room for.
func (b *Board) encode(n *Note) (data []byte, shown *Note, err error) {
	most := store.NoteRoom(b.config.Store)
	if data, err = n.encode(b.config.Sealer, b.config.Domain); err != nil || len(data) <= most {
		return data, n, err
	}
	less, none := *n, *n
	none.Evidence = Evidence{}
	if data, err = none.encode(b.config.Sealer, b.config.Domain); err != nil {
		return nil, nil, err
	}
	less.Evidence = n.Evidence.trim(most - len(data))
	data, err = less.encode(b.config.Sealer, b.config.Domain)
	return data, &less, err
}

// downAfter is for how long a failure is a warning in the log: a store that is away for a moment is nobody's work.
const downAfter = 5 * time.Minute

// result notes how a write (0) or a read (1) ended. One that was called off says nothing of the store.
func (b *Board) result(ctx context.Context, which int, err error) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	before := errors.Join(b.failing[:]...)
	b.failing[which] = err
	after := errors.Join(b.failing[:]...)
	switch {
	case after != nil && before == nil:
		b.since, b.loud = time.Now(), false
		b.config.Logger.Warn("replicas do not hear of each other; trying again", "reason", after.Error())
	case after != nil && !b.loud && time.Since(b.since) > downAfter:
		b.loud = true
		b.config.Logger.Error("replicas still do not hear of each other; trying again", "since", b.since.UTC(), "reason", after.Error())
	case after == nil && before != nil:
		b.config.Logger.Info("replicas hear of each other again")
	}
}

// Run writes the own note and reads the others' until ctx ends; then the own one is written a last time.
func (b *Board) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	wait := time.Duration(0) // after a failure
	var tried time.Time
	for {
		select {
		case <-ctx.Done():
			b.mu.Lock()
			f := b.last
			b.mu.Unlock()
			if f != nil {
				f()
			}
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			defer cancel()
			_ = b.Write(last) // the next start writes what this does not
			return nil
		case <-b.wake:
		case <-timer.C:
		}
		now := time.Now()
		write, read := b.due(now)
		if left := tried.Add(wait).Sub(now); wait > 0 && left > 0 { // the store failed a moment ago
			timer.Reset(left)
			continue
		}
		var failed error
		if !read.After(now) || !write.After(now) { // first, so that a twin's note is seen before it is overwritten
			if failed = b.Read(ctx); failed == nil {
				failed = b.mend(ctx)
			}
		}
		if !write.After(now) {
			failed = errors.Join(failed, b.write(ctx, true))
		}
		if tried = now; failed != nil {
			wait = min(max(2*wait, writeEvery), maxBackoff)
			timer.Reset(wait/2 + mrand.N(wait))
			continue
		}
		wait = 0
		write, read = b.due(now)
		next := write
		if read.Before(next) {
			next = read
		}
		timer.Reset(max(time.Until(next), time.Millisecond))
	}
}

// due returns when to write and when to read next.
func (b *Board) due(now time.Time) (write, read time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !b.ready:
		write = now.Add(time.Hour) // Own wakes us
	case b.stored == nil || !b.own.means(b.stored):
		write = b.wrote.Add(writeEvery) // long ago, before the first
	case b.hurry:
		write = b.wrote.Add(writeEvery)
	case !b.own.Evidence.sets(&b.stored.Evidence):
		write = b.wrote.Add(evidenceEvery)
	case b.own.Checkpoint != b.stored.Checkpoint && len(b.list) > 0 && len(b.own.Revoked) < 1000: // else it goes with the next beat
		write = b.wrote.Add(checkpointEvery)
	default:
		write = b.wrote.Add(b.beat)
	}
	if read = b.read.Add(readEvery); b.read.IsZero() {
		read = now
	} else if b.news {
		read = b.read.Add(readApart)
	}
	return write, read
}
