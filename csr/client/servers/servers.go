// Package servers owns where the servers are that a call may go to, and in which order it tries them.
//
// It refuses to remember what it was told by a name for longer than a call, and to give up on a server for good.
package servers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// lookupTime bounds the lookup of all names; once there is one address, others are waited for no longer than lookupMore.
	lookupTime = 3 * time.Second
	lookupMore = 500 * time.Millisecond
	// avoidTime is how long a server comes last that failed, was busy or sent the caller away.
	avoidTime = 15 * time.Second

	maxAddresses = 64 // that are considered
	maxTries     = 8  // of one call
)

// Address is where a server may be.
type Address struct {
	Name string // host:port as configured, which the TLS handshake names
	Addr string // IP:port, or name if a proxy looks it up
}

// String names the server, and where it is if that is not in the name.
func (a Address) String() string {
	if a.Name == a.Addr {
		return a.Addr
	}
	return a.Name + " at " + a.Addr
}

// ViaProxy reports whether the environment wants a proxy for a server, which is then gRPC's affair, and the lookup the proxy's.
func ViaProxy(name string) bool {
	proxy, err := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: "https", Host: name}})
	return err != nil || proxy != nil
}

// Servers finds the servers for each call anew.
type Servers struct {
	Names    []string
	Resolver *net.Resolver // nil = net.DefaultResolver

	mu    sync.Mutex // guards avoid
	avoid map[string]time.Time
}

// lookup returns the addresses of one name.
func lookup(ctx context.Context, r *net.Resolver, name string) ([]Address, error) {
	host, port, err := net.SplitHostPort(name)
	if err != nil {
		return nil, err
	}
	if net.ParseIP(host) != nil || ViaProxy(name) {
		return []Address{{name, name}}, nil
	}
	hosts, err := r.LookupHost(ctx, host)
	if err != nil {
		return nil, err
	}
	// Before it is cut: where there are more, none should be left out for ever.
	mrand.Shuffle(len(hosts), func(i, j int) { hosts[i], hosts[j] = hosts[j], hosts[i] })
	var out []Address
	for _, h := range hosts[:min(len(hosts), maxAddresses)] {
		out = append(out, Address{name, net.JoinHostPort(h, port)})
	}
	return out, nil
}

// Find returns the addresses of all names, in the order in which a call should try them: at random, so that a fleet spreads
// itself over the servers that there are now, and last those that are avoided. The failures are those of lookups.
func (s *Servers) Find(ctx context.Context) ([]Address, Failures) {
	type found struct {
		name string
		all  []Address
		err  error
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	results := make(chan found, len(s.Names))
	resolver := cmp.Or(s.Resolver, net.DefaultResolver)
	for _, name := range s.Names {
		go func() {
			all, err := lookup(ctx, resolver, name)
			results <- found{name, all, err}
		}()
	}
	var out []Address
	var failed Failures
	more := time.NewTimer(lookupTime)
	defer more.Stop()
	pending := slices.Clone(s.Names)
	for range s.Names {
		select {
		case r := <-results:
			pending = slices.DeleteFunc(pending, func(name string) bool { return name == r.name })
			if r.err != nil {
				failed = append(failed, Failure{r.name, r.err})
				continue
			}
			if out = append(out, r.all...); len(out) == len(r.all) {
				more.Reset(lookupMore)
			}
		case <-more.C:
			for _, name := range pending {
				failed = append(failed, Failure{name, errors.New("the name is not looked up in time")})
			}
			return s.order(out), failed
		}
	}
	return s.order(out), failed
}

// order shuffles, puts those that are avoided last, and leaves out what is too many or there twice.
func (s *Servers) order(all []Address) []Address {
	mrand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var good, bad []Address
	seen := map[string]bool{}
	for _, a := range all {
		switch {
		case seen[a.Addr]:
		case now.Before(s.avoid[a.Addr]):
			bad = append(bad, a)
		default:
			good = append(good, a)
		}
		seen[a.Addr] = true
	}
	slices.SortStableFunc(bad, func(a, b Address) int { return s.avoid[a.Addr].Compare(s.avoid[b.Addr]) }) // the longest ago first
	out := append(good, bad...)
	return out[:min(len(out), maxTries)]
}

// Note remembers for a while whether a server should come last.
func (s *Servers) Note(a Address, bad bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bad {
		delete(s.avoid, a.Addr)
		return
	}
	now := time.Now()
	for addr, until := range s.avoid {
		if now.After(until) {
			delete(s.avoid, addr)
		}
	}
	if s.avoid == nil {
		s.avoid = map[string]time.Time{}
	}
	if len(s.avoid) < maxAddresses {
		s.avoid[a.Addr] = now.Add(avoidTime)
	}
}

// Avoids reports whether a server comes last for a while.
func (s *Servers) Avoids(a Address) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Before(s.avoid[a.Addr])
}

// Failure is what one server said, or did not.
type Failure struct {
	Who string
	Err error
}

// Failures are those of one call.
type Failures []Failure

// Error names each server and what was wrong with it.
func (f Failures) Error() string {
	var all []string
	for _, x := range f {
		all = append(all, x.Who+": "+x.Err.Error())
	}
	if len(all) == 1 {
		return "server " + all[0]
	}
	return "no server could be asked: " + strings.Join(all, "; ")
}

// Unwrap returns the errors one by one.
func (f Failures) Unwrap() []error {
	var all []error
	for _, x := range f {
		all = append(all, x.Err)
	}
	return all
}

// Untrusted is the error of a server whose certificate no known root vouches for: this agent, or the server, has missed a change of
// roots.
type Untrusted struct {
	Err   error  // of the call
	Cause error  // of the verification
	File  string // what to call the place of the known roots
}

// Error says what to do.
func (u *Untrusted) Error() string {
	file := u.File
	if file == "" {
		file = "the agent's serverRoots"
	}
	return fmt.Sprintf("the server's certificate is under no root that is known here (%v): if the roots have changed meanwhile, run `chancery authority show -o pem -c SERVER.yaml` on a server "+
		"and put what it prints into %s", u.Cause, file)
}

// Unwrap returns the error of the call.
func (u *Untrusted) Unwrap() error { return u.Err }
