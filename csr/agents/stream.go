package agents

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr/evidence"
)

// Caller is who opened a stream.
type Caller struct {
	ID     string // as it authenticated
	Remote string
	Place  string // what bounds how many streams it may have: its node, pod or address
	// Ends is when the credential ends by which the stream was opened; zero if that is not known.
	Ends time.Time
	// MaxAge is how old the caller's connection gets; the stream ends somewhat earlier. 0 = DefaultMaxAge.
	MaxAge time.Duration
}

// How many messages of an agent are read: a second over time, and at once. More wait where they are.
const (
	messageRate  = 5
	messageBurst = 50
)

// ErrBusy: there are too many streams.
var ErrBusy = errors.New("too many Sync streams")

// Serve serves one stream until it ends, at the latest a while after the caller's credential.
func (h *Hub) Serve(c Caller, g grpc.ServerStream) error {
	s := &stream{id: c.ID, remote: c.Remote, place: c.ID + " " + c.Place, look: time.NewTimer(time.Hour)} // set where there is something to come
	defer s.look.Stop()
	if err := h.join(s); err != nil {
		return err
	}
	defer h.leave(s)
	over := time.NewTimer(c.life(time.Now()))
	defer over.Stop()
	ctx, cancel := context.WithCancelCause(g.Context())
	defer cancel(nil)
	go func() { // ends with the stream, at the latest once this function has returned
		consumers := h.config.Ledger.Open(c.ID, c.Place, c.Remote)
		defer consumers.Close()
		cancel(h.receive(s, consumers, g))
	}()
	for {
		n, changed, _ := h.next(s, time.Now())
		if changed == nil {
			m, err := h.encode(s, n)
			if err != nil {
				return err
			}
			if err := g.SendMsg(m); err != nil {
				return err
			}
			continue
		}
		select {
		case <-ctx.Done():
			if err := context.Cause(ctx); !errors.Is(err, io.EOF) && !errors.Is(err, context.Canceled) {
				return err
			}
			return nil
		case <-h.ending:
			return &moved{"the server is stopping", stopSpread}
		case <-over.C:
			return &moved{"the stream has come to its end; open another one", moveSpread}
		case <-changed:
		case <-s.look.C:
		}
	}
}

// encode returns what a stream is sent.
func (h *Hub) encode(s *stream, n news) (*encoded, error) {
	m := new(encoded)
	if n.update != nil {
		own, err := proto.Marshal(&chanceryv1.SyncUpdate{
			Version: n.update.version, Checkpoints: h.config.Checkpoints(), DocumentMark: h.config.Mark(), Reissue: n.reissue,
		})
		if err != nil {
			return nil, fmt.Errorf("encoding an update: %w", err)
		}
		m.parts = append(m.parts, mem.SliceBuffer(n.update.shared), mem.SliceBuffer(own))
	}
	if !n.named {
		return m, nil
	}
	if parts := h.parts(s); m.parts == nil {
		m.parts = parts
	} else {
		m.parts = append(m.parts, parts...)
	}
	return m, nil
}

func (h *Hub) join(s *stream) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.streams) >= maxAgents || h.places[s.place] >= maxOfOnePlace {
		return ErrBusy
	}
	h.streams[s] = struct{}{}
	h.places[s.place]++
	return nil
}

func (h *Hub) leave(s *stream) {
	h.naming.leave(s)
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.streams, s)
	h.keep(s, nil)
	h.keepFormer(s, nil)
	if h.places[s.place]--; h.places[s.place] == 0 {
		delete(h.places, s.place)
	}
}

// receive takes what the agent says until the stream ends.
func (h *Hub) receive(s *stream, consumers *evidence.Stream, g grpc.ServerStream) error {
	pace := rate.NewLimiter(messageRate, messageBurst)
	told := uint64(0) // the highest version that Seen knows by this stream
	var unknown []string
	for {
		if err := pace.Wait(g.Context()); err != nil {
			return err
		}
		m := new(chanceryv1.SyncRequest)
		if err := g.RecvMsg(m); err != nil {
			return err
		}
		if err := h.take(s, m); err != nil {
			return err
		}
		h.ask(s, m.GetServices())
		unknown = h.unknown(m.GetUnknownAuthorities(), unknown)
		consumers.Reads(m.GetReads())
		if err := consumers.Say(m.GetConsumers()); err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
		if mark := m.GetDocumentMark(); h.config.Seen != nil && mark.GetVersion() > told && mark.GetVersion() > h.config.Mark().GetVersion() {
			told = mark.GetVersion()
			h.config.Seen(g.Context(), mark)
		}
	}
}

func (h *Hub) take(s *stream, m *chanceryv1.SyncRequest) error {
	if n := len(m.GetServed()); n > maxServed {
		return status.Errorf(codes.InvalidArgument, "%d SVIDs are served; at most %d can be reported", n, maxServed)
	}
	for _, x := range m.GetServed() {
		if len(x.GetSpiffeId()) > 2048 || len(x.GetSerial()) > 20 || len(x.GetCertificateHash()) > 32 {
			return status.Errorf(codes.InvalidArgument, "an SVID is reported with an ID of %d bytes, a serial of %d, a hash of %d; at most 2048, 20 and 32 are read",
				len(x.GetSpiffeId()), len(x.GetSerial()), len(x.GetCertificateHash()))
		}
	}
	if n := len(m.GetDocumentMark().GetMac()); n > maxMark {
		return status.Errorf(codes.InvalidArgument, "a document's mark has %d bytes; at most %d are read", n, maxMark)
	}
	if err := evidence.Check(m.GetConsumers(), time.Now()); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if err := cmp.Or(checkServices(m.GetServices()), checkDomains(m)); err != nil {
		return err
	}
	words := m.GetNotEnforcing()
	if len(words) > maxWords {
		words = words[:maxWords]
	}
	for i := range words {
		words[i] = shorten(words[i])
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, open := h.streams[s]; !open {
		return nil
	}
	if n := m.GetAcknowledged(); n >= uint64(h.start.UnixMicro()) && n <= s.sent && n > s.acknowledged {
		s.acknowledged = n
	}
	if m.GetRefused() != "" && s.refused == "" && h.gone != nil {
		h.gone.Inc()
	}
	s.refused, s.notEnforcing = shorten(m.GetRefused()), words
	h.keep(s, m.GetServed())
	h.keepFormer(s, m.GetFormerNames())
	return nil
}

// sizeOf is what an SVID in a report takes, more or less.
func sizeOf(x *chanceryv1.ServedSvid) int {
	return 120 + len(x.GetSpiffeId()) + len(x.GetSerial()) + len(x.GetCertificateHash())
}

// keep replaces the report of a stream, as far as there is room. Caller holds mu.
func (h *Hub) keep(s *stream, served []*chanceryv1.ServedSvid) {
	h.kept -= len(s.served)
	h.bytes -= s.bytes
	h.byPlace[s.place] -= s.bytes
	room := min(maxKeptBytes-h.bytes, maxPlaceBytes-h.byPlace[s.place])
	n := 0
	for s.bytes = 0; n < len(served) && h.kept+n < maxKept && s.bytes+sizeOf(served[n]) <= room; n++ {
		s.bytes += sizeOf(served[n])
	}
	s.served, s.omitted = served[:n], uint64(len(served)-n)
	if n < len(served) { // the rest should not be held in memory
		s.served = slices.Clone(s.served)
	}
	h.kept += n
	h.bytes += s.bytes
	if h.byPlace[s.place] += s.bytes; h.byPlace[s.place] == 0 {
		delete(h.byPlace, s.place)
	}
}

func shorten(s string) string {
	if len(s) <= maxWord {
		return s
	}
	return strings.ToValidUTF8(s[:maxWord], "") + "..."
}

// APIs as Issued has them.
const (
	Istio  = "istio"
	Native = "native"
)

// maxSaid bounds what NotEnforcing says.
const maxSaid = 100

// NotEnforcing says which consumers do not enforce CRLs, as far as it is known here (decision D23).
func (h *Hub) NotEnforcing(now time.Time) []string {
	out, reported := h.behind()
	var istio, native []string
	h.issuedMu.Lock()
	for who, end := range h.issued {
		switch {
		case now.After(end):
			delete(h.issued, who)
		case who.api == Istio:
			istio = append(istio, who.id)
		case !reported[who.id]:
			native = append(native, who.id)
		}
	}
	h.issuedMu.Unlock()
	if len(istio) > 0 {
		out = append(out, some(istio)+" have certificates by the Istio API, whose proxies get no CRL from here")
	}
	if len(native) > 0 {
		out = append(out, some(native)+" have certificates, and no agent that is connected to this server says that it serves them")
	}
	if n := len(out); n > maxSaid {
		out = append(out[:maxSaid], fmt.Sprintf("and %d more", n-maxSaid))
	}
	return out
}

// behind says which agents lack the last update, and what agents say of their consumers; and the IDs that they report.
func (h *Hub) behind() (out []string, reported map[string]bool) {
	reported = map[string]bool{}
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.streams {
		who := fmt.Sprintf("agent %s at %s", s.id, s.remote)
		switch {
		case s.refused != "":
			out = append(out, who+" refused the last update: "+s.refused)
		case h.current != nil && s.acknowledged < h.current.content:
			out = append(out, who+" has not acknowledged the last update yet")
		}
		for _, w := range s.notEnforcing {
			out = append(out, who+": "+w)
		}
		for _, x := range s.served {
			reported[x.GetSpiffeId()] = true
		}
	}
	slices.Sort(out)
	return out, reported
}

// some names the first of some identities.
func some(ids []string) string {
	slices.Sort(ids)
	const most = 5
	if n := len(ids); n > most {
		return fmt.Sprintf("%s and %d more", strings.Join(ids[:most], ", "), n-most)
	}
	return strings.Join(ids, ", ")
}
