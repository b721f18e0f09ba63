// Package naming owns which services an agent asks its servers for, and the last good word on who may serve each, over restarts.
//
// It refuses to take silence for a word: what was said stands until something else is said, and of what was never said it says nothing. It
// refuses what a server says that cannot be read, for the service that it is about.
package naming

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/document/strict"
	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/trust"
)

const (
	format        = 1
	maxServices   = 2000 // as servers read them
	maxService    = 320
	maxIdentities = 1000
	maxFile       = 16 << 20
	// gather is how long what is asked for is gathered: a proxy that starts asks for hundreds of services at once.
	gather = 20 * time.Millisecond
	// linger is how long a service is asked for that nobody wants any more.
	linger = 10 * time.Minute
	// saveEvery is how often the file is written at most.
	saveEvery = time.Second
)

// Config says where a table lies.
type Config struct {
	File   string       // empty: in memory alone
	Logger *slog.Logger // nil: nothing is logged
}

// Table is safe for concurrent use.
type Table struct {
	config Config

	mu      sync.Mutex // guards all below
	all     map[string]*entry
	leaving int           // of these, those that are forgotten with the next look of Asked
	asked   []string      // their names in order; nil: to be made
	asks    chan struct{} // closed when asked is another one
	waiting bool          // that is about to be told
	known   map[string][]trust.ID
	changed chan struct{} // closed when known is another one
	dirty   bool          // the file has not all of it
	refused map[string]string
	failing bool // the last write failed
}

// entry is a service.
type entry struct {
	holds int       // who wants it now
	idle  time.Time // since when that is nobody
	asked bool      // servers are asked for it,
	gone  bool      // until they are asked without it
}

// file is what is kept.
type file struct {
	Format   int       `json:"format"`
	Services []service `json:"services"`
}

type service struct {
	Name       string   `json:"name"`
	Identities []string `json:"identities"` // none: nobody may serve it
}

// Open reads what was kept. What cannot be read is as good as nothing: proxies wait for a server's word.
func Open(c Config) *Table {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	t := &Table{
		config: c, all: map[string]*entry{}, asks: make(chan struct{}), changed: make(chan struct{}), known: map[string][]trust.ID{}, refused: map[string]string{},
	}
	if c.File == "" {
		return t
	}
	if err := t.load(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.Logger.Error("what was kept of who may serve services is of no use; who asks for them waits for a server's word", "file", c.File, "reason", err.Error())
	}
	return t
}

func (t *Table) load() error {
	data, err := strict.Read(t.config.File, maxFile)
	if err != nil {
		return err
	}
	return t.parse(data)
}

// parse takes a file over, strictly.
func (t *Table) parse(data []byte) error {
	var c file
	if err := strict.Kept(data, maxFile, format, &c, &c.Format); err != nil {
		return err
	}
	if n := len(c.Services); n > maxServices {
		return fmt.Errorf("it has %d services; at most %d are kept", n, maxServices)
	}
	known := map[string][]trust.ID{}
	for _, s := range c.Services {
		ids, err := read(s.Name, s.Identities)
		if err != nil {
			return err
		}
		if _, twice := known[s.Name]; twice {
			return fmt.Errorf("service %s occurs twice", s.Name)
		}
		known[s.Name] = ids
	}
	for name := range known {
		t.all[name] = &entry{idle: time.Now()}
	}
	t.known = known
	return nil
}

// read checks what is said of a service.
func read(name string, identities []string) ([]trust.ID, error) {
	if !Valid(name) {
		return nil, fmt.Errorf("service %.80q: a name is NAMESPACE/NAME", name)
	}
	if n := len(identities); n > maxIdentities {
		return nil, fmt.Errorf("service %s has %d identities; at most %d are read", name, n, maxIdentities)
	}
	ids := make([]trust.ID, 0, len(identities)) // not nil: that nobody may serve it is known
	for _, text := range identities {
		id, err := trust.ParseID(text)
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", name, err)
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// Valid reports whether a text can be the name of a service, NAMESPACE/NAME.
func Valid(name string) bool {
	ns, rest, ok := strings.Cut(name, "/")
	return ok && len(name) <= maxService && ns != "" && rest != "" &&
		strings.IndexFunc(ns+rest, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '/' }) < 0
}

// Hold has a service asked for, until Drop is called as often.
func (t *Table) Hold(name string) error {
	if !Valid(name) {
		return fmt.Errorf("service %.80q: a name is NAMESPACE/NAME", name)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.all[name]
	if (e == nil || e.gone) && len(t.all)-t.leaving >= maxServices && !t.makeRoom() {
		return fmt.Errorf("service %s: %d services are asked for already, which is all that there is room for", name, maxServices)
	}
	switch {
	case e == nil:
		e = new(entry)
		t.all[strings.Clone(name)] = e
		t.ask()
	case e.gone:
		e.gone = false
		t.leaving--
	}
	e.holds++
	return nil
}

// Drop takes a Hold back that gave no error.
func (t *Table) Drop(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.all[name]; e != nil {
		if e.holds--; e.holds == 0 {
			e.idle = time.Now()
		}
	}
}

// makeRoom forgets the service that nobody has wanted for longest. mu is held.
func (t *Table) makeRoom() bool {
	oldest := ""
	for name, e := range t.all {
		if e.holds == 0 && !e.gone && (oldest == "" || e.idle.Before(t.all[oldest].idle)) {
			oldest = name
		}
	}
	if oldest == "" {
		return false
	}
	t.forget(oldest)
	return true
}

// forget forgets services: one that servers are asked for once they are asked without it. Whoever wants it again before that would not be told
// what they have said already. mu is held.
func (t *Table) forget(names ...string) {
	known := maps.Clone(t.known)
	for _, name := range names {
		if e := t.all[name]; e.asked {
			e.gone = true
			t.leaving++
			continue
		}
		delete(t.all, name)
		delete(known, name)
		delete(t.refused, name)
	}
	t.ask()
	t.set(known)
}

// set makes others known. mu is held.
func (t *Table) set(known map[string][]trust.ID) {
	if maps.EqualFunc(known, t.known, slices.Equal) {
		return
	}
	t.known, t.dirty = known, true
	close(t.changed)
	t.changed = make(chan struct{})
}

// ask has servers told, a little later, that something else is asked for. mu is held.
func (t *Table) ask() {
	if t.asked = nil; t.waiting {
		return
	}
	t.waiting = true
	time.AfterFunc(gather, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.waiting = false
		close(t.asks)
		t.asks = make(chan struct{})
	})
}

// Asked returns the services that are asked for, in order, and a channel that is closed when they have changed. Callers must not change
// them.
func (t *Table) Asked() ([]string, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.asked == nil {
		t.look()
	}
	return t.asked, t.asks
}

// look makes the list of what is asked for. mu is held.
func (t *Table) look() {
	var gone []string
	t.asked = make([]string, 0, len(t.all))
	for name, e := range t.all {
		if e.gone {
			gone = append(gone, name)
			continue
		}
		e.asked = true
		t.asked = append(t.asked, name)
	}
	slices.Sort(t.asked)
	if len(gone) == 0 {
		return
	}
	t.leaving = 0
	known := maps.Clone(t.known)
	for _, name := range gone {
		delete(t.all, name)
		delete(known, name)
		delete(t.refused, name)
	}
	t.set(known)
}

// Known returns who may serve each service of which anything was said: nobody where the list is empty; and a channel that is closed when
// that has changed. Callers must not change it.
func (t *Table) Known() (map[string][]trust.ID, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.known, t.changed
}

// Take takes over what a server says of some services. What is unknown nobody may serve.
func (t *Table) Take(all []*chanceryv1.ServiceIdentities) {
	if len(all) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	known := maps.Clone(t.known)
	for _, s := range all[:min(len(all), maxServices)] {
		name := s.GetService()
		if t.all[name] == nil { // that was a while ago
			continue
		}
		ids, err := read(name, s.GetSpiffeIds())
		if err == nil && s.GetUnknown() && len(ids) > 0 {
			err = errors.New("it is said to be unknown, and to have identities")
		}
		if err != nil {
			if t.refused[name] != err.Error() {
				t.refused[name] = err.Error()
				t.config.Logger.Error("what a server says of a service is refused; what was said before stands", "service", name, "reason", err.Error())
			}
			continue
		}
		delete(t.refused, name)
		known[name] = ids
	}
	t.set(known)
}

// Run keeps the file, and forgets what nobody wants any more, until ctx ends.
func (t *Table) Run(ctx context.Context) error {
	ticker := time.NewTicker(saveEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			t.save()
			return nil
		case now := <-ticker.C:
			t.sweep(now)
			t.save()
		}
	}
}

func (t *Table) sweep(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var idle []string
	for name, e := range t.all {
		if e.holds == 0 && !e.gone && now.Sub(e.idle) >= linger {
			idle = append(idle, name)
		}
	}
	if len(idle) > 0 {
		t.forget(idle...)
	}
}

// save writes the file if it lacks something.
func (t *Table) save() {
	t.mu.Lock()
	known, dirty := t.known, t.dirty && t.config.File != ""
	if dirty && t.leaving > 0 {
		known = maps.Clone(known)
		maps.DeleteFunc(known, func(name string, _ []trust.ID) bool { return t.all[name].gone })
	}
	t.dirty = false
	t.mu.Unlock()
	if !dirty {
		return
	}
	err := t.write(known)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil && !t.failing {
		t.config.Logger.Error("what is known of who may serve services cannot be kept: after a restart what was before would count", "file", t.config.File, "reason", err.Error())
	}
	t.failing, t.dirty = err != nil, t.dirty || err != nil
}

func (t *Table) write(known map[string][]trust.ID) error {
	c := file{Format: format, Services: []service{}}
	size := 0
	for _, name := range slices.Sorted(maps.Keys(known)) {
		s := service{Name: name, Identities: []string{}}
		for _, id := range known[name] {
			s.Identities = append(s.Identities, id.String())
			size += len(id.String()) + 4
		}
		if size += len(name) + 64; size > maxFile { // it would not be read
			break
		}
		c.Services = append(c.Services, s)
	}
	data, err := json.Marshal(&c)
	if err != nil {
		return err
	}
	return durable.Replace(t.config.File, append(data, '\n'), 0o600)
}
