package client

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/client/standing"
	"github.com/chancery-project/chancery/trust"
)

// How Sync spaces its tries, and what it bounds.
const (
	firstBackoff = 500 * time.Millisecond
	maxBackoff   = time.Minute
	// steady is how long a stream must have lived for the next try to come soon.
	steady = 10 * time.Second
	// withoutSync is how long Sync leaves a server alone that does not know it.
	withoutSync = 10 * time.Minute
	// moveSpread bounds the pause before the next stream where the connection ended with a GOAWAY.
	moveSpread = 5 * time.Second
	// firstUpdate bounds the wait for the first update of a stream, which comes at once.
	firstUpdate = 30 * time.Second

	// catchUp is how long a server may take until it has the CRLs that another had already.
	catchUp = 30 * time.Second

	// behindTime is how long at the least a stream stays with a server that has older roots or CRLs than another. One that is cut
	// off from its store would keep its agents from a rotation, and from revocations, until the stream grows old.
	behindTime = 2 * time.Minute

	// leaveSpread bounds the pause before a stream ends whose server is vouched for no longer: a whole fleet sees it at once.
	leaveSpread = time.Minute

	// reportEvery is how often it is looked whether what is reported has changed.
	reportEvery = 10 * time.Second

	// consumersEvery is how often it is said at the most what has changed of consumers alone.
	consumersEvery = time.Second
	// maxWithin bounds what a server may give as time to replace SVIDs.
	maxWithin = time.Hour

	maxServed  = 1000
	maxNaming  = 4 << 20
	maxUpdate  = trust.MaxCRLBytes + trust.MaxSignedBundle + trust.MaxSignedFederation + maxNaming + 1<<20
	readsKin   = 1    // the bit of SyncRequest.reads
	maxNames   = 20   // of unknown trust domains, and of former ones
	maxMark    = 64   // bytes of a document mark's MAC
	maxRefusal = 1024 // bytes of a reason that the server is told
)

// SyncConfig says what Sync reports and whom it tells.
type SyncConfig struct {
	// Served returns the SVIDs that are served now and a channel that is closed when that changes. It does not block.
	Served func() ([]*trust.Identity, <-chan struct{})
	// NotEnforcing tells which consumers take no notice of CRLs, and why; at most 20 texts count, of 200 bytes each. It is
	// asked again from time to time. May be nil.
	NotEnforcing func() []string
	// Apply takes roots and CRLs over; both were verified on their own. An error refuses them, and is told to the server. What was
	// refused is tried again from time to time, and once what is served has changed.
	Apply func(*trust.Bundle) error
	// Consumers tells what is known of those who are served (decision D1), and a channel that is closed when that changes. It
	// does not block. May be nil.
	Consumers func() (*chanceryv1.ConsumersState, <-chan struct{})
	// Names tells of which foreign trust domains roots are missing, and which names are asked for of trust domains that the own one was
	// before, or is about to leave. It does not block. May be nil.
	Names func() (unknown, former []string)
	// Reissue is told which issuers' SVIDs should be replaced within a time; again and again while that is so. May be nil.
	Reissue func(issuers [][]byte, within time.Duration)
}

// Sync keeps roots and CRLs as the server has them, over a stream that it opens again whenever it ends, until ctx ends.
// An update that fails any check is refused as a whole: the last good one stays. A server that does not know Sync is
// asked again from time to time.
func (c *Client) Sync(ctx context.Context, s SyncConfig) error {
	p := pacing{backoff: firstBackoff}
	for ctx.Err() == nil {
		began := time.Now()
		err := c.syncOnce(ctx, s)
		if ctx.Err() != nil {
			return nil
		}
		wait, say := p.after(err, time.Since(began))
		if say != "" {
			c.config.Logger.Warn(say, "server", strings.Join(c.config.Servers, ","), "reason", err.Error(), "retry_in", wait.Round(time.Millisecond).String())
		} else {
			c.config.Logger.Debug("the stream ended as it should; opening another one", "reason", err.Error(), "retry_in", wait.Round(time.Millisecond).String())
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
	return nil
}

// pacing spaces the tries of Sync.
type pacing struct {
	backoff time.Duration
	told    bool // that the server does not know Sync
}

// after returns how long to wait after a stream that has lived for a while, and what to say; nothing if it was said, or if
// the server sent the agent on its way, as it does before it stops and with each stream that has grown old.
func (p *pacing) after(err error, lived time.Duration) (wait time.Duration, say string) {
	if status.Code(err) == codes.Unimplemented { // an older server: that is no trouble, and no news the second time
		if !p.told {
			say = "the server does not know Sync: revocations do not reach this agent"
		}
		p.told = true
		return jitter(withoutSync), say
	}
	p.told = false
	if lived > steady {
		p.backoff = firstBackoff
	}
	wait = jitter(p.backoff)
	r, refused := errors.AsType[*Refused](err)
	if refused && r.After > 0 {
		wait += min(r.After, maxBackoff)
	}
	p.backoff = min(2*p.backoff, maxBackoff)
	switch {
	case refused && r.Reason == reasonMove:
		return wait, ""
	case errors.Is(err, errDisowned):
		return wait, ""
	case toldToGo(err): // nobody said when to come, and all may be told at once
		return wait + mrand.N(moveSpread), ""
	}
	return wait, "not in touch with the server; the last good roots and CRLs stay"
}

// jitter spreads a fleet whose server came back: from a half to one and a half.
func jitter(d time.Duration) time.Duration { return d/2 + mrand.N(d) }

// syncOnce opens one stream, with the credentials of this moment, and follows it to its end. Another server is tried only
// while there is no stream that has brought anything.
func (c *Client) syncOnce(ctx context.Context, s SyncConfig) error {
	return c.ask(ctx, func(ctx context.Context, conn *grpc.ClientConn, t turn) error {
		began, err := c.follow(ctx, conn, s, t)
		if began {
			return &over{err}
		}
		return err
	})
}

// talk is one stream.
type talk struct {
	*Client
	config SyncConfig
	stream grpc.BidiStreamingClient[chanceryv1.SyncRequest, chanceryv1.SyncUpdate]
	opened time.Time
	known  logs // that were seen before

	state, sent *chanceryv1.SyncRequest // what is to be said, and what was said last; nil before
	sentAt      time.Time
	newest      uint64                 // generation of the bundle that was applied last
	open        *chanceryv1.SyncUpdate // that was refused or put off last; nil if it was not
	why         string                 // that was said of it last
	reissue     *chanceryv1.Reissue    // of the last update
	older       bool                   // the last update was older than what another server has sent
	behind      time.Time              // since when that, or what answers have brought, is newer than what this stream brings; zero: it is not
	patience    time.Duration          // with that
	leave       func()                 // makes the connection unknown to other calls; nil before the first update
	looked      *trust.Bundle          // that the server's certificate was last held against; nil: none
	foreign     string                 // what was wrong last with what was said of foreign trust domains
	disowned    <-chan time.Time       // ends the stream, whose server is vouched for no longer; nil for none
}

// follow opens one stream and follows it to its end. It began once an update has come.
func (c *Client) follow(ctx context.Context, conn *grpc.ClientConn, s SyncConfig, t turn) (began bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := &talk{Client: c, config: s, known: c.seen(), opened: time.Now(), state: new(chanceryv1.SyncRequest),
		patience: cmp.Or(c.config.behind, behindTime)}
	w.patience += mrand.N(w.patience / 2) // a fleet should not leave all at once
	w.stream, err = chanceryv1.NewIssuanceClient(conn).Sync(ctx, grpc.MaxCallRecvMsgSize(maxUpdate))
	if err != nil {
		return false, refusedBy(err)
	}
	updates, ended := receive(ctx, w.stream)
	patience := firstUpdate
	if !t.last {
		patience = answerTime
	}
	silence := time.NewTimer(patience)
	defer silence.Stop()
	again := time.NewTicker(reportEvery)
	defer again.Stop()
	connected := c.config.Metrics.connected
	for {
		next, err := w.say()
		if err != nil {
			return began, refusedBy(drain(updates, ended)) // what Send returns does not say why
		}
		select {
		case u := <-updates:
			if !began {
				began = true
				silence.Stop()
				connected.Inc()
				defer connected.Dec()
				w.leave = c.line.Join(&standing.Connection{To: t.to, Only: t.all == 1, Conn: conn})
				defer w.leave()
			}
			w.hear(u)
		case <-next.changed:
			w.retry()
		case <-next.moved:
		case <-next.asked:
		case <-next.wait:
		case <-again.C:
			w.retry()
		case err := <-ended:
			return began, refusedBy(err)
		case <-w.late():
			return began, errBehind
		case <-w.disowned:
			return began, errDisowned
		case <-silence.C:
			return began, fmt.Errorf("%w for %s", errSilent, patience)
		}
	}
}

// hear takes in what the server says. An update of version 0 brings naming alone.
func (w *talk) hear(u *chanceryv1.SyncUpdate) {
	if t := w.Client.config.Naming; t != nil {
		t.Take(u.GetNaming())
	}
	if u.GetVersion() == 0 {
		return
	}
	w.line.Ask(u.GetReissue())
	w.seeCheckpoints(u.GetCheckpoints(), w.known)
	w.seeMark(u.GetDocumentMark())
	w.take(u)
	w.takeForeign(u.GetFederation())
}

// takeForeign takes over what is said of foreign trust domains. Whatever is wrong with it does not keep roots and CRLs from being taken.
func (w *talk) takeForeign(m *chanceryv1.SignedFederation) {
	f := w.Client.config.Foreign
	if f == nil || m == nil {
		return
	}
	err := f.Take(m)
	if err == nil {
		w.foreign = ""
		return
	}
	if w.foreign == err.Error() {
		return
	}
	w.foreign = err.Error()
	if _, older := errors.AsType[*trust.Older](err); older {
		w.Client.config.Logger.Info("this server knows less of foreign trust domains than one before", "reason", err.Error())
		return
	}
	w.Client.config.Logger.Error("what the server says of foreign trust domains is refused; what was said before stands", "reason", err.Error())
}

// cues are what to wait for before something is said.
type cues struct {
	changed <-chan struct{} // of what is served,
	moved   <-chan struct{} // of consumers,
	asked   <-chan struct{} // and of the services that are asked for
	wait    <-chan time.Time
}

// say tells the server what has changed. What is known of consumers alone is said at most once a second, but at once when the last
// of them has reached the newest generation. It returns what to wait for: that more changes, or that it may be said.
func (w *talk) say() (next cues, err error) {
	var served []*trust.Identity
	served, next.changed = w.config.Served()
	w.state.Reads = readsKin
	w.state.Served, w.state.NotEnforcing, w.state.DocumentMark = servedOf(served), w.config.notEnforcing(), w.highest()
	if w.config.Consumers != nil {
		w.state.Consumers, next.moved = w.config.Consumers()
	}
	if t := w.Client.config.Naming; t != nil {
		w.state.Services, next.asked = t.Asked()
	}
	if w.config.Names != nil {
		unknown, former := w.config.Names()
		w.state.UnknownAuthorities, w.state.FormerNames = unknown[:min(len(unknown), maxNames)], former[:min(len(former), maxNames)]
	}
	if w.sent != nil && proto.Equal(w.sent, w.state) {
		return next, nil
	}
	if left := consumersEvery - time.Since(w.sentAt); w.sent != nil && left > 0 && w.reached() == 0 {
		before := w.sent.Consumers
		w.sent.Consumers = w.state.Consumers
		alone := proto.Equal(w.sent, w.state)
		if w.sent.Consumers = before; alone {
			next.moved, next.wait = nil, time.After(left)
			return next, nil
		}
	}
	if err := w.stream.Send(w.state); err != nil {
		return cues{}, err
	}
	w.sent, w.sentAt = proto.CloneOf(w.state), time.Now()
	return next, nil
}

// reached returns the newest generation, if all consumers have it and the server does not know yet; else 0.
func (w *talk) reached() uint64 {
	if g := w.state.GetConsumers().GetGeneration(); w.newest > 0 && g >= w.newest && w.sent.GetConsumers().GetGeneration() < w.newest {
		return w.newest
	}
	return 0
}

// highest returns the highest mark that any server has sent; nil before the first.
func (c *Client) highest() *chanceryv1.DocumentMark {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mark
}

// seeMark keeps a server's mark if it is the highest so far, for servers that are told of it later (decision D9). What it
// says of the version is all that is understood here.
func (c *Client) seeMark(m *chanceryv1.DocumentMark) {
	if len(m.GetMac()) > maxMark {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.GetVersion() > c.mark.GetVersion() {
		c.mark = &chanceryv1.DocumentMark{Version: m.GetVersion(), Mac: m.GetMac(), Tainted: m.GetTainted()}
	}
}

// drain waits for the end of a stream.
func drain(updates <-chan *chanceryv1.SyncUpdate, ended <-chan error) error {
	for {
		select {
		case <-updates:
		case err := <-ended:
			return err
		}
	}
}

// receive reads a stream until it or ctx ends.
func receive(ctx context.Context, stream grpc.BidiStreamingClient[chanceryv1.SyncRequest, chanceryv1.SyncUpdate]) (<-chan *chanceryv1.SyncUpdate, <-chan error) {
	updates, ended := make(chan *chanceryv1.SyncUpdate), make(chan error, 1)
	go func() {
		for {
			u, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				err = errors.New("the server ended the stream")
			}
			if err != nil {
				ended <- err
				return
			}
			select {
			case updates <- u:
			case <-ctx.Done():
				return
			}
		}
	}()
	return updates, ended
}

// urge passes on which SVIDs should be replaced.
func (w *talk) urge() {
	if r := w.reissue; r != nil && w.config.Reissue != nil && len(r.GetIssuers()) <= trust.MaxCRLs {
		w.config.Reissue(r.GetIssuers(), min(max(r.GetWithin().AsDuration(), 0), maxWithin))
	}
}

// retry takes the last update again if it was not applied: what stood against it may have changed.
func (w *talk) retry() {
	w.urge() // a new SVID may be of an old issuer again
	if w.open != nil {
		w.take(w.open)
	}
}

// take applies an update or refuses it, and notes which. What is older than what another server has sent, when a stream begins, is
// neither: that server is about to hear of it.
func (w *talk) take(u *chanceryv1.SyncUpdate) {
	w.reissue = u.GetReissue()
	w.urge()
	metrics, logger := w.Client.config.Metrics, w.Client.config.Logger
	bundle, err := w.readUpdate(u, time.Now())
	if err == nil {
		err = w.config.Apply(bundle)
	}
	older, is := errors.AsType[*trust.Older](err)
	if w.older = is; is && w.state.GetAcknowledged() == 0 && time.Since(w.opened) < catchUp {
		w.open = u
		if w.why != older.Error() {
			w.why = older.Error()
			metrics.updates.WithLabelValues("older").Inc()
			logger.Info("this server has older CRLs or roots than one before; waiting for it to catch up", "version", u.GetVersion(), "reason", w.why)
		}
		return
	}
	if err != nil {
		again := w.open == u && w.state.GetRefused() != ""
		w.open, w.state.Refused = u, clip(err.Error(), maxRefusal)
		if !again || w.why != err.Error() {
			metrics.updates.WithLabelValues("refused").Inc()
			logger.Error("roots and CRLs from the server refused; the last good ones stay", "version", u.GetVersion(), "reason", err.Error())
		}
		w.why = err.Error()
		return
	}
	w.mu.Lock()
	w.last = bundle
	w.mu.Unlock()
	w.open, w.why, w.newest = nil, "", bundle.Generation()
	w.state.Acknowledged, w.state.Refused = u.GetVersion(), ""
	metrics.updates.WithLabelValues("applied").Inc()
	metrics.lastUpdate.SetToCurrentTime()
	w.look()
	logger.Debug("roots and CRLs taken over", "version", u.GetVersion(), "generation", bundle.Generation(), "crls", len(bundle.CRLs().DER()))
}

// look sees whether what is trusted now vouches for the server of the stream, as it did when that began. Its key may be another's by
// now (decision D6), who would keep the stream for as long as it likes. That a certificate has ended meanwhile says nothing.
func (w *talk) look() {
	p, _ := peer.FromContext(w.stream.Context())
	bundle, err := w.serverBundle()
	if p == nil || err != nil || w.disowned != nil || w.looked != nil && w.looked.SameRoots(bundle) && w.looked.CRLs().Equal(bundle.CRLs()) {
		return
	}
	w.looked = bundle
	info, _ := p.AuthInfo.(credentials.TLSInfo)
	_, _, err = trust.Verify(info.State.PeerCertificates, bundle.Of, time.Now())
	if _, ended := errors.AsType[x509.CertificateInvalidError](err); err != nil && !ended {
		w.Client.config.Logger.Info("nothing vouches any more for the certificate that the server has shown on this stream; opening another one", "reason", err.Error())
		w.leave()
		w.disowned = time.After(mrand.N(cmp.Or(w.Client.config.behind, leaveSpread)))
	}
}

// late returns what ends the stream if its server stays behind another one; nil if it is not.
func (w *talk) late() <-chan time.Time {
	newest := w.Client.config.Anchor.Bundle()
	if !w.older && (w.newest == 0 || newest == nil || newest.Generation() <= w.newest) {
		w.behind = time.Time{}
		return nil
	}
	if w.behind.IsZero() {
		w.behind = time.Now()
	}
	return time.After(w.patience - time.Since(w.behind))
}

// readUpdate checks all that can be checked of an update by itself, and against the one before.
func (c *Client) readUpdate(u *chanceryv1.SyncUpdate, now time.Time) (*trust.Bundle, error) {
	c.mu.Lock()
	last := c.last
	c.mu.Unlock()
	return c.config.Anchor.Update(u, last, now)
}

// servedOf says what is served, in an order that does not change by itself.
func servedOf(ids []*trust.Identity) []*chanceryv1.ServedSvid {
	var out []*chanceryv1.ServedSvid
	for _, id := range ids[:min(len(ids), maxServed)] {
		hash := sha256.Sum256(id.Leaf().Raw)
		out = append(out, &chanceryv1.ServedSvid{
			SpiffeId: id.ID.String(), Serial: id.Leaf().SerialNumber.Bytes(), CertificateHash: hash[:], NotAfter: timestamppb.New(id.NotAfter()),
		})
	}
	slices.SortFunc(out, func(a, b *chanceryv1.ServedSvid) int { return cmp.Compare(a.GetSpiffeId(), b.GetSpiffeId()) })
	return out
}

func (s *SyncConfig) notEnforcing() []string {
	if s.NotEnforcing == nil {
		return nil
	}
	texts := s.NotEnforcing()
	texts = texts[:min(len(texts), 20)]
	for i, t := range texts {
		texts[i] = clip(t, 200)
	}
	return texts
}

// clip bounds a text and keeps it UTF-8.
func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "")
}
