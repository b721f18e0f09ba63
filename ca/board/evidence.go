package board

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/chancery-project/chancery/ca/document"
)

// Evidence is what a replica knows of the consumers that it serves: agents, and clients without one of ours. It says who has not done
// yet what the document asks for, never how many have (decision D2): sets of two replicas can be joined, sums cannot.
type Evidence struct {
	// Goal is what the sets are about, as the document of version Acknowledged says: what was learnt before that version was taken
	// over is in them, and whoever was served later got what that version has.
	Goal document.Goal
	// Behind are the consumers that were served by this replica and have not reached the goal, by Consumer.
	Behind []Behind
	// Settled are consumers that other replicas have as behind, and that reached the goal here after those said so, in order.
	Settled []uint64
	// Ahead is announced before it comes true: no certificate that this process may have signed ends later. It counts once the process is
	// gone, for any goal but that of its sets: those have everybody for theirs, but those that Lost speaks of.
	Ahead time.Time
	// Lost is until when somebody counts who is not in the sets, and whom nobody can name: served by a former process of this replica,
	// or one too many for the sets. It counts for a replica that lives, too. Zero: the sets have everybody.
	Lost  time.Time
	Total uint64 // consumers known here, for people
	// Sample are some of those behind, with words for people; at most MaxSample, by Consumer.
	Sample []Laggard
}

// Behind is a consumer that has not reached the goal.
type Behind struct {
	Consumer uint64    // beginning of a hash of its name
	Until    time.Time // when the last certificate ends that it may hold; it does not count after that. Whole seconds
	// Here: it is connected to this replica, and said so itself. Then what others have as settled is older, while this replica lives.
	Here bool
}

// Laggard says who a consumer is and why it is behind.
type Laggard struct {
	Consumer uint64
	Name     string // at most MaxName bytes
	Why      string // at most MaxWhy bytes
}

// Bounds of what a note says of consumers.
const (
	MaxBehind = 20_000
	MaxSample = 20
	MaxName   = 200
	MaxWhy    = 300
	// MaxLeave bounds the issuers of a goal.
	MaxLeave = 64
)

// Stragglers returns until when somebody may count whom the sets do not name, once the process that wrote this is gone; zero: nobody. It
// is no answer for a replica that lives: of that Lost counts alone, for the goal of its sets.
func (e *Evidence) Stragglers(goal document.Goal) time.Time {
	if e.Goal.Equal(goal) || e.Lost.After(e.Ahead) {
		return e.Lost
	}
	return e.Ahead
}

// says reports whether two say the same of everybody.
func (e *Evidence) says(o *Evidence) bool {
	return e.Ahead.Equal(o.Ahead) && e.Total == o.Total && slices.Equal(e.Sample, o.Sample) && e.sets(o)
}

// sets is says of what gates go by; e.Ahead has its own ways into the store.
func (e *Evidence) sets(o *Evidence) bool {
	return e.Goal.Equal(o.Goal) && e.Lost.Equal(o.Lost) && slices.Equal(e.Settled, o.Settled) &&
		slices.EqualFunc(e.Behind, o.Behind, func(a, b Behind) bool { return a.Consumer == b.Consumer && a.Here == b.Here && a.Until.Equal(b.Until) })
}

// trim leaves out what does not fit into a number of bytes. Who is left out is lost until the last of them ends, which is as safe.
func (e Evidence) trim(room int) Evidence {
	over := func() int {
		return len(e.Sample)*(12+MaxName+MaxWhy) + len(e.Settled)*8 + len(e.Behind)*14 + 40 + len(e.Goal.Leave)*(1+maxIssuer) - room
	}
	if over() > 0 {
		e.Sample = nil
	}
	if n := over(); n > 0 {
		e.Settled = e.Settled[:max(0, len(e.Settled)-(n+7)/8)]
	}
	if n := over(); n > 0 {
		e = e.cut(max(0, len(e.Behind)-(n+13)/14))
	}
	return e
}

// cut keeps the first of those behind.
func (e Evidence) cut(n int) Evidence {
	for _, b := range e.Behind[n:] {
		if b.Until.After(e.Lost) {
			e.Lost = b.Until
		}
	}
	e.Behind = e.Behind[:n]
	return e
}

// append writes the evidence: goal, times in seconds, total, those behind (how many, their earliest end, each 8 bytes and a number that
// has the time after that and whether it is here), those settled, the sample.
func (e *Evidence) append(b []byte) ([]byte, error) {
	if err := e.check(); err != nil {
		return nil, err
	}
	b = binary.AppendUvarint(b, e.Goal.Generation)
	b = binary.AppendUvarint(b, uint64(len(e.Goal.Leave)))
	for _, id := range e.Goal.Leave {
		raw, _ := unhex(id)
		b = append(append(b, byte(len(raw))), raw...)
	}
	for _, x := range []uint64{seconds(e.Ahead), seconds(e.Lost), e.Total, uint64(len(e.Behind))} {
		b = binary.AppendUvarint(b, x)
	}
	if len(e.Behind) > 0 {
		first := e.first()
		b = binary.AppendUvarint(b, uint64(first))
		for _, x := range e.Behind {
			more := uint64(x.Until.Unix()-first) << 1
			if x.Here {
				more |= 1
			}
			b = binary.AppendUvarint(binary.BigEndian.AppendUint64(b, x.Consumer), more)
		}
	}
	b = binary.AppendUvarint(b, uint64(len(e.Settled)))
	for _, x := range e.Settled {
		b = binary.BigEndian.AppendUint64(b, x)
	}
	b = binary.AppendUvarint(b, uint64(len(e.Sample)))
	for _, x := range e.Sample {
		b = binary.BigEndian.AppendUint64(b, x.Consumer)
		for _, s := range []string{x.Name, x.Why} {
			b = append(binary.AppendUvarint(b, uint64(len(s))), s...)
		}
	}
	return b, nil
}

// check reports what a reader would refuse.
func (e *Evidence) check() error {
	if len(e.Behind) > MaxBehind || len(e.Settled) > MaxBehind || len(e.Sample) > MaxSample || len(e.Goal.Leave) > MaxLeave {
		return fmt.Errorf("a note with %d consumers behind and %d settled (at most %d), %d described (at most %d), %d issuers to leave (at most %d)",
			len(e.Behind), len(e.Settled), MaxBehind, len(e.Sample), MaxSample, len(e.Goal.Leave), MaxLeave)
	}
	if !ascend(e.Behind, func(b Behind) uint64 { return b.Consumer }) || !ascend(e.Settled, func(x uint64) uint64 { return x }) ||
		!ascend(e.Sample, func(l Laggard) uint64 { return l.Consumer }) {
		return errors.New("the consumers of a note are not in order")
	}
	for i, id := range e.Goal.Leave {
		if raw, ok := unhex(id); !ok || len(raw) == 0 || len(raw) > maxIssuer || i > 0 && e.Goal.Leave[i-1] >= id {
			return fmt.Errorf("issuer %.140q of a goal should be hex of 1 to %d bytes, and after the one before", id, maxIssuer)
		}
	}
	for _, x := range e.Behind {
		if s := x.Until.Unix(); s <= 0 || s > maxTime {
			return fmt.Errorf("a consumer counts until %s", x.Until)
		}
	}
	for _, t := range []time.Time{e.Ahead, e.Lost} {
		if !t.IsZero() && (t.Unix() <= 0 || t.Unix() > maxTime) {
			return fmt.Errorf("certificates that were announced end at %s", t)
		}
	}
	for _, x := range e.Sample {
		if len(x.Name) > MaxName || len(x.Why) > MaxWhy || !utf8.ValidString(x.Name) || !utf8.ValidString(x.Why) {
			return fmt.Errorf("a consumer is described in %d and %d bytes; at most %d and %d of UTF-8 fit", len(x.Name), len(x.Why), MaxName, MaxWhy)
		}
	}
	return nil
}

// ascend reports whether a list is in order, and has nobody twice.
func ascend[T any](all []T, of func(T) uint64) bool {
	for i := range all {
		if i > 0 && of(all[i]) <= of(all[i-1]) {
			return false
		}
	}
	return true
}

// first returns the earliest end of those behind, of which there are some.
func (e *Evidence) first() int64 {
	least := int64(math.MaxInt64)
	for _, x := range e.Behind {
		least = min(least, x.Until.Unix())
	}
	return least
}

// seconds writes a time, rounded up; zero is 0.
func seconds(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(whole(t).Unix())
}

// whole rounds a time up to a second.
func whole(t time.Time) time.Time {
	return t.Add(time.Second - 1).Truncate(time.Second).UTC()
}

// moment reads what seconds wrote.
func (r *reader) moment() time.Time {
	s := r.number(maxTime)
	if s == 0 {
		return time.Time{}
	}
	return time.Unix(int64(s), 0).UTC()
}

// evidence reads what append wrote.
func (r *reader) evidence() (e Evidence) {
	e.Goal.Generation = r.number(math.MaxUint64)
	for n := r.number(MaxLeave); n > 0 && !r.bad; n-- {
		size := int(r.take(1)[0])
		id := hex.EncodeToString(r.take(size))
		if size == 0 || size > maxIssuer || len(e.Goal.Leave) > 0 && e.Goal.Leave[len(e.Goal.Leave)-1] >= id {
			r.bad = true
		}
		e.Goal.Leave = append(e.Goal.Leave, id)
	}
	e.Ahead, e.Lost, e.Total = r.moment(), r.moment(), r.number(math.MaxUint64)
	e.Behind = r.behind()
	n := int(r.number(MaxBehind))
	if 8*n > len(r.rest) {
		r.bad = true
	}
	for i := 0; i < n && !r.bad; i++ {
		x := binary.BigEndian.Uint64(r.take(8))
		if i > 0 && x <= e.Settled[i-1] {
			r.bad = true
		}
		e.Settled = append(e.Settled, x)
	}
	for n, i := int(r.number(MaxSample)), 0; i < n && !r.bad; i++ {
		x := Laggard{Consumer: binary.BigEndian.Uint64(r.take(8)), Name: r.text(MaxName), Why: r.text(MaxWhy)}
		if i > 0 && x.Consumer <= e.Sample[i-1].Consumer {
			r.bad = true
		}
		e.Sample = append(e.Sample, x)
	}
	return e
}

func (r *reader) behind() (all []Behind) {
	n := int(r.number(MaxBehind))
	if n == 0 || r.bad || 9*n > len(r.rest) {
		r.bad = r.bad || n > 0
		return nil
	}
	first, least := int64(r.number(maxTime)), int64(math.MaxInt64)
	all = make([]Behind, 0, n)
	for i := 0; i < n && !r.bad; i++ {
		x := Behind{Consumer: binary.BigEndian.Uint64(r.take(8))}
		more := r.number(2*(maxTime-uint64(first)) + 1)
		at := first + int64(more>>1)
		least = min(least, at)
		x.Until, x.Here = time.Unix(at, 0).UTC(), more&1 != 0
		if i > 0 && x.Consumer <= all[i-1].Consumer {
			r.bad = true
		}
		all = append(all, x)
	}
	if r.bad = r.bad || least != first || first == 0; r.bad {
		return nil
	}
	return all
}

func (r *reader) text(limit uint64) string {
	s := string(r.take(int(r.number(limit))))
	if !utf8.ValidString(s) {
		r.bad = true
	}
	return s
}
