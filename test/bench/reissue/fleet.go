package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/agent"
	"github.com/chancery-project/chancery/csr/client"
	"github.com/chancery-project/chancery/csr/client/anchor"
	"github.com/chancery-project/chancery/csr/client/source"
	"github.com/chancery-project/chancery/sds/consumers"
	"github.com/chancery-project/chancery/test/bench/parts"
	"github.com/chancery-project/chancery/trust"
)

const (
	fleetArgument = "fleet" // the program's first argument in its role as some of the agents
	// starting bounds the agents of a process that have no SVID yet: more would be in each other's way.
	starting    = 16
	statusEvery = 50 * time.Millisecond
)

// fleet is all agents, as processes.
type fleet struct {
	dirs      []string
	processes []*parts.Process
	once      sync.Once
}

// share is what one process plays.
type share struct {
	Server, Roots string
	Agents        []parts.Workload
}

// counts says how far agents have come.
type counts struct {
	Held     int    // have had a first SVID
	Replaced int    // have had a second one,
	Twice    int    // and a third one
	Failed   int    // tries for one that failed
	Last     int64  // when an SVID was replaced last, in nanoseconds
	Why      string // the last of these failed
}

func startFleet(ctx context.Context, c config, dir, server string, tokens *parts.Tokens) (*fleet, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding own executable: %w", err)
	}
	f := new(fleet)
	for p := range c.processes {
		one := share{Server: server, Roots: filepath.Join(dir, "roots.pem")}
		for i := p; i < c.agents; i += c.processes {
			w, err := tokens.Workload(i, c.nodes)
			if err != nil {
				f.stop()
				return nil, err
			}
			one.Agents = append(one.Agents, w)
		}
		own := filepath.Join(dir, fmt.Sprintf("agents-%d", p))
		text, err := json.Marshal(one)
		if err == nil {
			err = os.Mkdir(own, 0o700)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(own, "share.json"), text, 0o600)
		}
		var child *parts.Process
		if err == nil {
			child, err = parts.Start(ctx, own, self, fleetArgument, own)
		}
		if err != nil {
			f.stop()
			return nil, fmt.Errorf("starting agents: %w", err)
		}
		f.dirs, f.processes = append(f.dirs, own), append(f.processes, child)
	}
	return f, nil
}

func (f *fleet) stop() {
	f.once.Do(func() {
		var all sync.WaitGroup
		for _, p := range f.processes {
			all.Go(p.Stop)
		}
		all.Wait()
	})
}

// read sums up what the processes say.
func (f *fleet) read() (sum counts, err error) {
	for i, dir := range f.dirs {
		if err := f.processes[i].Ended(); err != nil {
			return sum, err
		}
		text, err := os.ReadFile(filepath.Join(dir, "counts.json"))
		if os.IsNotExist(err) {
			continue
		}
		var one counts
		if err == nil {
			err = json.Unmarshal(text, &one)
		}
		if err != nil {
			return sum, fmt.Errorf("reading what agents have: %w", err)
		}
		sum.Held, sum.Replaced, sum.Twice = sum.Held+one.Held, sum.Replaced+one.Replaced, sum.Twice+one.Twice
		sum.Failed, sum.Last = sum.Failed+one.Failed, max(sum.Last, one.Last)
		if one.Why != "" {
			sum.Why = one.Why
		}
	}
	return sum, nil
}

// await waits until the agents have come so far.
func (f *fleet) await(ctx context.Context, limit time.Duration, enough func(counts) bool) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		got, err := f.read()
		if err != nil || enough(got) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the agents have come as far as %+v: %w", got, ctx.Err())
		case <-time.After(statusEvery):
		}
	}
}

// player plays some agents.
type player struct {
	dir    string
	share  share
	domain trust.Domain
	roots  []*x509.Certificate
	places chan struct{}

	mu sync.Mutex // guards n
	n  counts
}

// play plays what is in a folder until the parent is gone: its end of our standard input closes.
func play(ctx context.Context, dir string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	p := &player{dir: dir, places: make(chan struct{}, starting)}
	text, err := os.ReadFile(filepath.Join(dir, "share.json"))
	if err == nil {
		err = json.Unmarshal(text, &p.share)
	}
	if err == nil {
		p.domain, err = trust.ParseDomain(parts.TrustDomain)
	}
	if err == nil {
		p.roots, err = source.RootsFile(p.share.Roots)()
	}
	if err != nil {
		return fmt.Errorf("reading what to play: %w", err)
	}
	failed := make(chan error, 1)
	go p.tell(ctx)
	for i := range p.share.Agents {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case p.places <- struct{}{}:
		}
		go func() {
			if err := p.agent(ctx, i); err != nil {
				select {
				case failed <- err:
				default:
				}
			}
		}()
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

// agent plays one agent: what `chancery agent` is made of, but for the socket.
func (p *player) agent(ctx context.Context, i int) error {
	w := p.share.Agents[i]
	id, err := trust.ParseID(w.ID)
	if err != nil {
		return err
	}
	logger := slog.New(slog.DiscardHandler)
	table, err := consumers.Open(consumers.Config{File: filepath.Join(p.dir, fmt.Sprintf("%d.consumers", i)), Logger: logger})
	if err != nil {
		return err
	}
	defer table.Close()
	kept, err := anchor.Open(anchor.Config{Domain: p.domain, Logger: logger})
	if err != nil {
		return err
	}
	k := agent.NewKeeper(agent.KeeperConfig{
		Client: client.Config{
			Servers: []string{p.share.Server}, Domain: p.domain, ID: id, Cluster: parts.ClusterName, Anchor: kept,
			Roots: func() ([]*x509.Certificate, error) { return p.roots, nil },
			Token: func(context.Context) (string, error) { return w.Token, nil },
		},
		Logger: logger, Table: table,
		Observe: func(err error) {
			if err != nil {
				p.count(func(n *counts) { n.Failed, n.Why = n.Failed+1, err.Error() })
			}
		},
	})
	go p.watch(ctx, k)
	return k.Run(ctx)
}

// watch counts the SVIDs of an agent.
func (p *player) watch(ctx context.Context, k *agent.Keeper) {
	last, svids := "", 0
	for { // what changes may be roots or CRLs alone
		id, changed := k.Current()
		if id != nil && id.Serial() != last {
			last = id.Serial()
			svids++
			now := time.Now().UnixNano()
			p.count(func(n *counts) {
				switch svids {
				case 1:
					n.Held++
					<-p.places
				case 2:
					n.Replaced, n.Last = n.Replaced+1, now
				case 3:
					n.Twice++
				}
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

func (p *player) count(change func(*counts)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.n)
}

// tell keeps the file of counts up to date.
func (p *player) tell(ctx context.Context) {
	path, last := filepath.Join(p.dir, "counts.json"), counts{}
	for ctx.Err() == nil {
		p.mu.Lock()
		n := p.n
		p.mu.Unlock()
		if n != last {
			text, _ := json.Marshal(n) // it has numbers alone
			if os.WriteFile(path+".new", text, 0o600) == nil && os.Rename(path+".new", path) == nil {
				last = n
			}
		}
		time.Sleep(statusEvery)
	}
}
