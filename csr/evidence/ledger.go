package evidence

import (
	"crypto/sha256"
	"encoding/binary"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/chancery-project/chancery/ca/board"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/document/revoked"
	"github.com/chancery-project/chancery/trust"
)

const (
	shards = 32
	// maxConsumers bounds those that are known one by one, twice as many as a server has streams.
	maxConsumers = 40_000
	// maxGiven and maxSaid bound what is kept of one consumer: certificates apart, and streams that say they are it.
	maxGiven = 8
	maxSaid  = 8
	// delivery is how long an answer may be under way to an agent that says meanwhile what it holds.
	delivery = 10 * time.Second
)

// Config is what a Ledger is made of.
type Config struct {
	Board *board.Board // where the sets go; nil for nowhere
	// Life is how long certificates live unless somebody asks for more, and MaxLife how long they live at most.
	Life, MaxLife time.Duration
	// Served: a process of this replica before this one may have signed certificates, though it left no note.
	Served bool
	// Line is the name of the authority's line of trust domains: an identity is the same consumer in each of them. Zero: there is one.
	Line trust.Domain
	// Own returns the issuer (as in Leaf) and the end of the server's own certificate; an empty issuer if there is none. May be nil.
	Own func() (issuer string, notAfter time.Time)
	// Kin reports whether the bundle has other trust domains of the same authority: who cannot read that is behind. It does not block. May
	// be nil.
	Kin    func() bool
	Logger *slog.Logger // nil for none
}

// Ledger keeps the consumers of this replica. Its methods are safe for concurrent use.
type Ledger struct {
	config Config
	start  time.Time
	shards [shards]shard
	count  atomic.Int64 // of consumers
	over   atomic.Int64 // when the last certificate of those ends that did not fit, in Unix seconds
	issued atomic.Int64 // and of anybody
	life   atomic.Int64 // the longest life of a certificate
	dirty  atomic.Bool  // the sets may have changed
	closed atomic.Bool  // nothing is signed any more
	calls  sync.Map     // of *Calls, by what they go by
	// entering counts those who do not know yet to which of these they belong.
	entering atomic.Int64
	names    *rate.Sometimes

	mu sync.Mutex // guards all below; taken before a shard's and before the board's
	phase
	former  former
	known   bool                 // former was looked for
	told    []board.Note         // of others, as they were last looked at
	changed <-chan struct{}      // of the board, then
	made    time.Time            // when the sets were made last
	ahead   time.Time            // as in the own note
	hurries *rate.Limiter        // of writes that do not wait
	ask     func()               // see Ask
	asked   time.Time            // when it was called last
	cut     time.Time            // when the store last failed to take what was announced in time
	pointed map[uint64]time.Time // consumers that others have as behind, and since when we know it
}

// phase is what the sets are about.
type phase struct {
	acknowledged bool // the rest was set
	goal         document.Goal
	since        uint64 // the document's version in which the goal was set
}

// former is what the process before this one left.
type former struct {
	goal         document.Goal
	acknowledged uint64
	behind       []board.Behind
	lost, ahead  time.Time // as in Evidence
}

type shard struct {
	mu  sync.Mutex
	all map[uint64]*entry
}

// entry is one consumer. Times are in milliseconds, ends in seconds.
type entry struct {
	name  string
	agent bool
	twice bool        // two processes at least say that they are it
	said  []statement // of agents: of each stream, and the last one of those that are gone
	given []leaf      // agents: not covered by what they said; clients: all that may be in use, the last one last

	// Of clients.
	low      uint64 // the lowest generation that it may be at,
	last     uint64 // and that of the last answer,
	answered int64  // which was sent then;
	proof    int64  // a call after that shows that it has arrived,
	serial   uint64 // or one that comes with this certificate
	sure     int64  // when the last answer was sent that is known to have arrived; 0: none is
	before   uint64 // the consumer whose certificate this one's renews, where each has a name of its own
	keep     uint32 // known until then at least
}

// leaf is a certificate that was given.
type leaf struct {
	issuer uint64
	until  uint32
	at     int64
}

// Leaf is a certificate that was issued.
type Leaf struct {
	Issuer     string // hex, as the document names it
	Serial     string // hex
	Generation uint64 // of the bundle in the answer
	NotAfter   time.Time
}

// Client is who calls without our agent's table. Each identity that a node agent asks for is one of its own.
type Client struct {
	Cluster  string
	Pod      []byte // hash of its UID, as in certificates; empty if it is none, or not known
	Identity string // that was asked for
	Shown    string // serial of the certificate that the call came with, hex; empty for none
	// Exact: the identity was asked for by this very name. Who does may have another in another trust domain of the line, and a new
	// certificate of one does not replace what it has of the other.
	Exact bool

	Caller, Place, Remote string // for people
}

// name says who a client is.
func (c *Client) name() string {
	name := c.Identity
	if c.Caller != c.Identity {
		name += " for " + c.Caller
	}
	if c.Place != "" {
		name += " on " + c.Place
	}
	return name + " at " + c.Remote
}

// New returns a ledger without consumers.
func New(c Config) *Ledger {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	l := &Ledger{
		config: c, start: time.Now(), names: &rate.Sometimes{First: 10, Interval: time.Second}, hurries: rate.NewLimiter(rate.Every(20*time.Second), 3),
		pointed: map[uint64]time.Time{},
	}
	l.life.Store(int64(c.Life))
	for i := range l.shards {
		l.shards[i].all = map[uint64]*entry{}
	}
	if c.Board != nil {
		c.Board.Last(l.close)
	}
	return l
}

// hash names a consumer by what makes it one.
func hash(parts ...string) uint64 {
	b := make([]byte, 0, 256)
	for _, p := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:8])
}

// same returns an identity as all servers name it, whichever trust domain of the line it is in now.
func (l *Ledger) same(identity string) string {
	of := l.config.Line
	if path := revoked.Path(identity); !of.IsZero() && path != identity && strings.TrimPrefix(identity[:len(identity)-len(path)], "spiffe://") != of.String() {
		return of.URI() + path
	}
	return identity
}

// Agent names an agent with a table: by its ID, and by who it authenticates as, so that nobody can speak for another.
func Agent(identity string, id []byte) uint64 { return hash("agent", identity, string(id)) }

func (c *Client) consumer(identity string) uint64 {
	return hash("client", c.Cluster, string(c.Pod), identity)
}

// bearer names who holds a certificate and nothing else that is known.
func bearer(serial string) uint64 { return hash("serial", serial) }

// issuerOf shortens the ID of an issuer, which is a hash. 0 stands for any.
func issuerOf(id []byte) uint64 {
	var b [8]byte
	copy(b[:], id)
	return max(binary.BigEndian.Uint64(b[:]), 1)
}

// key is issuerOf for an ID in hex; what is none may be any.
func (l Leaf) key() uint64 {
	x, err := strconv.ParseUint((l.Issuer + "0000000000000000")[:16], 16, 64)
	if err != nil {
		return 0
	}
	return max(x, 1)
}

func (l *Ledger) shard(consumer uint64) *shard { return &l.shards[consumer%shards] }

// add makes a consumer that is new; nil if there is no room. Caller holds the shard.
func (l *Ledger) add(s *shard, consumer uint64, name string) *entry {
	if l.count.Load() >= maxConsumers {
		return nil
	}
	l.count.Add(1)
	e := &entry{name: shorten(name, board.MaxName)}
	s.all[consumer] = e
	return e
}

// ends notes when a certificate ends that was signed.
func (l *Ledger) ends(at *atomic.Int64, notAfter time.Time) {
	for end := notAfter.Unix(); ; {
		if have := at.Load(); have >= end || at.CompareAndSwap(have, end) {
			return
		}
	}
}

// ToAgent notes what an agent with a table was given.
func (l *Ledger) ToAgent(identity string, id []byte, x Leaf) {
	l.ends(&l.issued, x.NotAfter)
	consumer := Agent(l.same(identity), id)
	s := l.shard(consumer)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.all[consumer]
	if e == nil {
		e = l.add(s, consumer, "agent "+identity)
	}
	if e == nil {
		l.ends(&l.over, x.NotAfter)
		return
	}
	e.agent = true
	e.give(leaf{x.key(), uint32(x.NotAfter.Unix()), time.Now().UnixMilli()})
	l.dirty.Store(true)
}

// give adds a certificate. Of one issuer's the last end counts; what is too much is put together.
func (e *entry) give(x leaf) {
	if i := slices.IndexFunc(e.given, func(o leaf) bool { return o.issuer == x.issuer }); i >= 0 {
		x.until = max(x.until, e.given[i].until)
		e.given = slices.Delete(e.given, i, i+1)
	}
	if len(e.given) >= maxGiven {
		e.given[1].until, e.given[1].issuer = max(e.given[0].until, e.given[1].until), 0
		e.given = slices.Delete(e.given, 0, 1)
	}
	e.given = append(e.given, x)
}

// ToClient notes what a client without a table was answered, and that it called.
func (l *Ledger) ToClient(c Client, x Leaf) {
	l.ends(&l.issued, x.NotAfter)
	now := time.Now().UnixMilli()
	identity := c.Identity
	if !c.Exact {
		identity = l.same(identity)
	}
	consumer, before := c.consumer(identity), uint64(0)
	if len(c.Pod) == 0 {
		consumer = bearer(x.Serial)
		if c.Shown != "" {
			before = bearer(c.Shown)
			l.arrived(before, now)
		}
	}
	s := l.shard(consumer)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.all[consumer]
	if e == nil {
		e = l.add(s, consumer, c.name())
	}
	if e == nil {
		l.ends(&l.over, x.NotAfter)
		return
	}
	e.answer(c.Shown, x, now)
	e.before = before
	l.dirty.Store(true)
}

// answer notes a call and its answer.
func (e *entry) answer(shown string, x Leaf, now int64) {
	if e.answered > 0 && (now >= e.proof || shown != "" && serialOf(shown) == e.serial) {
		e.low, e.sure = e.last, e.answered
		e.given = e.given[max(0, len(e.given)-1):]
	}
	if e.answered == 0 || x.Generation < e.low { // a first answer that does not arrive leaves it without a certificate
		e.low = x.Generation
	}
	e.last, e.answered, e.serial = x.Generation, now, serialOf(x.Serial)
	e.proof = now + max(x.NotAfter.UnixMilli()-now, 0)/4 // who comes again sooner may do so since it got nothing (decision D20)
	e.give(leaf{x.key(), uint32(x.NotAfter.Unix()), now})
}

// serialOf shortens a serial, which ends with random bits.
func serialOf(hex string) uint64 {
	x, err := strconv.ParseUint(hex[max(0, len(hex)-16):], 16, 64)
	if err != nil {
		return 0
	}
	return x
}

// arrived notes that the certificate of a bearer has arrived: it came with it. What it renewed is not in use any more.
func (l *Ledger) arrived(consumer uint64, now int64) {
	s := l.shard(consumer)
	s.mu.Lock()
	e := s.all[consumer]
	if e == nil { // of another replica
		s.mu.Unlock()
		return
	}
	e.low, e.sure = e.last, e.answered
	before, last, sent, keep := e.before, e.last, e.answered, e.until(now)
	s.mu.Unlock()
	if before == 0 {
		return
	}
	s = l.shard(before)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e = s.all[before]; e == nil { // one of another replica, which may have it as behind
		e = l.add(s, before, "")
	}
	if e != nil {
		e.low, e.last, e.sure, e.given, e.keep = last, last, sent, nil, max(e.keep, keep)
	}
}

// until returns when the last certificate ends that the consumer may hold.
func (e *entry) until(now int64) uint32 {
	end := e.keep
	for _, x := range e.given {
		end = max(end, x.until)
	}
	for i := range e.said {
		end = max(end, e.said[i].until(now))
	}
	return end
}

// shorten bounds words that came from the network.
func shorten(s string, most int) string {
	if len(s) <= most {
		return valid(s)
	}
	return valid(s[:most-3]) + "..."
}
