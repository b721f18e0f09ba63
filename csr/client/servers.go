package client

import (
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

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/chancery-project/chancery/trust"
)

// How one call goes from server to server. The last one that is left has all the time that there is.
const (
	// connectTime bounds the way to a server: one that is paused still accepts connections, and then says nothing.
	connectTime = 3 * time.Second
	// answerTime bounds the wait for an answer. It is longer than requests wait for a slot, unless the server's config says
	// otherwise.
	answerTime = 8 * time.Second
	// lookupTime bounds the lookup of all names; once there is one address, others are waited for no longer than lookupMore.
	lookupTime = 3 * time.Second
	lookupMore = 500 * time.Millisecond
	// avoidTime is how long a server comes last that failed, was busy or sent the caller away.
	avoidTime = 15 * time.Second

	maxAddresses = 64 // that are considered
	maxTries     = 8  // of one call
)

var (
	// errUnconnected: there was no connection in time.
	errUnconnected = errors.New("there was no connection")
	// errSilent: the server took the call, and said nothing.
	errSilent = errors.New("the server has said nothing")
)

// over is how a stream ended that had brought something: no other server is tried in the same breath.
type over struct{ error }

// Unwrap returns what ended it.
func (o *over) Unwrap() error { return o.error }

// address is where a server may be.
type address struct {
	name string // host:port as configured, which the TLS handshake names
	addr string // IP:port, or name if a proxy looks it up
}

func (a address) String() string {
	if a.name == a.addr {
		return a.addr
	}
	return a.name + " at " + a.addr
}

// viaProxy reports whether the environment wants a proxy for a server, which is then gRPC's affair, and the lookup the proxy's.
func viaProxy(name string) bool {
	proxy, err := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: "https", Host: name}})
	return err != nil || proxy != nil
}

// servers finds the servers for each call anew.
type servers struct {
	names []string

	mu    sync.Mutex // guards avoid
	avoid map[string]time.Time
}

// lookup returns the addresses of one name.
func lookup(ctx context.Context, name string) ([]address, error) {
	host, port, err := net.SplitHostPort(name)
	if err != nil {
		return nil, err
	}
	if net.ParseIP(host) != nil || viaProxy(name) {
		return []address{{name, name}}, nil
	}
	hosts, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return nil, err
	}
	// Before it is cut: where there are more, none should be left out for ever.
	mrand.Shuffle(len(hosts), func(i, j int) { hosts[i], hosts[j] = hosts[j], hosts[i] })
	var out []address
	for _, h := range hosts[:min(len(hosts), maxAddresses)] {
		out = append(out, address{name, net.JoinHostPort(h, port)})
	}
	return out, nil
}

// find returns the addresses of all names, in the order in which a call should try them: at random, so that a fleet spreads
// itself over the servers that there are now, and last those that are avoided. The failures are those of lookups.
func (s *servers) find(ctx context.Context) ([]address, failures) {
	type found struct {
		name string
		all  []address
		err  error
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	results := make(chan found, len(s.names))
	for _, name := range s.names {
		go func() {
			all, err := lookup(ctx, name)
			results <- found{name, all, err}
		}()
	}
	var out []address
	var failed failures
	more := time.NewTimer(lookupTime)
	defer more.Stop()
	pending := slices.Clone(s.names)
	for range s.names {
		select {
		case r := <-results:
			pending = slices.DeleteFunc(pending, func(name string) bool { return name == r.name })
			if r.err != nil {
				failed = append(failed, failure{r.name, r.err})
				continue
			}
			if out = append(out, r.all...); len(out) == len(r.all) {
				more.Reset(lookupMore)
			}
		case <-more.C:
			for _, name := range pending {
				failed = append(failed, failure{name, errors.New("the name is not looked up in time")})
			}
			return s.order(out), failed
		}
	}
	return s.order(out), failed
}

// order shuffles, puts those that are avoided last, and leaves out what is too many or there twice.
func (s *servers) order(all []address) []address {
	mrand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var good, bad []address
	seen := map[string]bool{}
	for _, a := range all {
		switch {
		case seen[a.addr]:
		case now.Before(s.avoid[a.addr]):
			bad = append(bad, a)
		default:
			good = append(good, a)
		}
		seen[a.addr] = true
	}
	slices.SortStableFunc(bad, func(a, b address) int { return s.avoid[a.addr].Compare(s.avoid[b.addr]) }) // the longest ago first
	out := append(good, bad...)
	return out[:min(len(out), maxTries)]
}

// note remembers for a while whether a server should come last.
func (s *servers) note(a address, bad bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bad {
		delete(s.avoid, a.addr)
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
		s.avoid[a.addr] = now.Add(avoidTime)
	}
}

// failure is what one server said, or did not.
type failure struct {
	who string
	err error
}

// failures are those of one call.
type failures []failure

// Error names each server and what was wrong with it.
func (f failures) Error() string {
	var all []string
	for _, x := range f {
		all = append(all, x.who+": "+x.err.Error())
	}
	if len(all) == 1 {
		return "server " + all[0]
	}
	return "no server could be asked: " + strings.Join(all, "; ")
}

// Unwrap returns the errors one by one.
func (f failures) Unwrap() []error {
	var all []error
	for _, x := range f {
		all = append(all, x.err)
	}
	return all
}

// ask has one server do something, or the next one if the first cannot: it cannot be reached, does not answer in time, is not
// ready or stops. What it refuses for any other reason is an answer; the others would say the same. A call that got no answer
// may have been worked on: then there are two certificates for one key, both of them logged, and the first is used by nobody.
func (c *Client) ask(ctx context.Context, do func(context.Context, *grpc.ClientConn, turn) error) error {
	ctx, who, err := c.withCredentials(ctx)
	if err != nil {
		return err
	}
	return c.askAll(ctx, who.own, do)
}

// withCredentials returns what a call goes by that begins now, and its context with what is sent along.
func (c *Client) withCredentials(ctx context.Context) (context.Context, showing, error) {
	who := showing{own: c.valid()}
	var err error
	if who.token, err = c.token(ctx, who.own != nil); err != nil {
		return nil, showing{}, err
	}
	if who.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+who.token)
	}
	if c.config.Cluster != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "clusterid", c.config.Cluster)
	}
	return ctx, who, nil
}

// askAll is ask with the credentials of a moment.
func (c *Client) askAll(ctx context.Context, own *trust.Identity, do func(context.Context, *grpc.ClientConn, turn) error) error {
	all, failed := c.servers.find(ctx)
	if len(all) == 0 {
		return failed
	}
	for i, a := range all {
		err := c.try(ctx, a, own, turn{to: a, last: i == len(all)-1, left: len(all) - i, all: len(all)}, do)
		c.servers.note(a, avoids(err))
		if err == nil || !elsewhere(err) {
			return err
		}
		failed = append(failed, failure{a.String(), err})
		if ctx.Err() != nil {
			break
		}
	}
	return failed
}

// turn is the place of a server in a call.
type turn struct {
	to   address
	last bool
	left int // servers that were not tried, this one included
	all  int // servers
}

// share returns how much time a step may take: no more than most, nor than this server's part of what is left.
func (t turn) share(ctx context.Context, most time.Duration, parts int) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(end)/time.Duration(parts))
	}
	return most
}

// answer bounds the wait for an answer, but for the last server's.
func (t turn) answer(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.last {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, t.share(ctx, answerTime, 2))
}

func (c *Client) try(ctx context.Context, a address, own *trust.Identity, t turn, do func(context.Context, *grpc.ClientConn, turn) error) error {
	conn := c.takeKept(a, own)
	if conn == nil {
		var err error
		if conn, err = c.dial(a, own); err != nil {
			return err
		}
		if err := connect(ctx, conn, t); err != nil {
			conn.Close()
			return err
		}
	}
	err := do(ctx, conn, t)
	if r, ok := errors.AsType[*Refused](err); ok && r.Code == codes.ResourceExhausted && t.last && t.left == t.all {
		c.keep(kept{a, own, conn})
		return err
	}
	conn.Close()
	return err
}

// connect waits for the connection. If there will be none, the call itself says why.
func connect(ctx context.Context, conn *grpc.ClientConn, t turn) error {
	if t.last {
		return nil
	}
	limit := t.share(ctx, connectTime, t.left)
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn.Connect()
	for {
		switch state := conn.GetState(); state {
		case connectivity.Ready, connectivity.TransientFailure:
			return nil
		default:
			if !conn.WaitForStateChange(within, state) {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return fmt.Errorf("%w within %s", errUnconnected, limit.Round(time.Millisecond))
			}
		}
	}
}

// elsewhere reports whether another server should be tried at once.
func elsewhere(err error) bool {
	if _, ok := errors.AsType[*over](err); ok {
		return false
	}
	return unable(err)
}

// unable reports whether another server may do what this one did not.
func unable(err error) bool {
	if r, ok := errors.AsType[*Refused](err); ok {
		return r.Code == codes.Unavailable && r.Reason != reasonMove
	}
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.DeadlineExceeded || errors.Is(err, errUnconnected) || errors.Is(err, errSilent)
}

// avoids reports whether the server should come last for a while.
func avoids(err error) bool {
	if r, ok := errors.AsType[*Refused](err); ok && (r.Code == codes.ResourceExhausted || r.Reason == reasonMove) {
		return true
	}
	return err != nil && (unable(err) || toldToGo(err))
}

// reasonMove is how a server ends a stream that should be opened anew elsewhere, for no fault of anybody.
const reasonMove = "MOVE"

// toldToGo reports whether a connection ended after a GOAWAY without an error: a server, or a proxy before it, is about to
// stop or lets no connection grow too old. gRPC says it in these words only.
func toldToGo(err error) bool {
	return strings.Contains(err.Error(), "received prior goaway: code: NO_ERROR")
}
